"""This module decides how a rank of an MPI job exits.

MPI is finalized only by all ranks together. A failed rank would wait there for the others, which wait for it
in a collective, forever. So an exception aborts the job. A rank that has finished sleeps here until the others have
finished, and prints after a while that it waits.

Python does not tell its exit handlers the exit code: under plain ``mpirun python script.py``, a rank that calls
``sys.exit(3)`` has just finished early. ``mindnlp-dp run`` and ``python -m mpi4py`` know the code, and end the job.
"""

from __future__ import annotations

import array
import atexit
import fcntl
import os
import stat
import sys
import termios
import time
import types
from typing import Any, Optional

# How long a finished rank waits for the others before it prints a message.
PATIENCE_SECONDS = 10.0

POLL_SECONDS = 0.02


def abort_job_on_failure(mpi: Any) -> None:
    """Make a failure of this rank end all ranks of the job, from now on. A collective; ``mpi`` is ``mpi4py.MPI``."""
    comm = mpi.COMM_WORLD.Dup()
    if comm.Get_size() == 1:
        return
    previous, set_abort_status = sys.excepthook, mpi._set_abort_status
    will_abort = False

    def note_abort_status(status: int) -> None:
        # python -m mpi4py calls it with a script's exit code, and aborts the job after Python's own exit handlers.
        nonlocal will_abort
        will_abort = True
        set_abort_status(status)

    def excepthook(kind: type[BaseException], error: BaseException, trace: Optional[types.TracebackType]) -> None:
        previous(kind, error, trace)
        sys.stdout.flush()
        sys.stderr.flush()
        _wait_until_output_is_read()
        mpi.COMM_WORLD.Abort(1)

    def leave() -> None:
        if not mpi.Is_finalized() and not will_abort:
            _wait_for_the_others(comm)

    sys.excepthook = excepthook
    mpi._set_abort_status = note_abort_status
    # mpi4py finalizes MPI after all of Python's own handlers.
    atexit.register(leave)


def _wait_until_output_is_read() -> None:
    """Wait, at most a second, until mpirun has read what this rank wrote to its pipes.

    On a busy host mpirun can handle MPI_Abort before it reads the last lines of a traceback, which are then lost.
    """
    deadline = time.monotonic() + 1.0
    for descriptor in (1, 2):
        unread = array.array("i", [1])
        while unread[0] and time.monotonic() < deadline:
            try:
                if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                    break
                fcntl.ioctl(descriptor, termios.FIONREAD, unread)
            except OSError:
                break
            time.sleep(POLL_SECONDS)


def _wait_for_the_others(comm: Any) -> None:
    request, began, patient = comm.Ibarrier(), time.monotonic(), True
    while not request.Test():
        time.sleep(POLL_SECONDS)
        if patient and time.monotonic() - began > PATIENCE_SECONDS:
            patient = False
            print(
                f"rank {comm.Get_rank()} of {comm.Get_size()} reached its end {PATIENCE_SECONDS:.0f} s ago, and others "
                "have not. If they wait for it in a collective, they wait forever: every rank must make the same "
                "collective calls. Ctrl-C ends the job",
                file=sys.stderr,
                flush=True,
            )
