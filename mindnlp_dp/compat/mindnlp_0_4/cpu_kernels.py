"""These patches make functions that only MindNLP 0.4.1 has use our CPU kernels for calls that these support."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

from mindnlp_dp.compat.cpu_kernels import kernels
from mindnlp_dp.compat.import_hook import around
from mindnlp_dp.kernels.dispatch import supports
from mindnlp_dp.runtime.override import override


# Versions: MindNLP 0.4.1 on MindSpore 2.7+ on CPU. Cause: as in mindnlp_dp/compat/cpu_kernels.py.
# Remove when: MindSpore's kernels of these functions are as fast.
@around("mindnlp.core.nn.functional")
def _layers(module: types.ModuleType) -> Iterator[None]:
    yield

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
        is_plain = isinstance(p, (int, float)) and training and 0 < p <= 1
        return kernels().dropout(input, p) if is_plain and supports(input) else NotImplemented


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
        if self.size < _LARGE or not isinstance(other, mindspore.Tensor) or self.shape == other.shape:
            return NotImplemented
        fits = other.ndim <= self.ndim and all(n in (1, m) for m, n in zip(self.shape[::-1], other.shape[::-1]))
        return kernels().add(self, other) if fits and supports(self, other) else NotImplemented

    @override(mindspore.Tensor, "__truediv__")
    def divide(self: Any, other: Any) -> Any:
        is_number = isinstance(other, (int, float)) and not isinstance(other, bool) and self.size >= _LARGE
        return kernels().divide(self, other) if is_number and supports(self) else NotImplemented

    yield


@around("mindnlp.common.activations")
def _quick_gelu(module: types.ModuleType) -> Iterator[None]:
    yield

    @override(module)
    def quick_gelu(x: Any, inplace: bool = False) -> Any:
        return kernels().gelu(x, "quick") if supports(x) else NotImplemented
