"""Computes in a 16-bit type with weights that stay in float32, on which the optimizer works ("masters").

Units (:mod:`.fully_sharded.units`) cast the weights of a layer for its forward and backward pass, and gradients to
float32 before they are exchanged. With float16, whose small numbers are zero, the gradient is multiplied by a scale
where it enters the model, and divided by it where it leaves it (Micikevicius et al., *Mixed Precision Training*, 2018).
"""

from __future__ import annotations

import copy
import numbers
from collections.abc import Callable, Mapping
from typing import Any, Optional

import mindspore
import numpy as np
from mindspore.common._grad_function import _Function

from mindnlp_dp.communication.gradient_channel import open_gradient_channel
from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.communication.transports.mindspore.mindspore_transport import MindSporeChannel
from mindnlp_dp.runtime.devices import is_on_cpu

TYPES = ("bfloat16", "float16")

# What a model may return besides tensors.
_PLAIN = (numbers.Number, str, np.ndarray, type(None))

# The largest power of two that float16 has; after so many updates without an overflow, the scale is doubled.
_MOST, _UPDATES = 2.0**15, 1000


def check_param_dtype(param_dtype: Optional[str]) -> Optional[str]:
    """Return ``param_dtype``; raise ValueError if it is not a type to compute in, on this device."""
    if param_dtype is not None and param_dtype not in TYPES:
        raise ValueError(
            f"param_dtype must be {' or '.join(map(repr, TYPES))}, or None for float32; got {param_dtype!r}"
        )
    if param_dtype == "bfloat16" and is_on_cpu():
        raise ValueError(
            'param_dtype="bfloat16" needs a device: MindSpore has no operators in bfloat16 on a CPU. There, use '
            'init_process_group(matmul_precision="medium"), or try param_dtype="float16", which is slow'
        )
    return param_dtype


def check_chip(param_dtype: str, world: ProcessGroup) -> None:
    """Raise ValueError if the chips of the job do not have a type. A collective."""
    channel = open_gradient_channel(world) if world.on_device else None
    if isinstance(channel, MindSporeChannel):
        try:
            channel.check_types([param_dtype], None)
        except ValueError as error:
            raise ValueError(
                f'param_dtype={param_dtype!r}, and this chip has no {param_dtype}; use param_dtype="float16", or '
                "fp16=True of the Trainer's arguments"
            ) from error


class MixedPrecision:
    """The type in which a model computes, and the scale of its gradients; the model's attribute ``mixed_precision``.

    Attributes:
        dtype: "bfloat16" or "float16".
        scale: the factor of gradients inside the model; 1 for bfloat16. All ranks have the same, because all see that
            an averaged gradient is not finite.
    """

    def __init__(self, dtype: str, model: Any) -> None:
        self.dtype, self._model = dtype, model
        self.scale, self._num_finite = self._begin()
        # The units that cast the model's weights, which set this.
        self.units: Any = None

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
        """Continue from the state of a run; None is a new run, which begins with the largest scale."""
        self.scale, self._num_finite = (saved["scale"], saved["num_finite"]) if saved else self._begin()

    def _begin(self) -> tuple[float, int]:
        return (_MOST if self.dtype == "float16" else 1.0), 0

    def lowered(self, x: Any) -> Any:
        """Return a tensor in this type."""
        return x.astype(getattr(mindspore, self.dtype))

    def cast(self, inputs: Any) -> Any:
        """Return inputs with their tensors of float32 in this type, but labels as they are."""

        def lower(x: Any) -> Any:
            if not isinstance(x, mindspore.Tensor) or x.dtype != mindspore.float32:
                return x
            return self.lowered(x) if self.scale == 1 else _UnscaledGradient.apply(self, x)

        return _mapped(inputs, lower, copies=True)

    def uncast(self, output: Any) -> Any:
        """Return what a model has computed in float32; its gradient enters the model multiplied by the scale.

        Raises:
            TypeError: the output has parts in which tensors cannot be found, so that their gradient is not scaled.
        """
        floats = (mindspore.float16, mindspore.bfloat16, mindspore.float32)

        def widen(x: Any) -> Any:
            if isinstance(x, mindspore.Tensor):
                return _ScaledGradient.apply(self, x) if x.dtype in floats else x
            if self.scale != 1 and not isinstance(x, _PLAIN) and "Cache" not in type(x).__name__:
                raise TypeError(
                    f'param_dtype="float16": the model returns a {type(x).__name__}, in which its tensors cannot be '
                    "found; return tensors, tuples, lists or dictionaries of them"
                )
            return x

        return _mapped(output, widen, copies=False)

    def check_parameters(self) -> None:
        """Raise ValueError if the model has trainable parameters that it did not have when ``param_dtype`` was set."""
        known = {id(weight.own) for unit in self.units.by_name.values() for weight in unit.weights}
        new = [name for name, p in self._model.named_parameters() if p.requires_grad and id(p) not in known]
        if new:
            raise ValueError(
                f"{new[0]!r} trains, and was not in the model when its param_dtype was set; add adapters, heads and "
                "tokens first, and call parallelize(param_dtype=) or fully_shard(param_dtype=) after that"
            )

    def unscaled(self, gradient: Any) -> Any:
        """Return the gradient of a weight in float32, divided by the scale."""
        wide = gradient.astype(mindspore.float32)
        return wide if self.scale == 1 else wide * (1 / self.scale)


def mixed_precision_of(model: Any) -> Optional[MixedPrecision]:
    """Return how a model, or a model within it, computes in a 16-bit type; None if it does not.

    Raises:
        ValueError: several models in it have a ``param_dtype``.
    """
    modules = model.modules() if hasattr(model, "modules") else [model]
    found = {id(p): p for m in modules if isinstance(p := getattr(m, "mixed_precision", None), MixedPrecision)}
    if len(found) > 1:
        raise ValueError(
            f"{len(found)} models with a param_dtype are trained together; set that of one model that has them"
        )
    return next(iter(found.values()), None)


class _ScaledGradient(_Function):
    @staticmethod
    def forward(ctx: Any, precision: MixedPrecision, x: Any) -> Any:
        ctx.precision, ctx.dtype = precision, x.dtype
        return x.astype(mindspore.float32)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        scale = ctx.precision.scale
        return None, (gradient if scale == 1 else gradient * scale).astype(ctx.dtype)


class _UnscaledGradient(_Function):
    @staticmethod
    def forward(ctx: Any, precision: MixedPrecision, x: Any) -> Any:
        ctx.precision = precision
        return precision.lowered(x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return None, ctx.precision.unscaled(gradient)


def _mapped(value: Any, function: Callable[[Any], Any], *, copies: bool) -> Any:
    """Apply a function to the leaves of nested tuples, lists and dictionaries, but not to labels.

    ``copies`` says whether dictionaries are copied, and not changed.
    """
    if isinstance(value, dict):
        found = copy.copy(value) if copies else value
        for key in found:
            if key != "labels":
                found[key] = _mapped(found[key], function, copies=copies)
        return found
    if isinstance(value, (list, tuple)):
        mapped = [_mapped(each, function, copies=copies) for each in value]
        return type(value)(*mapped) if hasattr(value, "_fields") else type(value)(mapped)
    return function(value)
