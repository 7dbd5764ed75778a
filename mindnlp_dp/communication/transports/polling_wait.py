"""This module waits for MPI on a background thread, without taking the core from the thread that computes."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, Optional

import numpy as np

# Seconds of sleep between two polls: at first, and at most.
_SHORTEST_NAP, _LONGEST_NAP = 50e-6, 1e-3

# Requests and buffers of abandoned exchanges: MPI may write to them until the process ends.
_abandoned: list[Any] = []


class AbandonedError(RuntimeError):
    """The exchange was given up before it was complete."""


class PollingWait:
    """Waits for MPI without occupying the core on which another thread of this process computes.

    MPI's own waits spin. This class polls and sleeps; :meth:`abandon` ends the wait from another thread.
    """

    def __init__(self) -> None:
        self._gave_up = threading.Event()

    def abandon(self) -> None:
        self._gave_up.set()

    def wait(self, requests: Sequence[Any], *buffers: Any) -> None:
        """Return when all ``requests`` are done. ``buffers`` are the memory that MPI reads and writes for them.

        Raises:
            AbandonedError: :meth:`abandon` was called.
        """
        nap = _SHORTEST_NAP
        while not all(request.Test() for request in requests):
            if self._gave_up.is_set():
                _abandoned.append((requests, buffers))
                raise AbandonedError("the exchange was aborted")
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP)


def barrier(comm: Any, waiter: Optional[PollingWait]) -> None:
    """Call MPI's barrier; on a background thread, pass ``waiter`` to poll instead of spinning."""
    if comm.size == 1:
        return
    if waiter is None:
        comm.Barrier()
    else:
        waiter.wait([comm.Ibarrier()])


def all_reduce_in_place(comm: Any, array: np.ndarray, op: Any, waiter: Optional[PollingWait]) -> None:
    """Call MPI's own all-reduce in place; on a background thread, pass ``waiter`` to poll instead of spinning."""
    from mpi4py import MPI

    if waiter is None:
        comm.Allreduce(MPI.IN_PLACE, array, op=op)
    else:
        waiter.wait([comm.Iallreduce(MPI.IN_PLACE, array, op=op)], array)
