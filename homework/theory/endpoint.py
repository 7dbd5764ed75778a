"""This module sends and receives flat arrays between ranks and counts the traffic; every algorithm here uses it.

There are two kinds of endpoint: over MPI, and between the threads of one process. With threads, a world of any size
runs on any machine, and its messages can be inspected.
"""

from __future__ import annotations

import abc
import queue
import threading
from dataclasses import dataclass, field, replace
from typing import Any, Callable, TypeVar

import numpy as np

T = TypeVar("T")

# A thread that has waited this long for a message is considered deadlocked.
_PATIENCE_SECONDS = 60.0


@dataclass(frozen=True)
class Message:
    """An array that one rank sent to another; the algorithm names its phase and the part of the array."""

    src: int
    dst: int
    payload: np.ndarray
    phase: str
    part: str


class Endpoint(abc.ABC):
    """One of ``world_size`` ranks, which sends flat arrays to the others and receives theirs.

    Attributes:
        bytes_sent, messages_sent, bytes_received, messages_received: totals so far. An empty message counts as one.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.bytes_sent = self.messages_sent = 0
        self.bytes_received = self.messages_received = 0

    def send(self, array: np.ndarray, dst: int, phase: str = "", part: str = "array") -> None:
        """Send ``array`` to rank ``dst``, which receives its messages in the order of sending."""
        self._count_sent(array)
        self._send(Message(self.rank, dst, array, phase, part))

    def recv(self, like: np.ndarray, src: int) -> np.ndarray:
        """Receive the next array from rank ``src``; it has the length and type of ``like``."""
        array = self._recv(like, src)
        self._count_received(array)
        return array

    def sendrecv(
        self, array: np.ndarray, dst: int, like: np.ndarray, src: int, *, phase: str = "", part: str = "array"
    ) -> np.ndarray:
        """Send to one rank and receive from another at the same time, so that a ring of ranks cannot deadlock."""
        self._count_sent(array)
        received = self._sendrecv(Message(self.rank, dst, array, phase, part), like, src)
        self._count_received(received)
        return received

    def _count_sent(self, array: np.ndarray) -> None:
        self.messages_sent += 1
        self.bytes_sent += array.nbytes

    def _count_received(self, array: np.ndarray) -> None:
        self.messages_received += 1
        self.bytes_received += array.nbytes

    @abc.abstractmethod
    def _send(self, message: Message) -> None: ...

    @abc.abstractmethod
    def _recv(self, like: np.ndarray, src: int) -> np.ndarray: ...

    @abc.abstractmethod
    def _sendrecv(self, message: Message, like: np.ndarray, src: int) -> np.ndarray: ...


class MPIEndpoint(Endpoint):
    """An endpoint over an mpi4py communicator."""

    def __init__(self, comm: Any) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size())
        self.comm = comm

    def _send(self, message: Message) -> None:
        self.comm.Send(np.ascontiguousarray(message.payload), dest=message.dst)

    def _recv(self, like: np.ndarray, src: int) -> np.ndarray:
        array = np.empty_like(like)
        self.comm.Recv(array, source=src)
        return array

    def _sendrecv(self, message: Message, like: np.ndarray, src: int) -> np.ndarray:
        received = np.empty_like(like)
        self.comm.Sendrecv(np.ascontiguousarray(message.payload), dest=message.dst, recvbuf=received, source=src)
        return received


@dataclass
class _World:
    """The message queues between the threads of :func:`run_ranks`."""

    size: int
    wires: dict[tuple[int, int], queue.Queue] = field(default_factory=dict)
    failed: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        pairs = ((src, dst) for src in range(self.size) for dst in range(self.size))
        self.wires = {pair: queue.Queue() for pair in pairs}


class ThreadEndpoint(Endpoint):
    """An endpoint between threads of one process.

    Attributes:
        sent: every message that this rank has sent, in order.
    """

    def __init__(self, rank: int, world: _World) -> None:
        super().__init__(rank, world.size)
        self._world = world
        self.sent: list[Message] = []

    def _send(self, message: Message) -> None:
        # A copy, as over a network: the sender may overwrite its array at once.
        message = replace(message, payload=message.payload.copy())
        self.sent.append(message)
        self._world.wires[message.src, message.dst].put(message.payload)

    def _recv(self, like: np.ndarray, src: int) -> np.ndarray:
        waited = 0.0
        while True:
            try:
                array = self._world.wires[src, self.rank].get(timeout=0.1)
                break
            except queue.Empty:
                waited += 0.1
                if self._world.failed.is_set() or waited > _PATIENCE_SECONDS:
                    raise RuntimeError(f"rank {self.rank} received no message from rank {src}") from None
        if array.shape != like.shape:
            raise ValueError(f"rank {self.rank} expected {like.shape} from rank {src}, got {array.shape}")
        return array

    def _sendrecv(self, message: Message, like: np.ndarray, src: int) -> np.ndarray:
        self._send(message)
        return self._recv(like, src)


def run_ranks(world_size: int, function: Callable[[ThreadEndpoint], T]) -> tuple[list[T], list[ThreadEndpoint]]:
    """Run ``function`` on every rank, one thread each; return the results and the endpoints, by rank.

    Raises:
        Exception: the exception of the lowest rank that failed, ignoring ranks that failed only because of another one.
    """
    world = _World(world_size)
    endpoints = [ThreadEndpoint(rank, world) for rank in range(world_size)]
    results: list[Any] = [None] * world_size
    errors: list[tuple[bool, int, Exception]] = []

    def run(endpoint: ThreadEndpoint) -> None:
        try:
            results[endpoint.rank] = function(endpoint)
        except Exception as error:  # noqa: BLE001
            errors.append((world.failed.is_set(), endpoint.rank, error))
            world.failed.set()

    threads = [threading.Thread(target=run, args=(endpoint,)) for endpoint in endpoints]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise min(errors, key=lambda found: found[:2])[2]
    return results, endpoints


def bounds_of(length: int, num_parts: int) -> list[int]:
    """Return the bounds of ``num_parts`` consecutive parts of an array, whose lengths differ by at most one.

    >>> bounds_of(10, 4)
    [0, 2, 5, 7, 10]
    """
    return [length * part // num_parts for part in range(num_parts + 1)]


def parts_of(array: np.ndarray, num_parts: int) -> list[np.ndarray]:
    """Return views of the parts of an array that :func:`bounds_of` defines."""
    bounds = bounds_of(len(array), num_parts)
    return [array[begin:end] for begin, end in zip(bounds, bounds[1:])]
