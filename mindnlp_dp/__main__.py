"""This module makes ``python -m mindnlp_dp`` run the ``mindnlp-dp`` command."""

import sys

from mindnlp_dp.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
