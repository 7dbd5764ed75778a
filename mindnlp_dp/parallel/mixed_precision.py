"""Computes in a 16-bit type with weights that stay in float32, on which the optimizer works ("masters").

Units (:mod:`.fully_sharded.units`) cast the weights of a layer for its forward and backward pass, and gradients to
float32 before they are exchanged. With float16, whose small numbers are zero, the gradient is multiplied by a scale
where it enters the model, and divided by it where it leaves it (Micikevicius et al., *Mixed Precision Training*, 2018).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

import mindspore
from mindspore.common._grad_function import _Function

from mindnlp_dp.communication.process_group import ProcessGroup

TYPES = ("bfloat16", "float16")

# The largest power of two that float16 has; after so many updates without an overflow, the scale is doubled.
_MOST, _UPDATES = 2.0**15, 1000


def check_param_dtype(param_dtype: Optional[str], group: Optional[ProcessGroup] = None) -> Optional[str]:
    """Return ``param_dtype``; raise ValueError if it is not a type to compute in, on the device of ``group``."""
    if param_dtype is not None and param_dtype not in TYPES:
        raise ValueError(
            f"param_dtype must be {' or '.join(map(repr, TYPES))}, or None for float32; got {param_dtype!r}"
        )
    if param_dtype == "bfloat16" and group is not None and not group.on_device:
        raise ValueError(
            'param_dtype="bfloat16" needs a device: MindSpore has no operators in bfloat16 on a CPU. There, use '
            'init_process_group(matmul_precision="medium"), or try param_dtype="float16", which is slow'
        )
    return param_dtype


class MixedPrecision:
    """The type in which a model computes, and the scale of its gradients; the model's attribute ``mixed_precision``.

    Attributes:
        dtype: "bfloat16" or "float16".
        scale: the factor of gradients inside the model; 1 for bfloat16. All ranks have the same, because all see that
            an averaged gradient is not finite.
    """

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.scale = _MOST if dtype == "float16" else 1.0
        self._num_finite = 0

    def reduce_scale(self) -> bool:
        """Halve the scale after an overflow; return whether the scale explains it."""
        self._num_finite = 0
        if self.scale <= 1:
            return False
        self.scale /= 2
        return True

    def count_update(self) -> None:
        """Count an update whose gradient was finite."""
        self._num_finite += 1
        if self.dtype == "float16" and self._num_finite >= _UPDATES and self.scale < _MOST:
            self.scale, self._num_finite = 2 * self.scale, 0

    def state(self) -> dict[str, Any]:
        return {"scale": self.scale, "num_finite": self._num_finite}

    def load_state(self, saved: Optional[Mapping[str, Any]]) -> None:
        if saved is not None:
            self.scale, self._num_finite = saved["scale"], saved["num_finite"]

    def cast(self, inputs: Any) -> Any:
        """Return inputs with their tensors of float32 in this type."""
        dtype = getattr(mindspore, self.dtype)
        return _on_tensors(inputs, (mindspore.float32,), lambda x: x.astype(dtype))

    def uncast(self, output: Any) -> Any:
        """Return what a model has computed in float32; its gradient enters the model multiplied by the scale."""
        floats = (mindspore.float16, mindspore.bfloat16, mindspore.float32)
        return _on_tensors(output, floats, lambda x: _ScaledGradient.apply(self, x))

    def unscaled(self, gradient: Any) -> Any:
        """Return the gradient of a weight in float32, divided by the scale."""
        wide = gradient.astype(mindspore.float32)
        return wide if self.scale == 1 else wide * (1 / self.scale)


def mixed_precision_of(model: Any) -> Optional[MixedPrecision]:
    """Return how a model computes in a 16-bit type, or None."""
    found = getattr(model, "mixed_precision", None)
    return found if isinstance(found, MixedPrecision) else None


class _ScaledGradient(_Function):
    @staticmethod
    def forward(ctx: Any, precision: MixedPrecision, x: Any) -> Any:
        ctx.precision, ctx.dtype = precision, x.dtype
        return x.astype(mindspore.float32)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        scale = ctx.precision.scale
        return None, (gradient if scale == 1 else gradient * scale).astype(ctx.dtype)


def _on_tensors(value: Any, dtypes: Sequence[Any], function: Callable[[Any], Any]) -> Any:
    """Apply a function to the tensors of these types in nested lists and dictionaries; a dictionary is changed."""
    if isinstance(value, mindspore.Tensor):
        return function(value) if value.dtype in dtypes else value
    if isinstance(value, dict):
        for key in value:
            value[key] = _on_tensors(value[key], dtypes, function)
        return value
    if type(value) in (list, tuple):
        return type(value)(_on_tensors(each, dtypes, function) for each in value)
    return value
