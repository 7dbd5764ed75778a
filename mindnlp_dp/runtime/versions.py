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

# The accepted versions. MindSpore has no upper bound: a version that is newer than the tested ones gives a warning.
MINDSPORE = ">=2.7.0"

MINDNLP = "==0.4.1"

# The other MindNLP, which uses the Trainer of Transformers.
OTHER_MINDNLP, OTHER_MINDSPORE = ">=0.5.1,<0.6", ">=2.8.0"

# The tested versions.
TESTED_MINDSPORE = ">=2.7.0,<2.11.0"

TESTED_OTHER_MINDNLP, TESTED_OTHER_MINDSPORE = "==0.5.1", ">=2.8.0,<2.9.0"

# Other versions of these packages break the other MindNLP. They are not requirements of this package.
BESIDE_OTHER_MINDNLP = ("transformers>=4.55,<4.56", "accelerate==1.10.1", "safetensors<0.8")

# The versions to install: the newest that pass all test suites and are as fast as earlier ones. MindSpore 2.10 has no
# wheels for Python 3.9.
BEST_MINDSPORE = "2.10.0" if sys.version_info >= (3, 10) else "2.9.0"

BEST_MINDNLP = "0.4.1"

_TESTED = "MindNLP 0.4.1 with MindSpore 2.7.0 to 2.10.x, and the Trainer of MindNLP 0.5.1 with MindSpore 2.8"

_TO_INSTALL = f'pip install "mindspore=={BEST_MINDSPORE}" "mindnlp=={BEST_MINDNLP}"'


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


def advice_for(error: ModuleNotFoundError) -> str:
    """Return the message of a module that is not installed, with the command that installs MindSpore or MindNLP."""
    if (error.name or "").partition(".")[0] not in ("mindspore", "mindnlp"):
        return str(error)
    return (
        f'{error}; on CPU: pip install "mindnlp-dp[cpu]"; on Ascend: MindSpore\'s wheel for your CANN '
        f'(https://www.mindspore.cn/install/en), then pip install "mindnlp=={BEST_MINDNLP}"'
    )


class UnsupportedVersionsError(ImportError):
    """Raised when the installed MindNLP and MindSpore do not work together."""


def check_versions(mindnlp: str, mindspore: str) -> str:
    """Return a warning if this pair of versions is newer than the tested ones, and an empty string if it was tested.

    Raises:
        UnsupportedVersionsError: one of the two is older than any that was tested, or of another series.
    """
    from packaging.specifiers import SpecifierSet

    def fits(*pairs: tuple[str, str]) -> bool:
        contain = [(SpecifierSet(of_mindnlp), SpecifierSet(of_mindspore)) for of_mindnlp, of_mindspore in pairs]
        return any(
            a.contains(mindnlp, prereleases=True) and b.contains(mindspore, prereleases=True) for a, b in contain
        )

    if fits((MINDNLP, TESTED_MINDSPORE), (TESTED_OTHER_MINDNLP, TESTED_OTHER_MINDSPORE)):
        return ""
    if fits((MINDNLP, MINDSPORE), (OTHER_MINDNLP, OTHER_MINDSPORE)):
        return (
            f"mindnlp_dp: MindNLP {mindnlp} with MindSpore {mindspore} is newer than the tested versions ({_TESTED}). "
            f"If it fails: {_TO_INSTALL}"
        )
    raise UnsupportedVersionsError(
        f"MindNLP {mindnlp} with MindSpore {mindspore} is not supported. Tested: {_TESTED}. {_TO_INSTALL}"
    )
