"""How a rank of an MPI job leaves: a failure ends the job, an early end is said.

MPI ends when all ranks do. A rank that fails by itself would wait in MPI's end for the
others, who wait for it in a collective, for ever. So an exception aborts the job, and so
does an exit code; a rank that came to its end waits here, asleep, and says
after a while that it does.

Python tells nobody at exit with which code it exits. ``sys.exit``, and with it argparse,
``exit`` and ``quit`` are made to remember it. A bare ``raise SystemExit(3)`` stays unknown, and so does
a ``from sys import exit`` of another module than the script: they are taken for an early end.
``mindnlp-dp run`` and ``python -m mpi4py`` know that code as well.
"""

from __future__ import annotations

import atexit
import dis
import sys
import threading
import time
import types
from typing import Any, NoReturn, Optional

from .mpi_faults import tells_of_a_loss

# How long the others may take to come to their end before it is worth a word.
PATIENCE_SECONDS = 10.0
POLL_SECONDS = 0.02

_Trace = Optional[types.TracebackType]
# Whose ranks leave together.
_everybody: Any = None


def end_with(comm: Any) -> None:
    """From now on this rank leaves together with those of ``comm`` alone. A collective of theirs."""
    global _everybody
    _everybody = comm.Dup()


def end_together(mpi: Any) -> None:
    """From now on a failure of this rank ends all ranks of the job. A collective; ``mpi`` is ``mpi4py.MPI``."""
    end_with(mpi.COMM_WORLD)
    if _everybody.Get_size() == 1:
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
            _wait_for_the_others(_everybody)
        except mpi.Exception as error:
            # There is nobody to wait for any more.
            if not tells_of_a_loss(error):
                raise

    sys.excepthook = excepthook
    # mpi4py ends MPI behind all of Python's own handlers.
    atexit.register(leave)


def _wait_for_the_others(comm: Any) -> None:
    request, began, patient = comm.Ibarrier(), time.monotonic(), True
    while not request.Test():
        time.sleep(POLL_SECONDS)
        if patient and time.monotonic() - began > PATIENCE_SECONDS:
            patient = False
            print(
                f"rank {comm.Get_rank()} of {comm.Get_size()} came to its end {PATIENCE_SECONDS:.0f} s ago, and others "
                "have not. If they wait for it in a collective they wait for ever: every rank must make the same "
                "collective calls. Ctrl-C ends the job",
                file=sys.stderr,
                flush=True,
            )


class _Exits:
    """Remembers the last exit that was asked for, and knows at the end whether that was the end of the script."""

    def __init__(self) -> None:
        self._last: Optional[SystemExit] = None
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        while frame.f_back is not None:
            frame = frame.f_back
        self._outermost = frame
        # Where the script has it under a name of its own, too: from sys import exit.
        names = vars(sys.modules["__main__"])
        for name in [name for name, value in names.items() if value is sys.exit]:
            names[name] = self._exit
        sys.exit = self._exit  # type: ignore[assignment]
        # What the names exit and quit are.
        quitter = sys.modules.get("_sitebuiltins")
        if quitter is not None:
            quitter.Quitter.__call__ = lambda _, code=None: self._exit(code)  # type: ignore[attr-defined]

    def _exit(self, status: Any = None, /) -> NoReturn:
        leave = SystemExit(status)
        # Of another thread it would be the end of that thread.
        if threading.current_thread() is threading.main_thread():
            self._last = leave
        raise leave

    def final_code(self) -> int:
        """The code with which this process exits, as far as it is known; 0 otherwise."""
        if self._last is None or self._was_caught(self._last):
            return 0
        code = self._last.code
        if code is None or isinstance(code, int):
            return (code or 0) & 0xFF
        return 1

    def _was_caught(self, leave: SystemExit) -> bool:
        """Whether the script went on after it: to its own end, or to another exception."""
        if _has_returned(self._outermost):
            return True
        trace = leave.__traceback__
        if trace is None:
            # Nobody handled it on its way.
            return False
        if trace.tb_frame is not self._outermost:
            return _has_returned(trace.tb_frame)
        return trace.tb_lasti != self._outermost.f_lasti and not _was_raised_again(self._outermost)


def _last_instruction(frame: types.FrameType) -> tuple[str, int]:
    """The name and the argument of what a frame that has ended did last."""
    code = frame.f_code.co_code
    return dis.opname[code[frame.f_lasti]], code[frame.f_lasti + 1]


def _has_returned(frame: types.FrameType) -> bool:
    """Whether a frame that has ended did so by a return, rather than by an exception."""
    return _last_instruction(frame)[0].startswith("RETURN_")


def _was_raised_again(frame: types.FrameType) -> bool:
    """Whether a frame that has ended by an exception did so by one that it had handled: behind finally, by raise."""
    return _last_instruction(frame) == ("RAISE_VARARGS", 0) or _last_instruction(frame)[0] == "RERAISE"
