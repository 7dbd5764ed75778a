"""These patches make ``mindnlp.core.ops`` accept calls of MindNLP 0.4.1's models that MindSpore rejects."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

from mindnlp_dp.compat.import_hook import around


# Versions: MindNLP 0.4.1 on MindSpore 2.9+. Cause: models (XLNet, Bros) call ``ops.arange(0, n, 2.0)``, and MindSpore's
# Range requires one type: "For Range, the dtypes of inputs must be the same, but got (Int64, Int64, Float32)".
# Remove when: MindNLP's arange converts its numbers to one type, as PyTorch's does.
@around("mindnlp.core.ops.creation")
def _arange_of_mixed_numbers(module: types.ModuleType) -> Iterator[None]:
    yield
    stock = module.arange

    @functools.wraps(stock)
    def arange(start: Any = 0, end: Any = None, step: Any = 1, *, dtype: Any = None) -> Any:
        if end is None:
            start, end = 0, start
        if any(isinstance(x, float) for x in (start, end, step)):
            start, end, step = (float(x) if isinstance(x, int) else x for x in (start, end, step))
        return stock(start, end, step, dtype=dtype)

    module.arange = arange  # type: ignore[attr-defined]


# Versions: MindNLP 0.4.1. Cause: LongT5 calls ``ops.ones(size, dtype)``, and MindNLP takes the type for another size.
# Remove when: LongT5 passes ``dtype=``.
@around("mindnlp.core.ops.creation")
def _type_behind_the_size(module: types.ModuleType) -> Iterator[None]:
    yield
    import mindspore

    for name in ("ones", "zeros"):
        setattr(module, name, _with_type_as_last_argument(getattr(module, name), mindspore.Type))


def _with_type_as_last_argument(stock: Any, type_class: Any) -> Any:
    @functools.wraps(stock)
    def filled(*size: Any, dtype: Any = None) -> Any:
        if len(size) > 1 and isinstance(size[-1], type_class):
            *size, dtype = size  # type: ignore[assignment]
        return stock(*size, dtype=dtype)

    return filled
