"""What a backend is, and the one for a single process.

A backend moves arrays between ranks, in the form that its library likes best:
NumPy arrays for MPI, MindSpore tensors for HCCL, NCCL and MCCL. It is called by
:class:`mindnlp_dp.process_group.ProcessGroup`, which has checked the arguments,
and by nobody else. Every method except ``send`` and ``recv`` is a collective:
all ranks call it, in the same order.
"""

from __future__ import annotations

import abc
import functools
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any, Optional

import numpy as np

from ..bucket import BucketLayout, Slot
from .ring import Patience

REDUCTIONS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "sum": np.add,
    "max": np.maximum,
    "min": np.minimum,
}
HALF_TYPES = ("float16", "bfloat16")


def dtype_name(x: Any) -> str:
    """``"float32"``, ``"int64"``, ``"bool"``, ... of a NumPy array or a MindSpore tensor."""
    return _name_of(x.dtype)


@functools.cache
def _name_of(dtype: Any) -> str:
    # MindSpore prints Float32, or mindspore.float32 once MindNLP is imported.
    return str(dtype).lower().rpartition(".")[2].rstrip("_")


def reduce_arrays(arrays: Sequence[np.ndarray], op: str) -> np.ndarray:
    """Reduce in rank order, so that every rank computes the same bits."""
    return functools.reduce(REDUCTIONS[op], arrays)


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
    def start(self, scale: float, patience: Optional[Patience] = None) -> None: ...

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
        result = self._results.get(index)
        if result is None or sys.getrefcount(result) > _REFERENCES_OF_OUR_OWN:
            result = self._results[index] = np.empty(self._slots[index].numel, self._buffer.dtype)
        return result

    def release(self) -> None:
        """Nobody else reads this buffer."""

    def clear(self) -> None:
        self._filled.clear()
        self._kept.clear()


class Backend(abc.ABC):
    """The ranks of a job, and how arrays get from one to another.

    Attributes:
        cannot_overlap: why buckets cannot be exchanged during a backward pass; empty when they can.
        abandoned: why this rank left an exchange half way, if it did; no later one would match the other ranks'.
        bytes_sent: how many bytes of gradients this rank sent to other hosts; None where nobody counts them.
    """

    cannot_overlap = ""
    abandoned = ""
    bytes_sent: Optional[int] = None
    name: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    # What arrays are here: conversions at the edge, so that the group takes and gives back either kind.

    @abc.abstractmethod
    def to_native(self, x: Any) -> Any:
        """Turn a NumPy array or a MindSpore tensor into what this backend exchanges."""

    @abc.abstractmethod
    def from_native(self, y: Any, like: Any) -> Any:
        """Turn a result into the kind of array that ``like`` is."""

    @staticmethod
    def to_host(x: Any) -> np.ndarray:
        """A NumPy array with ``x``'s values, sharing memory where it can.

        bfloat16 becomes float32, which holds all of its values: neither NumPy nor MPI knows it.
        """
        is_bfloat16 = dtype_name(x) == "bfloat16"
        if isinstance(x, np.ndarray):
            return x.astype(np.float32) if is_bfloat16 else x
        if is_bfloat16:
            import mindspore

            x = x.astype(mindspore.float32)
        return x.asnumpy()

    @staticmethod
    def from_host(x: np.ndarray, dtype: str) -> Any:
        """A MindSpore tensor of type ``dtype`` that owns ``x``'s memory where the type allows."""
        import mindspore

        tensor = mindspore.Tensor.from_numpy(np.ascontiguousarray(x)) if x.ndim and x.size else mindspore.Tensor(x)
        return tensor if dtype_name(tensor) == dtype else tensor.astype(getattr(mindspore, dtype))

    # The primitives of a library.

    @abc.abstractmethod
    def all_reduce(self, x: Any, op: str) -> Any: ...

    @abc.abstractmethod
    def broadcast(self, x: Any, src: int) -> Any: ...

    @abc.abstractmethod
    def all_gather(self, x: Any) -> list[Any]: ...

    @abc.abstractmethod
    def all_gather_bytes(self, data: bytes) -> list[bytes]: ...

    @abc.abstractmethod
    def broadcast_bytes(self, data: bytes, src: int) -> bytes: ...

    @abc.abstractmethod
    def send(self, x: Any, dst: int) -> None: ...

    @abc.abstractmethod
    def recv(self, like: Any, src: int) -> Any: ...

    @abc.abstractmethod
    def barrier(self) -> None: ...

    @abc.abstractmethod
    def make_buckets(self, layouts: Sequence[BucketLayout], compression: Optional[str] = None) -> list[Bucket]: ...

    @abc.abstractmethod
    def close(self) -> None: ...

    # What follows from them.

    def total(self, number: float, patience: Optional[Patience] = None) -> float:
        """The sum of the ranks' numbers, in float32; from another thread, with patience."""
        mine = self.to_native(np.array([number], np.float32))
        return float(self.to_host(self.all_reduce(mine, "sum"))[0])

    def all_equal(self, number: int) -> bool:
        """Whether all ranks bring the same number, of at most 62 bits: the largest of [n, -n] tells."""
        pair = self.to_native(np.array([number, -number], np.int64))
        largest, minus_smallest = self.to_host(self.all_reduce(pair, "max")).tolist()
        return largest == -minus_smallest

    def all_gather_object(self, obj: Any) -> list[Any]:
        return [pickle.loads(data) for data in self.all_gather_bytes(pickle.dumps(obj))]

    def broadcast_object(self, obj: Any, src: int) -> Any:
        data = self.broadcast_bytes(pickle.dumps(obj) if self.rank == src else b"", src)
        return obj if self.rank == src else pickle.loads(data)


class HostBackend(Backend):
    """A backend whose library exchanges NumPy arrays."""

    @abc.abstractmethod
    def all_reduce_in_place(self, buffer: np.ndarray, patience: Optional[Patience] = None) -> None:
        """Sum a contiguous float32 or float64 array over the ranks; from another thread, with patience."""

    def make_buckets(self, layouts: Sequence[BucketLayout], compression: Optional[str] = None) -> list[Bucket]:
        return [HostBucket(layout, self) for layout in layouts]

    def total(self, number: float, patience: Optional[Patience] = None) -> float:
        mine = np.array([number], np.float32)
        self.all_reduce_in_place(mine, patience)
        return float(mine[0])

    def to_native(self, x: Any) -> np.ndarray:
        return np.ascontiguousarray(self.to_host(x)).reshape(x.shape)

    def from_native(self, y: np.ndarray, like: Any) -> Any:
        return y.astype(like.dtype, copy=False) if isinstance(like, np.ndarray) else self.from_host(y, dtype_name(like))


class SingleProcessBackend(HostBackend):
    """World size 1: every collective gives back what it was given, as a copy."""

    name = "single"
    cannot_overlap = "there is one rank"
    rank = local_rank = 0
    world_size = local_world_size = 1

    def all_reduce(self, x: np.ndarray, op: str) -> np.ndarray:
        return x.copy()

    def broadcast(self, x: np.ndarray, src: int) -> np.ndarray:
        return x.copy()

    def all_gather(self, x: np.ndarray) -> list[np.ndarray]:
        return [x.copy()]

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]

    def broadcast_bytes(self, data: bytes, src: int) -> bytes:
        return data

    def send(self, x: np.ndarray, dst: int) -> None:
        raise AssertionError("the group refuses to send to this rank itself")

    def recv(self, like: np.ndarray, src: int) -> np.ndarray:
        raise AssertionError("the group refuses to receive from this rank itself")

    def barrier(self) -> None:
        pass

    def all_reduce_in_place(self, buffer: np.ndarray, patience: Optional[Patience] = None) -> None:
        pass

    def close(self) -> None:
        pass
