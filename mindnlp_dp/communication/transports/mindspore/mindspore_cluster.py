"""This module joins MindSpore's cluster, restores what joining it has changed, and creates groups of some of its ranks.

Joining changes this rank's signal handler, cores and scheduling policy. The MindSpore transport calls this module;
MindSpore's ``init()`` reads its settings from the environment.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from mindnlp_dp.communication.transports.mindspore.collective_calls import MCCLCalls
from mindnlp_dp.runtime.arrays import to_host


def init_cluster() -> None:
    """Join all ranks of the job. In MindSpore's scheduler process, this call serves the job and never returns."""
    from mindspore import communication, get_context

    if get_context("device_target") == "CPU" and os.environ.get("MS_ROLE") != "MS_SCHED":
        with _on_one_core():
            communication.init()
    else:
        communication.init()


# Versions: MindSpore 2.7 to 2.10. Cause: its cluster's servers handle SIGINT themselves: they end, and the rank
# continues, waits forever for their messages, or does not notice at all.
# Goes when: SIGINT raises KeyboardInterrupt without this (tests/failure/test_ranks_that_fail.py).
def restore_sigint_handler() -> None:
    """Restore the handler of SIGINT that was installed before MindSpore's cluster was joined."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, handler)


# Versions: MindSpore 2.7 to 2.10. Cause: the thread that requests a connection to the scheduler sets its state to
# "under way", even if another thread has already set it to "connected"; that is lost, and the connection given up.
# On two cores this happens so often that some ranks need 20 seconds (tcp_comm.cc, TCPComm::Connect).
# Goes when: no rank logs "Failed to connect to the tcp server" (GLOG_v=1) although its scheduler was running.
@contextmanager
def _on_one_core() -> Iterator[None]:
    """Keep threads that start in the block on this thread's core; they do not preempt it when they wake up.

    After the block they have the cores and the scheduling policy that this thread had before.
    """
    cores, policy = os.sched_getaffinity(0), os.sched_getscheduler(0)
    others = set(os.listdir("/proc/self/task")) - {str(threading.get_native_id())}
    try:
        # A container may not allow it, and a policy other than the default was chosen by the user.
        with suppress(OSError):
            if policy == os.SCHED_OTHER:
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
                os.sched_setaffinity(0, {sorted(cores)[os.getpid() % len(cores)]})
        yield
    finally:
        for thread in set(os.listdir("/proc/self/task")) - others:
            # The thread may have ended meanwhile.
            with suppress(OSError):
                os.sched_setscheduler(int(thread), policy, os.sched_param(0))
                os.sched_setaffinity(int(thread), cores)


# Groups of some of a job's ranks, and the collectives that MCCL lacks in them.
#
# On CPU, MCCL can only sum float32 in such a group, and send messages (from MindSpore 2.8 on). The all-gather and
# broadcast of bytes, which training also needs, are done by sums, exactly, at twice the bytes. All-to-all is not
# available (MindSpore 2.7 to 2.10).


def create_group(ranks: Sequence[int]) -> str:
    """Create a MindSpore group of these ranks of the job, and return its name; each of these ranks calls it."""
    from mindspore import communication

    name = "mindnlp_dp_" + "_".join(map(str, ranks))
    communication.create_group(name, list(ranks))
    return name


class AllReduceOnlyCalls(MCCLCalls):
    """Builds all-gather and broadcast from the float32 sum, MCCL's only collective among some ranks."""

    def __init__(self, group: str, ranks: Sequence[int], rank: int) -> None:
        super().__init__(group, ranks)
        self._rank = rank

    def all_gather(self, x: Any, world_size: int) -> list[Any]:
        """Gather by a sum: float32 holds pairs of bytes exactly, and every other rank adds zero."""
        array = to_host(x)
        rows = np.zeros((world_size, -(-array.nbytes // 2)), np.float32)
        rows[self._rank] = _halves(array)
        return [_tensor(row, array) for row in self._sum(rows)]

    def broadcast(self, x: Any, src: int) -> Any:
        array = to_host(x)
        return _tensor(self._sum(_halves(array if self._rank == src else np.zeros_like(array))), array)

    def _sum(self, halves: np.ndarray) -> np.ndarray:
        import mindspore

        return to_host(self.all_reduce(mindspore.Tensor(halves), "sum"))


def _halves(array: np.ndarray) -> np.ndarray:
    """Return an array's bytes, two by two, as float32 numbers below 65536."""
    padded = np.zeros(array.nbytes + array.nbytes % 2, np.uint8)
    padded[: array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return padded.view(np.uint16).astype(np.float32)


def _tensor(halves: np.ndarray, like: np.ndarray) -> Any:
    import mindspore

    data = halves.astype(np.uint16).view(np.uint8)[: like.nbytes]
    return mindspore.Tensor(data.copy().view(like.dtype).reshape(like.shape))
