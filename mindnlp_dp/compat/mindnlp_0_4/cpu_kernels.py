"""These patches make functions that only MindNLP 0.4.1 has use our CPU kernels for calls that these support."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any, Optional

from mindnlp_dp.compat.import_hook import around
from mindnlp_dp.compat.shared_cpu_kernels import kernels
from mindnlp_dp.kernels.dispatch import are_on, supports
from mindnlp_dp.runtime.override import override


# Versions: MindNLP 0.4.1 on MindSpore 2.7+ on CPU. Cause: as in mindnlp_dp/compat/shared_cpu_kernels.py.
# Remove when: MindSpore's kernels of these functions are as fast.
@around("mindnlp.core.nn.functional")
def _layers(module: types.ModuleType) -> Iterator[None]:
    yield
    # Imported here because it imports NumPy, which the launcher does not need.
    from mindnlp_dp.dropout.dropout_operators import dropped, supports_masks

    @override(module)
    def rms_norm(input: Any, weight: Any, eps: float = 1e-5) -> Any:
        if (
            isinstance(eps, (int, float))
            and supports(input, weight)
            and weight.size
            and weight.ndim
            and input.shape[-weight.ndim :] == weight.shape
        ):
            return kernels().rms_norm(input, weight, eps)
        return NotImplemented

    @override(module)
    def dropout(input: Any, p: float = 0.5, training: bool = True) -> Any:
        if not (isinstance(p, (int, float)) and training and 0 < p <= 1):
            return NotImplemented
        if supports(input):
            return kernels().dropout(input, p)
        return dropped(input, p) if supports_masks(input) else NotImplemented


# Elements of a tensor from which a call of our kernels costs less than it saves.
_LARGE = 1 << 16


# Versions: MindNLP 0.4.1 on MindSpore 2.7+ on CPU. Cause: attention scores / a number, and scores + a mask that is
# broadcast, take 15 times as long as scores + scores.
# Remove when: they take as long.
@around("mindnlp")
def _operators(module: types.ModuleType) -> Iterator[None]:
    import mindspore

    @override(mindspore.Tensor, "__add__")
    def add(self: Any, other: Any) -> Any:
        if not are_on() or self.size < _LARGE or not isinstance(other, mindspore.Tensor) or self.shape == other.shape:
            return NotImplemented
        return kernels().add(self, other) if _is_broadcast_to(other, self) and supports(self, other) else NotImplemented

    @override(mindspore.Tensor, "__truediv__")
    def divide(self: Any, other: Any) -> Any:
        number = _number(other) if self.size >= _LARGE and supports(self) else None
        return NotImplemented if number is None else kernels().divide(self, number)

    yield


# Versions: MindNLP 0.4.1 on MindSpore 2.7+ on CPU. Cause: the sum of a layer and its adapters is two operators on
# arrays of the layer's output size, and three more in the backward pass.
# Remove when: a layer with adapters takes as long as its products.
@around("mindnlp.peft.tuners.lora.layer")
def _lora(module: types.ModuleType) -> Iterator[None]:
    yield
    from mindnlp.core import nn

    def is_plain(layer: Any) -> bool:
        """Return whether a layer is MindNLP's own, not one that was sharded, and has no hooks."""
        return type(layer) is nn.Linear and "forward" not in vars(layer) and not has_hooks(layer)

    def has_hooks(layer: Any) -> bool:
        return bool(layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks)

    @override(module.Linear)
    def forward(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or self.disable_adapters or self.merged or len(self.active_adapters) != 1:
            return NotImplemented
        (name,) = self.active_adapters
        if name not in self.lora_A or self.use_dora[name]:
            return NotImplemented
        dropout, base, a, b = self.lora_dropout[name], self.base_layer, self.lora_A[name], self.lora_B[name]
        drops = isinstance(dropout, nn.Dropout) and dropout.training and dropout.p > 0
        if (
            drops
            or has_hooks(dropout)
            or not x.size
            or not all(map(is_plain, (base, a, b)))
            or a.bias is not None
            or b.bias is not None
        ):
            return NotImplemented
        bias = () if base.bias is None else (base.bias,)
        if not supports(x, base.weight, *bias, a.weight, b.weight) or x.shape[-1:] != base.weight.shape[1:]:
            return NotImplemented
        return kernels().lora_linear(x, base.weight, base.bias, (a.weight, b.weight), self.scaling[name])


# GPT-2 and others mask their scores so.
@around("mindnlp.core.ops.array")
def _where(module: types.ModuleType) -> Iterator[None]:
    yield
    import mindspore

    @override(module)
    def where(condition: Any, input: Any, other: Any) -> Any:
        if not isinstance(input, mindspore.Tensor) or input.size < _LARGE or not supports(input):
            return NotImplemented
        is_mask = isinstance(condition, mindspore.Tensor) and condition.dtype == mindspore.bool_
        number = _number(other) if is_mask and _is_broadcast_to(condition, input) else None
        return NotImplemented if number is None else kernels().where(condition, input, number)


def _number(x: Any) -> Optional[float]:
    """Return a number, or the value of a tensor without dimensions that needs no gradient; None for all else.

    Called only for calls that our kernels support, which are on CPU: on a device, the copy would wait for all streams.
    """
    import mindspore

    if isinstance(x, (int, float)) and not isinstance(x, bool):
        return float(x)
    is_constant = isinstance(x, mindspore.Tensor) and not x.ndim and x.dtype == mindspore.float32
    return float(x.asnumpy()) if is_constant and not x._requires_grad else None


def _is_broadcast_to(x: Any, other: Any) -> bool:
    """Return whether ``x`` has the shape of ``other`` after it is broadcast."""
    return x.ndim <= other.ndim and all(n in (1, m) for m, n in zip(other.shape[::-1], x.shape[::-1]))


@around("mindnlp.common.activations")
def _quick_gelu(module: types.ModuleType) -> Iterator[None]:
    yield

    @override(module)
    def quick_gelu(x: Any, inplace: bool = False) -> Any:
        return kernels().gelu(x, "quick") if supports(x) else NotImplemented
