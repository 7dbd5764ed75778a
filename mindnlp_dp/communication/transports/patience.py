"""Waiting for MPI on a thread beside the one that computes."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, Optional

import numpy as np

# How long a patient wait sleeps between two looks: at first, and at most.
_SHORTEST_NAP, _LONGEST_NAP = 50e-6, 1e-3
# What an abandoned exchange still writes to, until the process ends.
_abandoned: list[Any] = []


class AbandonedError(RuntimeError):
    """The exchange was given up before its end."""


class Patience:
    """Waits for MPI without burning the core, which another thread of this process computes on.

    MPI's own waits spin. This looks, sleeps and looks again; :meth:`give_up` ends it from another thread.
    """

    def __init__(self) -> None:
        self._gave_up = threading.Event()

    def give_up(self) -> None:
        self._gave_up.set()

    def wait(self, requests: Sequence[Any], *buffers: Any) -> None:
        """Return when all ``requests`` are done. ``buffers`` are what MPI reads and writes for them.

        Raises:
            AbandonedError: :meth:`give_up` was called.
        """
        nap = _SHORTEST_NAP
        while not all(request.Test() for request in requests):
            if self._gave_up.is_set():
                _abandoned.append((requests, buffers))
                raise AbandonedError("the exchange was given up")
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP)


def barrier(comm: Any, patience: Optional[Patience]) -> None:
    """MPI's barrier; from another thread, with patience."""
    if comm.size == 1:
        return
    if patience is None:
        comm.Barrier()
    else:
        patience.wait([comm.Ibarrier()])


def all_reduce_in_place(comm: Any, array: np.ndarray, op: Any, patience: Optional[Patience]) -> None:
    """MPI's own all-reduce; from another thread, with patience."""
    from mpi4py import MPI

    if patience is None:
        comm.Allreduce(MPI.IN_PLACE, array, op=op)
    else:
        patience.wait([comm.Iallreduce(MPI.IN_PLACE, array, op=op)], array)
