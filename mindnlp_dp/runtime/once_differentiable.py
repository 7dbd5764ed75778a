"""Makes a second derivative of our own operators an error; without this it would silently be zero."""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Tensor
from mindspore.common._grad_function import _Function

from mindnlp_dp.runtime.arrays import dtype_name, from_host, to_host
from mindnlp_dp.runtime.pynative_executor import pynative_executor


class _Underivable(_Function):
    """Returns a copy of its first input; the backward pass raises, because second derivatives are not supported."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, *others: Tensor) -> Tensor:
        return from_host(to_host(result).copy(), dtype_name(result))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise NotImplementedError(
            "mindnlp_dp's operators have first derivatives only, and a second one is asked for; for CPU kernels, "
            'mindnlp_dp.init_process_group(kernels="mindspore") keeps MindSpore\'s own'
        )


def once_differentiable(backward: Any) -> Any:
    """Wrap a backward pass so that differentiating its results raises instead of giving a wrong gradient."""

    def guarded(ctx: Any, gradient: Tensor) -> Any:
        # The gradient norm reports an overflow; NumPy's warnings are not needed.
        with np.errstate(all="ignore"):
            results = backward(ctx, gradient)
        if not pynative_executor.grad_flag():
            return results
        depends_on = [gradient, *(x for x in ctx.saved_tensors if x is not None)]
        outputs = results if isinstance(results, tuple) else (results,)
        wrapped = [x if x is None else _Underivable.apply(x, *depends_on) for x in outputs]
        return tuple(wrapped) if isinstance(results, tuple) else wrapped[0]

    return guarded
