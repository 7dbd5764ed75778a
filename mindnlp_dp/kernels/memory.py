"""Tensors as NumPy arrays over their own memory, transposed ones as well, and arrays as tensors."""

from __future__ import annotations

import math
import os
import threading
from typing import Any

import numpy as np

from mindnlp_dp.arrays.inspection import is_uninitialized
from mindnlp_dp.versions import mindspore_is_before

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

    Raises:
        RuntimeError: the tensor was never given memory, and has no values.
    """
    address = _address_of(tensor)
    if not address and is_uninitialized(tensor):
        raise RuntimeError(
            f"a tensor of shape {tuple(tensor.shape)} is uninitialized: it was never given memory, as one that "
            "MindSpore's initializer(...) returned and init_data() was not called for"
        )
    return np.asarray(_Memory(tensor, address)) if address else tensor.asnumpy()


def _address_of(tensor: Any) -> int:
    """Of its first element; 0 where MindSpore has not given it memory yet."""
    address = tensor.data_ptr()
    # Versions: MindSpore 2.7. Cause: data_ptr() is where a tensor's storage begins, not where the tensor does, which is
    # a slice of it, perhaps. Goes when: 2.7 is not supported any more.
    if address and mindspore_is_before("2.8"):
        address += tensor.storage_offset() * ITEM_BYTES
    return address


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
    """A new float32 array; a large one in memory that an earlier one left, if there is such."""
    size = math.prod(shape)
    return _kept.take(size)[:size].reshape(shape) if size >= SMALLEST_KEPT else np.empty(shape, np.float32)


class _Block:
    """Memory that goes back to those who keep it when the last array over it has gone.

    Arrays over it have it for their base, and so have all of their views: NumPy does not look through what is no array.
    """

    __slots__ = ("__array_interface__", "_keeper", "_memory")

    def __init__(self, memory: np.ndarray, keeper: _Kept) -> None:
        self._memory, self._keeper = memory, keeper
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        self._keeper.put(self._memory)


class _Kept:
    """Memory of large arrays that were freed, by size: no more than was once in use at a time, and a quarter."""

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray]] = {}
        self._num_free = self._num_used = self._most_used = 0
        # An array may be freed by the garbage collector while this very thread takes another.
        self._lock = threading.RLock()
        # A process that is forked while another thread has the lock would never get it.
        os.register_at_fork(after_in_child=self._unlock)

    def _unlock(self) -> None:
        self._lock = threading.RLock()

    def take(self, size: int) -> np.ndarray:
        """A flat array of ``size`` elements, or up to a quarter more."""
        size = _rounded_up(size)
        with self._lock:
            if free := self._free.get(size):
                memory = free.pop()
                self._num_free -= size
            else:
                used = self._num_used + size
                self._drop(used + self._num_free - max(self._most_used, used) * 5 // 4)
                memory = np.empty(size, np.float32)
            # Only now: there may be none left. And added, for what was dropped may have freed more in this thread.
            self._num_used += size
            self._most_used = max(self._most_used, self._num_used)
        return np.asarray(_Block(memory, self))

    def put(self, memory: np.ndarray) -> None:
        with self._lock:
            self._num_used -= memory.size
            self._num_free += memory.size
            self._free.setdefault(memory.size, []).append(memory)

    def _drop(self, size: int) -> None:
        """Give back at least ``size`` elements, the largest arrays first, as far as there are any."""
        for each in sorted(self._free, reverse=True):
            while size > 0 and self._free[each]:
                self._free[each].pop()
                self._num_free -= each
                size -= each


def _rounded_up(size: int) -> int:
    """The next of four sizes between a power of two and the next."""
    step = 1 << max(0, size.bit_length() - 3)
    return -(-size // step) * step


_kept = _Kept()
