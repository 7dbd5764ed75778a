"""This module is the only place that lists the supported versions of Python, MindSpore and MindNLP.

setup.py and scripts/environment.sh read this file directly, before any package is installed.
"""

from __future__ import annotations

import functools
import importlib.metadata
import sys

__version__ = "0.1.0"

# The oldest and the newest supported version.
PYTHON = ((3, 9), (3, 12))

MINDSPORE = ">=2.5.0,<2.11.0"

MINDNLP = "==0.4.1"

# The other MindNLP, which uses the Trainer of Transformers, and the MindSpore versions with which it was tested.
OTHER_MINDNLP, OTHER_MINDSPORE = "==0.5.1", ">=2.8.0,<2.9.0"

# Other versions of these packages break the other MindNLP. They are not requirements of this package.
BESIDE_OTHER_MINDNLP = ("transformers>=4.55,<4.56", "accelerate==1.10.1", "safetensors<0.8")

# The versions to install: the newest that pass all test suites and are as fast as earlier ones. MindSpore 2.10 has no
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
    """Return the series of the installed MindNLP, "0.4" or "0.5"; "0.4" if none is installed."""
    try:
        installed = importlib.metadata.version("mindnlp")
    except importlib.metadata.PackageNotFoundError:
        return "0.4"
    return "0.5" if installed.startswith("0.5") else "0.4"


@functools.cache
def mindspore_is_before(version: str) -> bool:
    """Return whether the installed MindSpore is older than ``version``."""
    import mindspore
    from packaging.version import Version

    return Version(mindspore.__version__) < Version(version)


class UnsupportedVersionsError(ImportError):
    """Raised when the installed MindNLP and MindSpore are not known to work together."""


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
