"""Which Python, MindSpore and MindNLP this package is for: the one place that says so.

setup.py and scripts/environment.sh read this file as it stands, before anything is installed.
"""

from __future__ import annotations

import functools
import importlib.metadata
import sys

__version__ = "0.1.0"

# From the first to the last.
PYTHON = ((3, 9), (3, 12))
MINDSPORE = ">=2.5.0,<2.11.0"
MINDNLP = "==0.4.1"
# The other MindNLP, whose Trainer is that of Transformers, and the MindSpore on which it was tried.
OTHER_MINDNLP, OTHER_MINDSPORE = "==0.5.1", ">=2.8.0,<2.9.0"
# What else breaks the other MindNLP, and is not asked for by this package.
BESIDE_OTHER_MINDNLP = ("transformers>=4.55,<4.56", "accelerate==1.10.1", "safetensors<0.8")
# Of these, the ones to install: the newest on which all suites run, as fast as those before it. MindSpore 2.10 has no
# wheels for Python 3.9.
BEST_MINDSPORE = "2.10.0" if sys.version_info >= (3, 10) else "2.9.0"
BEST_MINDNLP = "0.4.1"

WORKING_PAIRS = (
    "MindNLP 0.4.1 works with MindSpore 2.7.0 to 2.10.x (tried on CPU), and is accepted with 2.5 and 2.6 "
    f'(not tried here); pip install "mindspore=={BEST_MINDSPORE}" "mindnlp=={BEST_MINDNLP}". '
    "The Trainer of MindNLP 0.5.1 works with MindSpore 2.8 (docs/mindnlp_0_5.md)"
)


@functools.cache
def mindnlp_series() -> str:
    """ "0.4" or "0.5", by the MindNLP that is installed; "0.4" where there is none."""
    try:
        installed = importlib.metadata.version("mindnlp")
    except importlib.metadata.PackageNotFoundError:
        return "0.4"
    return "0.5" if installed.startswith("0.5") else "0.4"


@functools.cache
def mindspore_is_before(version: str) -> bool:
    """Whether the MindSpore that is installed is older than ``version``."""
    import mindspore
    from packaging.version import Version

    return Version(mindspore.__version__) < Version(version)


class UnsupportedVersionsError(ImportError):
    """The installed MindNLP and MindSpore are not known to work together."""


def check_versions(mindnlp: str, mindspore: str) -> None:
    """Raise :class:`UnsupportedVersionsError` unless this pair is known to work."""
    from packaging.specifiers import SpecifierSet

    def fits(accepted: str, installed: str) -> bool:
        return SpecifierSet(accepted).contains(installed, prereleases=True)

    pairs = ((MINDNLP, MINDSPORE), (OTHER_MINDNLP, OTHER_MINDSPORE))
    known = any(fits(of_mindnlp, mindnlp) and fits(of_mindspore, mindspore) for of_mindnlp, of_mindspore in pairs)
    if not known:
        raise UnsupportedVersionsError(
            f"MindNLP {mindnlp} with MindSpore {mindspore} is not a pair that works. {WORKING_PAIRS}"
        )
