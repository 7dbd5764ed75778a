"""This module defines the interface of a transport, which moves arrays between the ranks of a job.

A transport takes arrays in its library's own form: NumPy arrays for MPI, MindSpore tensors for HCCL, NCCL and MCCL.
:class:`~mindnlp_dp.communication.process_group.ProcessGroup` calls it after checking the arguments. Methods other than
``send``, ``begin_send`` and ``recv`` are collectives: all ranks call them, in the same order.
"""

from __future__ import annotations

import abc
import pickle
from collections.abc import Sequence
from typing import Any, Optional, TypeVar

import numpy as np

from mindnlp_dp.communication.operations import Operation
from mindnlp_dp.communication.transports.channel import Channel
from mindnlp_dp.runtime.arrays import dtype_name, from_host, to_host

T = TypeVar("T")


class Transport(abc.ABC):
    """Moves arrays between the ranks of a job, by one library.

    Attributes:
        waits_for_a_device: whether copying a result to the host waits for a device.
        matches_in_order: whether messages between two ranks ignore tags and are matched in the order of their issue; a
            message may then also keep its rank's later messages and collectives waiting until it is received.
        channel: channel on which gradients are exchanged.
        labels: name of each rank in messages; if empty, messages show its number.
    """

    waits_for_a_device = False
    matches_in_order = False
    labels: Sequence[str] = ()
    name: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    channel: Channel

    # Conversions to and from the library's own form, so that the group accepts and returns either kind.

    @abc.abstractmethod
    def to_native(self, x: Any) -> Any:
        """Convert a NumPy array or a MindSpore tensor to the kind that this transport exchanges."""

    @abc.abstractmethod
    def from_native(self, y: Any, like: Any) -> Any:
        """Convert a result to the kind of array that ``like`` is."""

    @abc.abstractmethod
    def widened(self, x: Any) -> Any:
        """Return an array of a half type as float32; both are of the kind that this transport exchanges."""

    # The primitives that each library implements.

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
        """Send rows of ``x`` (1 or more dimensions) to the ranks in order; return the received rows, in rank order."""

    @abc.abstractmethod
    def send(self, x: Any, dst: int) -> None: ...

    @abc.abstractmethod
    def begin_send(self, x: Any, dst: int, tag: int) -> Any:
        """Begin to send, and return a handle; the caller must not change ``x`` before its ``wait()`` has returned."""

    @abc.abstractmethod
    def recv(self, like: Any, src: int, tag: int = 0) -> Any: ...

    @abc.abstractmethod
    def split(self, ranks: Sequence[int]) -> Transport:
        """Return a transport of ``ranks``, in this order, which include this one.

        A collective: all ranks of this transport call it at the same time, each with its own subgroup's ranks.
        """

    @abc.abstractmethod
    def barrier(self) -> None: ...

    @abc.abstractmethod
    def close(self) -> None: ...

    @abc.abstractmethod
    def _new_channel(self) -> Channel: ...

    # Features of some libraries only.

    def library_without(self, operation: Operation) -> str:
        """Return the name of this transport's library if it does not have an operation; empty if it has."""
        return ""

    # Methods built on the primitives.

    def label(self, rank: int) -> str:
        """Return the name of a rank in messages."""
        return self.labels[rank] if self.labels else str(rank)

    def reopen_channel(self) -> None:
        """Open a new channel after ranks left an exchange on the old one half way. A collective."""
        self.channel.is_superseded = True
        self.channel = self._new_channel()

    def all_reduce_header(self, numbers: np.ndarray, last: Any) -> np.ndarray:
        """Return the sums over the ranks of ``numbers`` (float32) and of ``last``, a number or a one-element tensor."""
        mine = self.to_native(np.append(numbers, np.float32(last)))
        return to_host(self.all_reduce(mine, "sum"))

    def all_equal(self, number: int) -> bool:
        """Return whether all ranks pass the same number, of at most 62 bits, by one max-reduction of [n, -n]."""
        pair = self.to_native(np.array([number, -number], np.int64))
        largest, minus_smallest = to_host(self.all_reduce(pair, "max")).tolist()
        return largest == -minus_smallest

    def gather_on_host(self, obj: T) -> Optional[list[T]]:
        """Return the objects of this host's ranks, by local rank; None if the transport would need an operator.

        It is called before the runtime is configured, and operators, including MCCL's, start MindSpore's threads.
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
