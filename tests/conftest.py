"""Import mindnlp_dp first in all suites, which makes MindNLP importable: test files import `mindnlp` before it."""

from hypothesis import settings

import mindnlp_dp  # noqa: F401

# A test does not fail because the machine is busy.
settings.register_profile("without deadlines", deadline=None)
settings.load_profile("without deadlines")
