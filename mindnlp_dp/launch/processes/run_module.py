"""Run ``main()`` of a module of this package without searching the current folder for its imports.

``python run_module.py MODULE ARGUMENTS...``

The launcher starts its processes this way. ``python -m MODULE`` searches the current folder before the standard
library: every process of a job would import a ``tempfile.py`` from there (CWE-427). The package is the one that this
file belongs to, even if another copy is installed.
"""

import os
import sys

_HERE = os.path.dirname(os.path.realpath(__file__))

# The folder of the package: this file is in mindnlp_dp/launch/processes/.
_ROOT = os.path.realpath(os.path.join(_HERE, *[os.pardir] * 3))


# A program that runs the ranks' Python in place of this interpreter, with the same arguments: a profiler, for example.
PYTHON_VARIABLE = "MINDNLP_DP_PYTHON"


def command(module: str, python: str = sys.executable) -> list[str]:
    """Return the command line that runs a module this way."""
    return [python, os.path.join(_HERE, "run_module.py"), module]


def main() -> None:
    """Run the module's ``main()``, with the arguments after its name."""
    # With PYTHONSAFEPATH this folder is not on the path.
    if sys.path and os.path.realpath(sys.path[0]) == _HERE:
        del sys.path[0]
    if _ROOT not in [os.path.realpath(entry) for entry in sys.path]:
        # The launcher was run from its source folder.
        sys.path.insert(0, _ROOT)
    # Imported only now, after the path was corrected: a module in this folder could have hidden it.
    import importlib

    module = sys.argv.pop(1)
    # main() returns an exit code or None.
    sys.exit(importlib.import_module(module).main())


if __name__ == "__main__":
    main()
