"""Model the streams of a job's devices, on which HCCL runs the messages between ranks, for the unit tests.

Every rank is a thread; they take turns, because MindSpore is not called by several threads at once. A rank has one
queue per group, in which its messages lie in the order of their issue (MindSpore 2.7: comm_common.cc, one communication
stream for each group). A send at the head of its queue completes only together with a receive at the head of the peer's
(CANN's manual of HcclSend and HcclRecv), whatever their tags are (dist_comm_isend.cc and dist_comm_irecv.cc do not pass
them on). Results hold NaN until the host reads one, which waits for all streams of the rank (ascend_device_address.cc,
SyncStream). The first message over a link makes the thread that issues a rank's messages wait until the peer issues its
first message over this link (HCCL_CONNECT_TIMEOUT).

A job in which all ranks wait, or have ended, raises :class:`DeadlockError` in the waiting ranks.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

import numpy as np

from mindnlp_dp.runtime.arrays import dtype_name, to_host


class DeadlockError(RuntimeError):
    """No rank of the job can continue."""


@dataclass
class Message:
    """A message that was issued: a send has ``data``, a receive the ``result`` that it fills."""

    rank: int
    peer: int
    is_send: bool
    data: object = None
    result: LazyArray = None

    @property
    def link(self):
        return (self.rank, self.peer) if self.is_send else (self.peer, self.rank)


@dataclass
class LazyArray:
    """The result of a receive; its values are known to the host once it has read any result of its rank."""

    streams: Streams
    rank: int
    values: np.ndarray

    shape = property(lambda self: self.values.shape)
    dtype = property(lambda self: self.values.dtype)
    nbytes = property(lambda self: self.values.nbytes)

    def asnumpy(self):
        self.streams.synchronize(self.rank)
        return self.values


class Streams:
    """The queues of all ranks of a job, whose threads take turns: one runs until it waits for its messages."""

    def __init__(self, world_size):
        self._issued = [deque() for _ in range(world_size)]
        self._queues = {}
        self._links = {}
        self._is_running = [True] * world_size
        self._waits = [False] * world_size
        self._errors = [""] * world_size
        self._turns = [threading.Semaphore(rank == 0) for rank in range(world_size)]

    def begin(self, rank):
        """Wait for this rank's first turn."""
        self._turns[rank].acquire()

    def issue(self, group, message):
        self._issued[message.rank].append((group, message))
        while self._connect() or self._match():
            pass

    def synchronize(self, rank):
        """Wait, as a host read does, until all messages that this rank has issued are complete."""
        self._waits[rank] = True
        while self._is_pending(rank):
            following = self._next()
            if following is None:
                raise DeadlockError(f"rank {rank} waits for ever: {self._heads()}")
            self._turns[following].release()
            self._turns[rank].acquire()
        self._waits[rank] = False
        if self._errors[rank]:
            raise RuntimeError(self._errors[rank])

    def end(self, rank):
        """Note that a rank's program has ended; its device continues with what was issued."""
        self._is_running[rank] = False
        following = self._next()
        if following is None and any(self._is_running):
            # It finds that no rank can continue.
            following = self._is_running.index(True)
        if following is not None:
            self._turns[following].release()

    def _next(self):
        """Return a rank that can continue, or None."""
        ranks = range(len(self._issued))
        return next((r for r in ranks if self._is_running[r] and not (self._waits[r] and self._is_pending(r))), None)

    def _is_pending(self, rank):
        return bool(self._issued[rank]) or any(queue for (owner, _), queue in self._queues.items() if owner == rank)

    def _heads(self):
        heads = {owner: queue[0] for (owner, _), queue in self._queues.items() if queue}
        return ", ".join(
            f"rank {owner} {'sends to' if head.is_send else 'receives from'} {head.peer}"
            for owner, head in sorted(heads.items())
        )

    def _connect(self):
        """Move messages of connected links from the issuing threads to the queues; return whether any moved."""
        moved = False
        for rank, issued in enumerate(self._issued):
            while issued:
                group, message = issued[0]
                arrived = self._links.setdefault((group, message.link), set())
                arrived.add(rank)
                if len(arrived) < 2:
                    break
                self._queues.setdefault((rank, group), deque()).append(message)
                issued.popleft()
                moved = True
        return moved

    def _match(self):
        """Complete the pairs of messages at the heads of their queues; return whether there were any."""
        moved = False
        for (rank, group), queue in list(self._queues.items()):
            while queue and queue[0].is_send:
                others = self._queues.get((queue[0].peer, group))
                if not others or others[0].is_send or others[0].peer != rank:
                    break
                sent, received = queue.popleft(), others.popleft()
                if np.shape(sent.data) != received.result.shape:
                    # HCCL moves as many bytes as the receiver asks for; the host hears of an error at its next read.
                    self._errors[received.rank] = f"{np.shape(sent.data)} was sent, not {received.result.shape}"
                else:
                    received.result.values[...] = np.asarray(sent.data)
                moved = True
        return moved


class StreamTransport:
    """The messages of one rank in a group, as StageP2P calls them."""

    waits_for_a_device = True

    def __init__(self, streams, ranks, rank, *, matches_in_order=True):
        self._streams, self._ranks, self.rank = streams, ranks, rank
        self.matches_in_order = matches_in_order

    def to_native(self, x):
        return x

    def from_native(self, y, like):
        return y

    def begin_send(self, x, dst, tag):
        # A result that is not complete yet is sent as it will be: operators are ordered by their streams.
        data = x.values if isinstance(x, LazyArray) else to_host(x)
        self._streams.issue(self._ranks, Message(self.rank, self._ranks[dst], is_send=True, data=data))

    def recv(self, like, src, tag=0):
        result = LazyArray(self._streams, self.rank, np.full(like.shape, np.nan, dtype_name(like)))
        self._streams.issue(self._ranks, Message(self.rank, self._ranks[src], is_send=False, result=result))
        return result
