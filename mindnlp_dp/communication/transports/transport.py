"""What a transport is: it moves arrays between the ranks of a job.

It takes them in the form that its library likes best: NumPy arrays for MPI, MindSpore tensors for HCCL, NCCL and MCCL.
It is called by :class:`~mindnlp_dp.communication.collectives.ProcessGroup`, which has checked the arguments, and by
nobody else. Methods other than ``send``, ``begin_send`` and ``recv`` are collectives: all ranks call them, in the same
order.
"""

from __future__ import annotations

import abc
import pickle
from collections.abc import Sequence
from typing import Any, Optional, TypeVar

import numpy as np

from mindnlp_dp.arrays.conversion import from_host, to_host
from mindnlp_dp.arrays.types import dtype_name

from .channel import Channel

T = TypeVar("T")


class Transport(abc.ABC):
    """The ranks of a job, and how arrays get from one to another.

    Attributes:
        waits_for_a_device: whether taking a result to the host makes a device come to a stop.
        channel: what gradients travel on.
        labels: how messages name each rank; without any, by its number.
    """

    waits_for_a_device = False
    labels: Sequence[str] = ()
    name: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    channel: Channel

    # Arrays in the library's own form, so that the group takes and gives back either kind.

    @abc.abstractmethod
    def to_native(self, x: Any) -> Any:
        """Turn a NumPy array or a MindSpore tensor into what this transport exchanges."""

    @abc.abstractmethod
    def from_native(self, y: Any, like: Any) -> Any:
        """Turn a result into the kind of array that ``like`` is."""

    @abc.abstractmethod
    def widened(self, x: Any) -> Any:
        """An array of a half type as float32; both are of the kind that this transport exchanges."""

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
    def all_to_all(self, x: Any, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Any:
        """Rows of ``x``, of at least one dimension, to the ranks in order; returns their rows, in rank order."""

    @abc.abstractmethod
    def send(self, x: Any, dst: int) -> None: ...

    @abc.abstractmethod
    def begin_send(self, x: Any, dst: int, tag: int) -> Any:
        """Begin to send; returns a handle with ``wait()``, until when the caller keeps ``x`` as it is."""

    @abc.abstractmethod
    def recv(self, like: Any, src: int, tag: int = 0) -> Any: ...

    @abc.abstractmethod
    def split(self, ranks: Sequence[int]) -> Transport:
        """A transport among ``ranks``, in this order, of which this one is one. A collective: all ranks of this one
        call it at the same time, each with the ranks of its own part."""

    @abc.abstractmethod
    def barrier(self) -> None: ...

    @abc.abstractmethod
    def close(self) -> None: ...

    @abc.abstractmethod
    def _new_channel(self) -> Channel: ...

    # What only some libraries can.

    def tells_of_a_loss(self, error: BaseException) -> bool:
        """Whether an error says that a rank was lost, and the others can go on without it."""
        return False

    def of_those_left(self) -> Transport:
        """A transport of the ranks that are left when some were lost, in their order; this one is of no use any more.

        A collective of theirs, to which each comes by an error that tells of a loss.
        """
        raise NotImplementedError(f"{self.name} cannot go on without a rank")

    # What follows from them.

    def label(self, rank: int) -> str:
        """How messages name a rank."""
        return self.labels[rank] if self.labels else str(rank)

    def reopen_channel(self) -> None:
        """Open a new channel, after ranks left an exchange on the old one half way; a collective."""
        self.channel.is_superseded = True
        self.channel = self._new_channel()

    def sum_header(self, numbers: np.ndarray, last: Any) -> np.ndarray:
        """The sums of the ranks' numbers, float32, behind which stands ``last``: one more, or a tensor of one."""
        mine = self.to_native(np.append(numbers, np.float32(last)))
        return to_host(self.all_reduce(mine, "sum"))

    def all_equal(self, number: int) -> bool:
        """Whether all ranks bring the same number, of at most 62 bits: the largest of [n, -n] tells."""
        pair = self.to_native(np.array([number, -number], np.int64))
        largest, minus_smallest = to_host(self.all_reduce(pair, "max")).tolist()
        return largest == -minus_smallest

    def gather_on_host(self, obj: T) -> Optional[list[T]]:
        """The objects of this host's ranks, by local rank; None where no operator may run for it.

        It is called before the runtime is configured. Operators, MCCL's too, start MindSpore's threads.
        """
        return None

    def all_gather_object(self, obj: Any) -> list[Any]:
        return [pickle.loads(data) for data in self.all_gather_bytes(pickle.dumps(obj))]


class HostTransport(Transport):
    """A transport whose library exchanges NumPy arrays."""

    def to_native(self, x: Any) -> np.ndarray:
        return np.ascontiguousarray(to_host(x)).reshape(x.shape)

    def widened(self, x: np.ndarray) -> np.ndarray:
        return x.astype(np.float32)

    def from_native(self, y: np.ndarray, like: Any) -> Any:
        return y.astype(like.dtype, copy=False) if isinstance(like, np.ndarray) else from_host(y, dtype_name(like))
