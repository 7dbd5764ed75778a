"""This patch makes MindSpore's own layers (``mindspore.nn``) use our CPU kernels for calls that these support."""

from __future__ import annotations

import functools
from typing import Any

from mindnlp_dp.compat.mindspore_api import fix_generator_offset
from mindnlp_dp.compat.random_operators import follow_the_seed
from mindnlp_dp.kernels.dispatch import not_none, supports
from mindnlp_dp.runtime.override import override


# Versions: MindSpore 2.7+ on CPU. Cause: its kernels of these operators take 2 to 35 times as long as ours on one core
# (docs/benchmarks_kernels.md, "The kernels by themselves").
# Remove when: they are as fast.
@functools.cache
def use_kernels_in_layers() -> None:
    """Make ``nn.Dense``, ``nn.LayerNorm``, ``nn.GELU`` and ``nn.Dropout`` use our kernels where they apply."""
    import mindspore

    from mindnlp_dp.dropout.dropout_operators import dropped, supports_masks
    from mindnlp_dp.kernels import functions

    fix_generator_offset()
    follow_the_seed()
    nn = mindspore.nn

    @override(nn.Dense, "construct")
    def dense(self: Any, x: Any) -> Any:
        bias = self.bias if self.has_bias else None
        if _apply_in(self, x, self.weight, *not_none(bias)) and x.shape[-1:] == self.weight.shape[1:]:
            out = functions.linear(x, self.weight, bias)
            return self.activation(out) if self.activation_flag else out
        return NotImplemented

    @override(nn.LayerNorm, "construct")
    def layer_norm(self: Any, input_x: Any) -> Any:
        shape = tuple(self.normalized_shape)
        is_plain = self.begin_norm_axis == self.begin_params_axis and self.begin_norm_axis in (
            -len(shape),
            input_x.ndim - len(shape),
        )
        if _apply_in(self, input_x, self.gamma, self.beta) and is_plain and input_x.shape[-len(shape) :] == shape:
            return functions.layer_norm(input_x, len(shape), self.gamma, self.beta, self.epsilon)
        return NotImplemented

    @override(nn.GELU, "construct")
    def gelu(self: Any, x: Any) -> Any:
        return functions.gelu(x, self.approximate) if _apply_in(self, x) else NotImplemented

    @override(nn.Dropout, "construct")
    def dropout(self: Any, x: Any) -> Any:
        p = 1 - self.keep_prob if self.p is None else self.p
        if not (self.training and 0 < p < 1):
            return NotImplemented
        if _apply_in(self, x):
            return functions.dropout(x, p)
        return dropped(x, p) if supports_masks(x) else NotImplemented


def _apply_in(cell: Any, *tensors: Any) -> bool:
    """Return whether our kernels support a cell's call; not if ``to_float`` makes the cell compute in another type."""
    return cell.mixed_precision_type is None and supports(*tensors)
