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


# Versions: MindNLP 0.4.1. Cause: functions that PEFT's methods call are missing: svd (the default combination of
# add_weighted_adapter), dense (LoHa, LoKr) and kron (LoKr).
# Remove when: mindnlp.core.ops has them.
@around("mindnlp.core.ops")
def _missing_functions(module: types.ModuleType) -> Iterator[None]:
    yield
    import mindspore

    def svd(matrix: Any, full_matrices: bool = True) -> tuple[Any, Any, Any]:
        """Return U, the singular values and V transposed of a matrix."""
        values, u, v = mindspore.ops.svd(matrix, full_matrices)
        return u, values, v.T

    def kron(a: Any, b: Any) -> Any:
        """Return the Kronecker product of two matrices."""
        blocks = a.reshape(a.shape[0], 1, a.shape[1], 1) * b.reshape(1, b.shape[0], 1, b.shape[1])
        return blocks.reshape(a.shape[0] * b.shape[0], a.shape[1] * b.shape[1])

    def dense(rows: Any, weight: Any) -> Any:
        """Return a linear layer's outputs, without a bias."""
        return module.matmul(rows, weight.T)

    for function in (svd, kron, dense):
        if not hasattr(module, function.__name__):
            setattr(module, function.__name__, function)


# Versions: MindNLP 0.4.1 on MindSpore 2.10. Cause: prompt learning puts a float32 mask before the rows' attention mask,
# which is int64 as tokenizers return it, and ``cat`` of two types has no kernel ("KernelMod Init Failed: Concat").
# Remove when: ops.cat accepts tensors of two types, as torch.cat does.
@around("mindnlp.core.ops.array")
def _cat_of_two_types(module: types.ModuleType) -> Iterator[None]:
    yield
    stock_cat = module.cat

    @functools.wraps(stock_cat)
    def cat(tensors: Any, dim: int = 0) -> Any:
        if len({tensor.dtype for tensor in tensors}) > 1:
            widest = max(tensors, key=lambda tensor: (tensor.is_floating_point(), tensor.itemsize))
            tensors = [tensor.astype(widest.dtype) for tensor in tensors]
        return stock_cat(tensors, dim)

    module.cat = cat  # type: ignore[attr-defined]


# Versions: MindNLP 0.4.1 on MindSpore 2.10. Cause: beam search divides int32 positions by a number, rounded down, which
# has no kernel on a CPU ("KernelMod Init Failed: FloorDiv").
# Remove when: model.generate(num_beams=2) works.
@around("mindnlp.core.ops.pointwise")
def _floor_of_quotients(module: types.ModuleType) -> Iterator[None]:
    yield
    stock_div = module.div

    @functools.wraps(stock_div)
    def div(input: Any, other: Any, *, rounding_mode: Any = None) -> Any:
        if rounding_mode == "floor" and isinstance(other, int):
            return input // other
        return stock_div(input, other, rounding_mode=rounding_mode)

    module.div = div  # type: ignore[attr-defined]
