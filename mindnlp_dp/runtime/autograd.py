"""MindSpore's autograd where it needs help: after a pass that failed, and of parameters that nothing used."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any


def autograd_cleared_on_error(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which computes gradients; when it raises, nothing of its pass is left in MindSpore's autograd.

    MindSpore keeps its record of a pass that did not come to its end, and takes later ones for parts of it: their
    gradients are zero.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        from .executor import pynative_executor

        try:
            return function(*args, **kwargs)
        except BaseException:
            pynative_executor.clear_res()
            raise

    return call


def make_leaves(parameters: Sequence[Any]) -> None:
    """Let autograd know all of these, used or not, once.

    MindSpore 2.10 fails in a backward pass ("The pointer[leaf_node] is null") that is asked for the gradient of a
    parameter which no graph has ever had, such as an expert's that got no token; 2.8 says that there is none. To be
    removed when 2.10 is not supported any more, or returns None.
    """
    from .executor import pynative_executor

    new = [p for p in parameters if not getattr(p, "is_leaf_of_autograd", False)]
    pynative_executor.set_grad_flag(bool(new))
    for parameter in new:
        parameter.reshape(-1)
        parameter.is_leaf_of_autograd = True
    pynative_executor.set_grad_flag(False)
