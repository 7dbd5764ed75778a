"""These patches fix MindNLP 0.4.1's ``value_and_grad`` on newer versions of MindSpore."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

from mindnlp_dp.compat.import_hook import around
from mindnlp_dp.runtime.autograd import autograd_cleared_on_error


# Versions: MindNLP 0.4.1 on MindSpore 2.9+. Cause: grad(obj, grad, weights, grad_position, *args) of MindSpore's
# executor became grad(obj, grad, weights, grad_position, has_aux, *args), and takes MindNLP's first input for has_aux:
# "Can not find top cell for backward".
# Remove when: MindNLP passes has_aux where MindSpore expects it.
@around("mindnlp.core.autograd.function")
def _grad_with_has_aux(module: types.ModuleType) -> Iterator[None]:
    yield
    executor = module._pynative_executor
    if "has_aux" not in inspect.signature(executor.grad).parameters:
        return

    class Executor:
        """MindSpore's executor with the signature of ``grad`` that it had before ``has_aux``."""

        def __getattr__(self, name: str) -> Any:
            return getattr(executor, name)

        def __call__(self) -> Any:
            return executor()

        def grad(self, obj: Any, grad: Any, weights: Any, grad_position: Any, *args: Any) -> Any:
            return executor.grad(obj, grad, weights, grad_position, False, *args)

    module._pynative_executor = Executor()  # type: ignore[attr-defined]


# Versions: MindNLP 0.4.1 on MindSpore 2.7+. Cause: after an exception in a forward or backward pass, such as a label
# out of range, MindSpore keeps the record of that pass, and every later pass of the process gets gradients of zero.
# Remove when: gradients are correct in a process in which a backward pass has raised.
@around("mindnlp.core.autograd.function")
def _gradients_after_an_exception(module: types.ModuleType) -> Iterator[None]:
    yield
    stock = module.value_and_grad

    @functools.wraps(stock)
    def value_and_grad(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        return autograd_cleared_on_error(stock(*args, **kwargs))

    module.value_and_grad = value_and_grad  # type: ignore[attr-defined]
