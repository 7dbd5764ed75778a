"""MindSpore's cluster comes together: what a rank does meanwhile, and what is given back to it behind that.

Goes in: whatever MindSpore's ``init()`` finds in the environment. Comes out: a rank that has met all others; signals,
cores and scheduling as they were.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def meet() -> None:
    """Meet all ranks of the job. In MindSpore's scheduler process this serves the job, and never returns."""
    from mindspore import communication, get_context

    if get_context("device_target") == "CPU" and os.environ.get("MS_ROLE") != "MS_SCHED":
        with _who_wakes_another_goes_on():
            communication.init()
    else:
        communication.init()


# Versions: MindSpore 2.7 to 2.10. Cause: its cluster's servers take SIGINT for themselves: they end, and the rank goes
# on, waits for ever for what they would have brought, or does not take notice at all.
# Goes when: KeyboardInterrupt comes with it (tests/failure/test_ranks_that_fail.py).
def take_back_ctrl_c() -> None:
    """Whoever handled SIGINT before MindSpore's cluster came together handles it again."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, handler)


# Versions: MindSpore 2.7 to 2.10. Cause: the thread that asks for a connection to the scheduler says "under way" when
# another one may have found it made, and said so; that is lost then, and the connection given up. On two cores this
# happens so often that some ranks need twenty seconds (tcp_comm.cc, TCPComm::Connect).
# Goes when: no rank logs "Failed to connect to the tcp server" (GLOG_v=1) whose scheduler was there.
@contextmanager
def _who_wakes_another_goes_on() -> Iterator[None]:
    """Threads that begin in here run on this thread's core, and do not interrupt it when they have something to do.

    Behind it they have the cores and the policy that this thread had before.
    """
    cores, policy = os.sched_getaffinity(0), os.sched_getscheduler(0)
    others = set(os.listdir("/proc/self/task")) - {str(threading.get_native_id())}
    try:
        # A container may not allow it, and another policy than the usual one was chosen by somebody.
        with suppress(OSError):
            if policy == os.SCHED_OTHER:
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
                os.sched_setaffinity(0, {sorted(cores)[os.getpid() % len(cores)]})
        yield
    finally:
        for thread in set(os.listdir("/proc/self/task")) - others:
            # It may have ended meanwhile.
            with suppress(OSError):
                os.sched_setscheduler(int(thread), policy, os.sched_param(0))
                os.sched_setaffinity(int(thread), cores)
