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
from collections.abc import Callable, Sequence
from typing import Any, Optional, TypeVar

import numpy as np

from ..bucket import BucketLayout
from ..fingerprints import fingerprint, is_finite
from .buckets import Bucket, HostBucket
from .dtypes import dtype_name
from .ring import Patience

T = TypeVar("T")
REDUCTIONS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "sum": np.add,
    "max": np.maximum,
    "min": np.minimum,
}


def reduce_arrays(arrays: Sequence[np.ndarray], op: str) -> np.ndarray:
    """Reduce in rank order, so that every rank computes the same bits."""
    return functools.reduce(REDUCTIONS[op], arrays)


class Backend(abc.ABC):
    """The ranks of a job, and how arrays get from one to another.

    Attributes:
        cannot_overlap: why buckets cannot be exchanged during a backward pass; empty when they can.
        waits_for_a_device: whether taking a result to the host makes a device come to a stop.
        abandoned: why this rank left an exchange half way, if it did; no later one would match the other ranks'.
        channel: how often buckets were given a new channel; those of an older one are of no use.
        bytes_sent: how many bytes of gradients this rank sent to other hosts; None where nobody counts them.
    """

    cannot_overlap = ""
    waits_for_a_device = False
    abandoned = ""
    channel = 0
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

    @abc.abstractmethod
    def widened(self, x: Any) -> Any:
        """An array of a half type as float32; both are of the kind that this backend exchanges."""

    @staticmethod
    def to_host(x: Any) -> np.ndarray:
        """A NumPy array with ``x``'s values, sharing memory where it can.

        bfloat16 becomes float32, which holds all of its values: neither NumPy nor MPI knows it. Bytes come in this
        machine's order.
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

    @staticmethod
    def from_host(x: np.ndarray, dtype: str) -> Any:
        """A MindSpore tensor of type ``dtype`` that owns ``x``'s memory where the type allows."""
        import mindspore

        tensor = mindspore.Tensor.from_numpy(np.ascontiguousarray(x)) if x.ndim and x.size else mindspore.Tensor(x)
        return tensor if dtype_name(tensor) == dtype else tensor.astype(getattr(mindspore, dtype))

    # What is asked of all gradients at once, so that a device has to be waited for once.

    def are_finite(self, arrays: Sequence[Any]) -> bool:
        """Whether they hold neither NaN nor infinity."""
        return all(map(is_finite, map(self.to_host, arrays)))

    def fingerprint(self, gradient: Any) -> Any:
        """What :meth:`have_changed` compares with a later one of the same gradient."""
        return fingerprint(self.to_host(gradient))

    def have_changed(self, before: Sequence[Any], after: Sequence[Any]) -> Any:
        """Whether any fingerprint is not what it was: a truth; or, on a device, a tensor that will hold one."""
        return list(before) != list(after)

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

    def reopen(self) -> None:
        """Give buckets a new channel, after ranks left an exchange on the old one half way; a collective."""
        self.abandoned = ""
        self.channel += 1

    @abc.abstractmethod
    def close(self) -> None: ...

    # What follows from them.

    def inverse_total(self, number: float, patience: Optional[Patience] = None) -> Any:
        """One over the sum of the ranks' numbers, for :meth:`.Bucket.start`; None where it is 0.

        From another thread, with patience. On a device a tensor, which nobody waits for.
        """
        mine = self.to_native(np.array([number], np.float32))
        total = float(self.to_host(self.all_reduce(mine, "sum"))[0])
        return 1.0 / total if total > 0 else None

    def sum_header(self, numbers: np.ndarray, last: Any) -> np.ndarray:
        """The sums of the ranks' numbers, float32, behind which stands ``last``: one more, or a tensor of one."""
        mine = self.to_native(np.append(numbers, np.float32(last)))
        return self.to_host(self.all_reduce(mine, "sum"))

    def all_equal(self, number: int) -> bool:
        """Whether all ranks bring the same number, of at most 62 bits: the largest of [n, -n] tells."""
        pair = self.to_native(np.array([number, -number], np.int64))
        largest, minus_smallest = self.to_host(self.all_reduce(pair, "max")).tolist()
        return largest == -minus_smallest

    def gather_on_host(self, obj: T) -> Optional[list[T]]:
        """The objects of this host's ranks, by local rank; None where no operator may run for it.

        It is called before the runtime is configured. Operators, MCCL's too, start MindSpore's threads.
        """
        return None

    def all_gather_object(self, obj: Any) -> list[Any]:
        return [pickle.loads(data) for data in self.all_gather_bytes(pickle.dumps(obj))]


class HostBackend(Backend):
    """A backend whose library exchanges NumPy arrays."""

    @abc.abstractmethod
    def all_reduce_in_place(self, buffer: np.ndarray, patience: Optional[Patience] = None) -> None:
        """Sum a contiguous float32 or float64 array over the ranks; from another thread, with patience."""

    def make_buckets(self, layouts: Sequence[BucketLayout], compression: Optional[str] = None) -> list[Bucket]:
        return [HostBucket(layout, self) for layout in layouts]

    def inverse_total(self, number: float, patience: Optional[Patience] = None) -> Any:
        mine = np.array([number], np.float32)
        self.all_reduce_in_place(mine, patience)
        return 1.0 / float(mine[0]) if mine[0] > 0 else None

    def to_native(self, x: Any) -> np.ndarray:
        return np.ascontiguousarray(self.to_host(x)).reshape(x.shape)

    def widened(self, x: np.ndarray) -> np.ndarray:
        return x.astype(np.float32)

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
