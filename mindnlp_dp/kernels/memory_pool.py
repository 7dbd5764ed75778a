"""This module converts tensors to NumPy arrays and back without a copy, transposed ones too, and allocates arrays."""

from __future__ import annotations

import functools
import math
import os
import threading
from typing import Any

import numpy as np

from mindnlp_dp.runtime.arrays import is_uninitialized
from mindnlp_dp.runtime.versions import mindspore_is_before

ITEM_BYTES = 4
# Elements. malloc reuses the memory of smaller arrays; it returns larger ones to the system, and every page of the next
# one then costs a page fault.
SMALLEST_KEPT = 1 << 18


class _Memory:
    """A tensor's memory as NumPy's array interface; an array made from it keeps the tensor alive."""

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
    """Return a read-only array that shares the memory of a float32 tensor on CPU.

    A transposed tensor becomes a transposed array; ``asnumpy()`` would copy it, element by element.

    Raises:
        RuntimeError: the tensor has no memory yet, and so no values.
    """
    address = _address_of(tensor)
    if not address and is_uninitialized(tensor):
        raise RuntimeError(
            f"a tensor of shape {tuple(tensor.shape)} is uninitialized: it was never given memory, as one that "
            "MindSpore's initializer(...) returned and init_data() was not called for"
        )
    return np.asarray(_Memory(tensor, address)) if address else tensor.asnumpy()


def _address_of(tensor: Any) -> int:
    """Return the address of the tensor's first element; 0 if MindSpore has not given it memory yet."""
    address = tensor.data_ptr()
    # Versions: MindSpore 2.7. Cause: data_ptr() is the address of the tensor's storage, even if the tensor is a slice
    # that begins later. Remove when: 2.7 is no longer supported.
    if address and mindspore_is_before("2.8"):
        address += tensor.storage_offset() * ITEM_BYTES
    return address


def tensor_of(array: np.ndarray) -> Any:
    """Return a tensor that takes over a new array's memory; a transposed array becomes a transposed tensor."""
    import mindspore

    if not array.size or not array.ndim:
        # MindSpore cannot create a tensor over the memory of an array without elements or without dimensions.
        return mindspore.Tensor(array)
    if array.flags.c_contiguous:
        return mindspore.from_numpy(array)
    order, back = _memory_order(array.strides)
    return mindspore.from_numpy(array.transpose(order)).permute(back)


def empty_like(shape: tuple[int, ...], other: np.ndarray) -> np.ndarray:
    """Return a new array with the memory order of ``other``, which has the same number of dimensions."""
    order, back = _memory_order(other.strides)
    return empty(*(shape[axis] for axis in order)).transpose(back)


@functools.lru_cache(maxsize=1024)
def _memory_order(strides: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return an array's dimensions from the one with the largest stride to that with the smallest, and the inverse."""
    order = sorted(range(len(strides)), key=lambda axis: -abs(strides[axis]))
    return tuple(order), tuple(np.argsort(order).tolist())


def empty(*shape: int) -> np.ndarray:
    """Return a new float32 array; a large one reuses the memory of a freed one if possible."""
    size = math.prod(shape)
    return _kept.take(size)[:size].reshape(shape) if size >= SMALLEST_KEPT else np.empty(shape, np.float32)


class _Block:
    """Memory that returns to its pool when the last array over it is freed.

    It is the base of these arrays and of all their views: NumPy's search for a base stops at an object that is not an
    array.
    """

    __slots__ = ("__array_interface__", "_keeper", "_memory")

    def __init__(self, memory: np.ndarray, keeper: _Kept) -> None:
        self._memory, self._keeper = memory, keeper
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        self._keeper.put(self._memory)


class _Kept:
    """A pool of the memory of freed large arrays, by size; used plus free is at most 1.25 times the peak use."""

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray]] = {}
        self._num_free = self._num_used = self._most_used = 0
        # Reentrant: the garbage collector may free an array while this same thread takes another.
        self._lock = threading.RLock()
        # A process that is forked while another thread holds the lock could never acquire it.
        os.register_at_fork(after_in_child=self._unlock)

    def _unlock(self) -> None:
        self._lock = threading.RLock()

    def take(self, size: int) -> np.ndarray:
        """Return a flat array of ``size`` elements, or up to a quarter more."""
        size = _rounded_up(size)
        with self._lock:
            if free := self._free.get(size):
                memory = free.pop()
                self._num_free -= size
            else:
                used = self._num_used + size
                self._drop(used + self._num_free - max(self._most_used, used) * 5 // 4)
                memory = np.empty(size, np.float32)
            # Counted after the allocation, which may raise MemoryError. Added to the current value, because the garbage
            # collector may have freed arrays in this thread meanwhile.
            self._num_used += size
            self._most_used = max(self._most_used, self._num_used)
        return np.asarray(_Block(memory, self))

    def put(self, memory: np.ndarray) -> None:
        with self._lock:
            self._num_used -= memory.size
            self._num_free += memory.size
            self._free.setdefault(memory.size, []).append(memory)

    def _drop(self, size: int) -> None:
        """Free at least ``size`` elements, the largest arrays first, or all if there are fewer."""
        for each in sorted(self._free, reverse=True):
            while size > 0 and self._free[each]:
                self._free[each].pop()
                self._num_free -= each
                size -= each


def _rounded_up(size: int) -> int:
    """Round up to the next of the four evenly spaced sizes between two powers of two."""
    step = 1 << max(0, size.bit_length() - 3)
    return -(-size // step) * step


_kept = _Kept()
