"""For all suites: MindNLP is importable. Test files sort their imports, and `mindnlp` sorts before `mindnlp_dp`."""

import mindnlp_dp  # noqa: F401
