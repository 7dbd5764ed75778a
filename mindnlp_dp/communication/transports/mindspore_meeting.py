"""This module joins MindSpore's cluster, and then restores this rank's signal handler, cores and scheduling policy.

The MindSpore transport calls it; MindSpore's ``init()`` reads its settings from the environment.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def meet() -> None:
    """Join all ranks of the job. In MindSpore's scheduler process, this call serves the job and never returns."""
    from mindspore import communication, get_context

    if get_context("device_target") == "CPU" and os.environ.get("MS_ROLE") != "MS_SCHED":
        with _who_wakes_another_goes_on():
            communication.init()
    else:
        communication.init()


# Versions: MindSpore 2.7 to 2.10. Cause: its cluster's servers handle SIGINT themselves: they end, and the rank
# continues, waits forever for their messages, or does not notice at all.
# Goes when: SIGINT raises KeyboardInterrupt without this (tests/failure/test_ranks_that_fail.py).
def take_back_ctrl_c() -> None:
    """Restore the handler of SIGINT that was installed before MindSpore's cluster was joined."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, handler)


# Versions: MindSpore 2.7 to 2.10. Cause: the thread that requests a connection to the scheduler sets its state to
# "under way", even if another thread has already set it to "connected"; that is lost, and the connection given up.
# On two cores this happens so often that some ranks need 20 seconds (tcp_comm.cc, TCPComm::Connect).
# Goes when: no rank logs "Failed to connect to the tcp server" (GLOG_v=1) although its scheduler was running.
@contextmanager
def _who_wakes_another_goes_on() -> Iterator[None]:
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
