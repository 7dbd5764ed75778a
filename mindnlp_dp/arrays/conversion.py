"""This module converts MindSpore tensors to NumPy arrays and back, without a copy where memory can be shared."""

from __future__ import annotations

from typing import Any

import numpy as np

from .types import dtype_name

_CACHE_LINE_BYTES = 64


def to_host(x: Any) -> np.ndarray:
    """Return a NumPy array with the values of a tensor or an array, sharing its memory if possible.

    bfloat16 becomes float32, which holds all of its values: neither NumPy nor MPI supports bfloat16. The result has
    the byte order of this machine.
    """
    is_bfloat16 = dtype_name(x) == "bfloat16"
    if isinstance(x, np.ndarray):
        if is_bfloat16:
            return x.astype(np.float32)
        return x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))
    if is_bfloat16:
        import mindspore

        x = x.astype(mindspore.float32)
    return x.asnumpy()


def from_host(x: np.ndarray, dtype: str) -> Any:
    """Return a MindSpore tensor of type ``dtype`` that uses the memory of ``x`` if the type allows it."""
    import mindspore

    tensor = mindspore.Tensor.from_numpy(np.ascontiguousarray(x)) if x.ndim and x.size else mindspore.Tensor(x)
    return tensor if dtype_name(tensor) == dtype else tensor.astype(getattr(mindspore, dtype))


def number_of(x: Any) -> float:
    """Return a number, or the only element of a tensor, as a float; MindNLP 0.5's own ``float(tensor)`` rounds it."""
    return float(to_host(x)) if hasattr(x, "asnumpy") or isinstance(x, np.ndarray) else float(x)


def aligned_zeros(numel: int, dtype: Any) -> np.ndarray:
    """Return a flat array of zeros that begins at a cache line, as MindSpore's own memory does."""
    item_bytes = np.dtype(dtype).itemsize
    memory = np.zeros(numel * item_bytes + _CACHE_LINE_BYTES, np.uint8)
    begin = -memory.ctypes.data % _CACHE_LINE_BYTES
    return memory[begin : begin + numel * item_bytes].view(dtype)


def copy_of(x: Any) -> Any:
    """Return a copy of a tensor, made by one operator; ``Tensor.copy()`` runs three for floats.

    A bfloat16 tensor needs all three: MindSpore 2.8's Identity operator for CPU does not support it.
    """
    import mindspore

    return x.copy() if x.dtype == mindspore.bfloat16 else mindspore.ops.deepcopy(x)


def set_weight(weight: Any, value: Any) -> None:
    """Overwrite a parameter or buffer with a tensor of the same shape and type."""
    # Not ops.assign: a buffer may be a view (BERT's position_ids is one).
    weight.set_data(value) if hasattr(weight, "set_data") else weight.assign_value(value)
