"""Run ``main()`` of a module of this package without searching the current folder for what that imports.

``python run_module.py MODULE ARGUMENTS...``

``python -m MODULE`` searches the current folder first, before the standard library: a ``tempfile.py`` that lies there
would be imported by every process of a job (CWE-427). The package is the one that this file belongs to, also where
another one is installed.
"""

import os
import sys

_HERE = os.path.dirname(os.path.realpath(__file__))
_ROOT = os.path.dirname(os.path.dirname(_HERE))


def command(python: str, module: str) -> list[str]:
    """The command line that does so."""
    return [python, os.path.join(_HERE, "run_module.py"), module]


def main() -> None:
    """The module's, with the arguments behind its name."""
    # Not there with PYTHONSAFEPATH.
    if sys.path and os.path.realpath(sys.path[0]) == _HERE:
        del sys.path[0]
    if _ROOT not in [os.path.realpath(entry) for entry in sys.path]:
        # The launcher was run from its source folder.
        sys.path.insert(0, _ROOT)
    # Only now: it lies where the current folder could have hidden it.
    import importlib

    module = sys.argv.pop(1)
    # An exit code, or None.
    sys.exit(importlib.import_module(module).main())


if __name__ == "__main__":
    main()
