"""Tensors as NumPy arrays over their own memory, transposed ones as well, and arrays as tensors."""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from typing import Any

import numpy as np

ITEM_BYTES = 4
# Smaller ones malloc keeps by itself; larger ones it gives back to the system, which makes every page anew.
SMALLEST_KEPT = 1 << 18


class _Memory:
    """A tensor's elements, in the words of NumPy's array interface. An array that is made of it keeps the tensor."""

    __slots__ = ("__array_interface__", "tensor")

    def __init__(self, tensor: Any, address: int) -> None:
        self.tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "typestr": "<f4",
            "shape": tensor.shape,
            "strides": tuple(stride * ITEM_BYTES for stride in tensor.stride()),
            "data": (address, True),
        }


def array_of(tensor: Any) -> np.ndarray:
    """The values of a float32 tensor on CPU, sharing its memory. To be read, not written.

    A transposed tensor becomes a transposed array: ``asnumpy()`` would copy it, element by element.
    """
    address = tensor.data_ptr()
    return np.asarray(_Memory(tensor, address)) if address else tensor.asnumpy()


def tensor_of(array: np.ndarray) -> Any:
    """A tensor that owns a new array's memory, transposed where the array is."""
    import mindspore

    if not array.size or not array.ndim:
        # MindSpore makes no tensor over memory of no elements, or no dimensions.
        return mindspore.Tensor(array)
    if array.flags.c_contiguous:
        return mindspore.Tensor.from_numpy(array)
    order = _memory_order(array)
    return mindspore.Tensor.from_numpy(array.transpose(order)).permute(tuple(np.argsort(order).tolist()))


def empty_like(shape: tuple[int, ...], other: np.ndarray) -> np.ndarray:
    """An array whose dimensions lie in memory in the same order as those of ``other``, which has as many."""
    order = _memory_order(other)
    return empty(*(shape[axis] for axis in order)).transpose(np.argsort(order))


def _memory_order(array: np.ndarray) -> list[int]:
    """An array's dimensions, from that with the largest steps in memory to that with the smallest."""
    return sorted(range(array.ndim), key=lambda axis: -abs(array.strides[axis]))


def empty(*shape: int) -> np.ndarray:
    """A new float32 array, in memory of an earlier one that nobody has any more, if there is such."""
    size = 1
    for length in shape:
        size *= length
    if size < SMALLEST_KEPT:
        return np.empty(shape, np.float32)
    return _kept.take(size).reshape(shape)


class _Kept:
    """Memory of large arrays that were freed."""

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray]] = defaultdict(list)
        self._lock = threading.Lock()

    def take(self, size: int) -> np.ndarray:
        try:
            memory = self._free[size].pop()
        except IndexError:
            memory = np.empty(size, np.float32)
        array = memory[:]
        weakref.finalize(array, self._free[size].append, memory).atexit = False
        return array


_kept = _Kept()
