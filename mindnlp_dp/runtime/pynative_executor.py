"""This module imports MindSpore's executor of eager operators (PyNative), which also records them for autograd.

It is the same object under all of MindSpore's names for its module; the name from before 2.9 gives a warning.
"""

from __future__ import annotations

try:
    from mindspore.graph.api import _pynative_executor as pynative_executor
except ImportError:
    from mindspore.common.api import _pynative_executor as pynative_executor

__all__ = ["pynative_executor"]
