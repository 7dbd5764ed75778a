"""MindSpore's executor of operators that are called one by one, which also records what autograd needs.

It is the same object under all of MindSpore's names for its module; that of before 2.9 brings a warning with it.
"""

from __future__ import annotations

try:
    from mindspore.graph.api import _pynative_executor as pynative_executor
except ImportError:
    from mindspore.common.api import _pynative_executor as pynative_executor

__all__ = ["pynative_executor"]
