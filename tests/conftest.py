"""Import mindnlp_dp first in all suites, which makes MindNLP importable: test files import `mindnlp` before it."""

import mindnlp_dp  # noqa: F401
