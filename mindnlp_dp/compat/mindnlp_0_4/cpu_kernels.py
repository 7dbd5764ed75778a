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


@around("mindnlp.common.activations")
def _quick_gelu(module: types.ModuleType) -> Iterator[None]:
    yield

    @override(module)
    def quick_gelu(x: Any, inplace: bool = False) -> Any:
        return kernels().gelu(x, "quick") if supports(x) else NotImplemented
