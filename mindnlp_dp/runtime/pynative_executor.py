"""Imports MindSpore's executor of eager operators (PyNative), which records them for autograd, or does not.

It is the same object under all of MindSpore's names for its module; the name from before 2.9 gives a warning.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

try:
    from mindspore.graph.api import _pynative_executor as pynative_executor
except ImportError:
    from mindspore.common.api import _pynative_executor as pynative_executor

__all__ = ["pynative_executor", "recording"]


@contextlib.contextmanager
def recording(is_on: bool) -> Iterator[None]:
    """Record operators in this block for autograd, or do not, whatever is done outside of it."""
    before = pynative_executor.enable_grad()
    pynative_executor.set_enable_grad(is_on)
    try:
        yield
    finally:
        pynative_executor.set_enable_grad(before)
