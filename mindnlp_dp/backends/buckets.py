"""Where gradients wait for their exchange, and where its result is taken from.

Goes in: weighted gradients, one by one. Comes out: their sums over the ranks. What a bucket's memory is, its backend
decides; here is what all of them can do, and the one for backends that exchange host memory.
"""

from __future__ import annotations

import abc
import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Optional

import numpy as np

from ..bucket import BucketLayout, Slot
from .ring import Patience

if TYPE_CHECKING:
    from .base import HostBackend


class Bucket(abc.ABC):
    """Memory for the gradients of one bucket, from accumulation to the exchanged result.

    ``put`` adds ``weight * gradient`` to a slot, ``start`` scales what was put and
    begins the sum over the ranks, ``wait`` ends it, ``get`` returns a slot of the
    result, in memory of its own, ``release`` says that this rank has got what it wanted, and
    ``clear`` makes the bucket empty again. A slot into which nothing was put counts as zeros.
    ``keep`` remembers what was put so far, and ``restore`` goes back to it, be the sum made or not.

    Attributes:
        is_asynchronous: whether ``start`` returns while the exchange is under way. If not, buckets are best
            exchanged one after the other, each while it is in the cache; or on a thread, which gives ``start`` its
            patience, so that waiting leaves the core to the thread that computes.
    """

    is_asynchronous = False

    def __init__(self, layout: BucketLayout) -> None:
        self.layout = layout
        self._slots = {slot.index: slot for slot in layout.slots}

    @abc.abstractmethod
    def put(self, index: int, gradient: Any, weight: float) -> None: ...

    @abc.abstractmethod
    def keep(self) -> None: ...

    @abc.abstractmethod
    def restore(self) -> None: ...

    @abc.abstractmethod
    def start(self, scale: Any, patience: Optional[Patience] = None) -> None: ...

    @abc.abstractmethod
    def wait(self) -> None: ...

    @abc.abstractmethod
    def get(self, index: int) -> Any: ...

    @abc.abstractmethod
    def release(self) -> None: ...

    @abc.abstractmethod
    def clear(self) -> None: ...


def sum_dtype(layout: BucketLayout) -> type:
    """In which precision a host sums a bucket: half types in float32, for their weighted sum may not fit into them."""
    return np.float64 if layout.dtype == "float64" else np.float32


# From the dictionary of results, the local variable and the call that counts.
_REFERENCES_OF_OUR_OWN = 3


def _is_free(results: dict[int, np.ndarray], index: int) -> bool:
    """Whether nobody but this dictionary holds that array."""
    result = results.get(index)
    return result is not None and sys.getrefcount(result) <= _REFERENCES_OF_OUR_OWN


@functools.cache
def references_tell(from_host: Callable[[np.ndarray, str], Any]) -> bool:
    """Whether counting references finds out that a tensor made by ``from_host`` is still held. Tried once.

    It is a habit of CPython, and of MindSpore's tensors; where either has another, memory is never used again.
    """
    results = {0: np.zeros(4, np.float32)}
    if not _is_free(results, 0):
        return False
    tensor = from_host(results[0].reshape(2, 2), "float32")
    is_shared = bool(np.shares_memory(tensor.asnumpy(), results[0]))
    return not is_shared or not _is_free(results, 0)


class HostBucket(Bucket):
    """A bucket in one NumPy array, for backends that exchange host memory."""

    def __init__(self, layout: BucketLayout, backend: HostBackend, buffer: Optional[np.ndarray] = None) -> None:
        super().__init__(layout)
        self._backend = backend
        self._buffer = np.empty(layout.numel, sum_dtype(layout)) if buffer is None else buffer
        self._filled: set[int] = set()
        self._kept: set[int] = set()
        self._results: dict[int, np.ndarray] = {}

    def _view(self, index: int) -> np.ndarray:
        slot = self._slots[index]
        return self._buffer[slot.offset : slot.offset + slot.numel].reshape(slot.shape)

    def put(self, index: int, gradient: Any, weight: float) -> None:
        view, host, dtype = self._view(index), self._backend.to_host(gradient), self._buffer.dtype
        # With dtype the product is made in the buffer's precision; NumPy would make it in the gradient's.
        if index in self._filled:
            view += np.multiply(host, weight, dtype=dtype)
        else:
            np.multiply(host, weight, out=view, dtype=dtype)
            self._filled.add(index)

    def _fill_gaps(self) -> None:
        for index in self._slots.keys() - self._filled:
            self._view(index).fill(0)

    def keep(self) -> None:
        """In the memory of the results, which nobody needs before this sum is made."""
        self._kept = set(self._filled)
        for index in self._kept:
            np.copyto(self._result_memory(index), self._view(index).reshape(-1))

    def restore(self) -> None:
        self._filled = set(self._kept)
        for index in self._kept:
            np.copyto(self._view(index).reshape(-1), self._results[index])

    def start(self, scale: float, patience: Optional[Patience] = None) -> None:
        self._fill_gaps()
        np.multiply(self._buffer, self._buffer.dtype.type(scale), out=self._buffer)
        self._backend.all_reduce_in_place(self._buffer, patience)

    def wait(self) -> None:
        """Nothing to wait for: host libraries return when the sum is there."""

    def get(self, index: int) -> Any:
        result = self._result_memory(index)
        self._copy_result(self._slots[index], result)
        return self._backend.from_host(result.reshape(self._slots[index].shape), self.layout.dtype)

    def _copy_result(self, slot: Slot, out: np.ndarray) -> None:
        np.copyto(out, self._buffer[slot.offset : slot.offset + slot.numel])

    def _result_memory(self, index: int) -> np.ndarray:
        """Memory for a slot of the result: the last result's, when nobody holds that any more.

        New memory costs a page fault for every 4 KiB, several times what the copy costs.
        """
        if not (_is_free(self._results, index) and references_tell(self._backend.from_host)):
            self._results[index] = np.empty(self._slots[index].numel, self._buffer.dtype)
        return self._results[index]

    def release(self) -> None:
        """Nobody else reads this buffer."""

    def clear(self) -> None:
        self._filled.clear()
        self._kept.clear()
