"""This module sums gradients in host memory, for libraries such as MPI."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Optional

import numpy as np

from mindnlp_dp.communication.transports.channel import HostChannel
from mindnlp_dp.communication.transports.polling_wait import PollingWait
from mindnlp_dp.data_parallel.buckets.bucket import Bucket
from mindnlp_dp.data_parallel.buckets.bucket_layout import BucketLayout, Slot
from mindnlp_dp.runtime.arrays import aligned_zeros, from_host, to_host


def sum_dtype(layout: BucketLayout) -> type:
    """Return the type in which a host sums a bucket: half types in float32, because their sum may overflow."""
    return np.float64 if layout.dtype == "float64" else np.float32


# References from the list of results, the local variable and the call of getrefcount.
_REFERENCES_OF_OUR_OWN = 3

# A loop that holds the last gradients until it has the next ones needs the memory of both.
_GENERATIONS = 2


def _is_free(results: list[np.ndarray], position: int) -> bool:
    """Return whether only this list refers to the array."""
    result = results[position]
    return sys.getrefcount(result) <= _REFERENCES_OF_OUR_OWN


@functools.cache
def refcount_is_reliable(from_host: Callable[[np.ndarray, str], Any]) -> bool:
    """Return whether reference counts show that a tensor made by ``from_host`` is still in use. Tested once.

    This depends on CPython and on MindSpore's tensors; if it does not work with either, memory is never reused.
    """
    results = [np.zeros(4, np.float32)]
    if not _is_free(results, 0):
        return False
    # The variable keeps the tensor alive. If the tensor has copied the array, counts show nothing, and this is False.
    tensor = from_host(results[0].reshape(2, 2), "float32")
    return tensor is not None and not _is_free(results, 0)


class HostBucket(Bucket):
    """A bucket in one NumPy array, for libraries that exchange host memory."""

    def __init__(self, layout: BucketLayout, channel: HostChannel, buffer: Optional[np.ndarray] = None) -> None:
        super().__init__(layout)
        self._channel = channel
        # The array begins with zeros, because the gaps between slots are summed, too.
        self._buffer = aligned_zeros(layout.numel, sum_dtype(layout)) if buffer is None else buffer
        self._filled: set[int] = set()
        self._kept: set[int] = set()
        # The newest result of a slot is the last one.
        self._results: dict[int, list[np.ndarray]] = {}

    def _view(self, index: int) -> np.ndarray:
        slot = self._slots[index]
        return self._buffer[slot.offset : slot.offset + slot.numel].reshape(slot.shape)

    def put(self, index: int, gradient: Any, loss_weight: float) -> None:
        view, host, dtype = self._view(index), to_host(gradient), self._buffer.dtype
        # Without dtype, NumPy would multiply in the gradient's precision instead of the buffer's.
        if index in self._filled:
            view += np.multiply(host, loss_weight, dtype=dtype)
        else:
            np.multiply(host, loss_weight, out=view, dtype=dtype)
            self._filled.add(index)

    def _fill_gaps(self) -> None:
        for index in self._slots.keys() - self._filled:
            self._view(index).fill(0)

    def snapshot(self) -> None:
        """Save the accumulated values in the memory of the results, which is not needed before this sum is done."""
        self._kept = set(self._filled)
        for index in self._kept:
            np.copyto(self._result_memory(index), self._view(index).reshape(-1))

    def rollback(self) -> None:
        self._filled = set(self._kept)
        for index in self._kept:
            np.copyto(self._view(index).reshape(-1), self._results[index][-1])

    def start(self, scale: float, waiter: Optional[PollingWait] = None) -> None:
        self._fill_gaps()
        np.multiply(self._buffer, self._buffer.dtype.type(scale), out=self._buffer)
        self._channel.all_reduce_in_place(self._buffer, waiter)
        self._has_sum()

    def wait(self) -> None:
        """Do nothing: host libraries return when the sum is complete."""

    def get(self, index: int) -> Any:
        result = self._result_memory(index)
        self._copy_result(self._slots[index], result)
        return from_host(result.reshape(self._slots[index].shape), self.layout.dtype)

    def _copy_result(self, slot: Slot, out: np.ndarray) -> None:
        np.copyto(out, self._buffer[slot.offset : slot.offset + slot.numel])

    def _result_memory(self, index: int) -> np.ndarray:
        """Return memory for a slot of the result: that of an earlier result which is not in use any more, or new one.

        New memory causes a page fault for every 4 KiB, which costs several times as much as the copy.
        """
        results = self._results.setdefault(index, [])
        newest_first = reversed(range(len(results))) if refcount_is_reliable(from_host) else range(0)
        free = next((position for position in newest_first if _is_free(results, position)), None)
        results.append(np.empty(self._slots[index].numel, self._buffer.dtype) if free is None else results.pop(free))
        del results[:-_GENERATIONS]
        return results[-1]

    def sums(self) -> list[tuple[int, np.ndarray]]:
        return [(0, self._buffer)]

    def release(self) -> None:
        """Do nothing: no other rank reads this buffer."""

    def clear(self) -> None:
        self._filled.clear()
        self._kept.clear()
