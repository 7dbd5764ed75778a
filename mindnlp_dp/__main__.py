"""``python -m mindnlp_dp`` is ``mindnlp-dp``."""

import sys

from .launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
