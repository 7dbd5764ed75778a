"""This module decides how a rank of an MPI job exits, and continues with the surviving ranks after a rank was lost.

MPI is finalized only by all ranks together. A failed rank would wait there for the others, which wait for it
in a collective, forever. So an exception aborts the job, and so does a nonzero exit code. A rank that has
finished sleeps here until the others have finished, and prints after a while that it waits.

Python does not tell its exit handlers the exit code. So ``sys.exit`` (which argparse calls), ``exit`` and ``quit``
are patched to remember it. A bare ``raise SystemExit(3)`` stays unknown, and so does ``from sys import exit`` in a
module other than the script: both are treated as an early end. ``mindnlp-dp run`` and ``python -m mpi4py`` know
these codes, too.

With ULFM, "User Level Failure Mitigation" (Bland et al., "Post-failure recovery of MPI communication capability",
2013), which is in OpenMPI 5, a lost rank does not end the job: mpirun must be started with ``--with-ft ulfm``. A rank
that notices the loss revokes its communicators, so that ranks that wait for other ranks notice it, too. All then call
``Shrink``, in which they agree on the survivors.
"""

from __future__ import annotations

import atexit
import dis
import sys
import threading
import time
import types
from collections.abc import Sequence
from typing import Any, NoReturn, Optional

# How long a finished rank waits for the others before it prints a message.
PATIENCE_SECONDS = 10.0

POLL_SECONDS = 0.02

_Trace = Optional[types.TracebackType]

# The communicator whose ranks exit together.
_exit_comm: Any = None


def set_exit_group(comm: Any) -> None:
    """Make this rank exit together with the ranks of ``comm`` only, from now on. A collective of these ranks."""
    global _exit_comm
    _exit_comm = comm.Dup()


def abort_job_on_failure(mpi: Any) -> None:
    """Make a failure of this rank end all ranks of the job, from now on. A collective; ``mpi`` is ``mpi4py.MPI``."""
    set_exit_group(mpi.COMM_WORLD)
    if _exit_comm.Get_size() == 1:
        return
    exits = _Exits()
    previous = sys.excepthook

    def abort(code: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        mpi.COMM_WORLD.Abort(code)

    def excepthook(kind: type[BaseException], error: BaseException, trace: _Trace) -> None:
        previous(kind, error, trace)
        abort(1)

    def leave() -> None:
        if mpi.Is_finalized():
            return
        if code := exits.final_code():
            abort(code)
        try:
            _wait_for_the_others(_exit_comm)
        except mpi.Exception as error:
            # A lost rank cannot be waited for.
            if not is_rank_failure(error):
                raise

    sys.excepthook = excepthook
    # mpi4py finalizes MPI after all of Python's own handlers.
    atexit.register(leave)


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


class _Exits:
    """Remembers the last exit that was requested, and decides at the end whether it ended the script."""

    def __init__(self) -> None:
        self._last: Optional[SystemExit] = None
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        while frame.f_back is not None:
            frame = frame.f_back
        self._outermost = frame
        # The script may have its own name for it: from sys import exit.
        names = vars(sys.modules["__main__"])
        for name in [name for name, value in names.items() if value is sys.exit]:
            names[name] = self._exit
        sys.exit = self._exit  # type: ignore[assignment]
        # The class of the built-in exit and quit.
        quitter = sys.modules.get("_sitebuiltins")
        if quitter is not None:
            quitter.Quitter.__call__ = lambda _, code=None: self._exit(code)  # type: ignore[attr-defined]

    def _exit(self, status: Any = None, /) -> NoReturn:
        leave = SystemExit(status)
        # In another thread, SystemExit ends only that thread.
        if threading.current_thread() is threading.main_thread():
            self._last = leave
        raise leave

    def final_code(self) -> int:
        """Return the exit code of this process if it is known, else 0."""
        if self._last is None or self._was_caught(self._last):
            return 0
        code = self._last.code
        if code is None or isinstance(code, int):
            return (code or 0) & 0xFF
        return 1

    def _was_caught(self, leave: SystemExit) -> bool:
        """Return whether the script continued after ``leave``: to its end, or to another exception."""
        if _has_returned(self._outermost):
            return True
        trace = leave.__traceback__
        if trace is None:
            # No handler caught it.
            return False
        if trace.tb_frame is not self._outermost:
            return _has_returned(trace.tb_frame)
        return trace.tb_lasti != self._outermost.f_lasti and not _was_raised_again(self._outermost)


def _last_instruction(frame: types.FrameType) -> tuple[str, int]:
    """Return the name and the argument of the last instruction of a frame that has ended."""
    code = frame.f_code.co_code
    return dis.opname[code[frame.f_lasti]], code[frame.f_lasti + 1]


def _has_returned(frame: types.FrameType) -> bool:
    """Return whether a frame that has ended did so by a return, not by an exception."""
    return _last_instruction(frame)[0].startswith("RETURN_")


def _was_raised_again(frame: types.FrameType) -> bool:
    """Return whether a frame that ended by an exception re-raised a handled one: after ``finally``, or by ``raise``."""
    return _last_instruction(frame) == ("RAISE_VARARGS", 0) or _last_instruction(frame)[0] == "RERAISE"


def is_rank_failure(error: Optional[BaseException]) -> bool:
    """Return whether an error, or one of its causes, is MPI's error for a lost rank."""
    while error is not None:
        if type(error).__module__ == "mpi4py.MPI":
            from mpi4py import MPI

            if error.Get_error_class() in (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED):  # type: ignore[attr-defined]
                return True
        error = error.__cause__ or error.__context__
    return False


def surviving_ranks(comm: Any, others: Sequence[Any]) -> Any:
    """Return a communicator of the surviving ranks of ``comm``, in its order; ``others`` are their other communicators.

    A collective of the surviving ranks. The old communicators can no longer be used. They are not freed, because
    freeing one is a collective of all of its ranks.
    """
    for each in (*others, comm):
        each.Revoke()
    return comm.Shrink()
