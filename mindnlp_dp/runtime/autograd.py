"""This module works around MindSpore's autograd after a pass that failed, and for parameters that no operator used."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any


def autograd_cleared_on_error(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``function``, which computes gradients, to clear MindSpore's autograd when it raises.

    MindSpore keeps its record of an unfinished pass, and treats later passes as parts of it: their gradients are zero.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        from mindnlp_dp.runtime.pynative_executor import pynative_executor

        try:
            return function(*args, **kwargs)
        except BaseException:
            pynative_executor.clear_res()
            raise

    return call


def as_leaf_parameters(parameters: Sequence[Any]) -> None:
    """Register all ``parameters`` with autograd, used or not; each only once.

    MindSpore 2.10 fails in a backward pass ("The pointer[leaf_node] is null") that asks for the gradient of a parameter
    that no graph has ever contained, such as one of an expert that got no token; 2.8 returns None. Remove this when
    2.10 is no longer supported, or returns None.
    """
    from mindnlp_dp.runtime.pynative_executor import pynative_executor

    new = [p for p in parameters if not getattr(p, "is_leaf_of_autograd", False)]
    pynative_executor.set_grad_flag(bool(new))
    for parameter in new:
        parameter.reshape(-1)
        parameter.is_leaf_of_autograd = True
    pynative_executor.set_grad_flag(False)
