"""MindSpore's autograd in a process in which a pass has failed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def autograd_cleared_on_error(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which computes gradients; when it raises, nothing of its pass is left in MindSpore's autograd.

    MindSpore keeps its record of a pass that did not come to its end, and takes later ones for parts of it: their
    gradients are zero.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        from mindspore.common.api import _pynative_executor

        try:
            return function(*args, **kwargs)
        except BaseException:
            _pynative_executor.clear_res()
            raise

    return call
