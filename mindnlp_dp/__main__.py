"""``python -m mindnlp_dp`` is ``mindnlp-dp``."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
