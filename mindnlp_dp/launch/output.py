"""The launcher's output, which never keeps it waiting: whoever reads it may not, be it a terminal that was stopped
(Ctrl-S), a pager, or a pipe that nobody empties.

Goes in: what is written to standard output and standard error while a job runs. Comes out: the same, as fast as it is
taken. What is not taken yet stays in memory; ranks' logs are read no further until it is (:mod:`.screen`).
"""

from __future__ import annotations

import io
import os
import select
import stat
import sys
import time
from typing import Any, Optional, TextIO

_MOST_AT_ONCE = 1 << 16
# Of somebody who has interrupted the job.
_LAST_SECONDS = 1.0


class Output(io.RawIOBase):
    """Of one descriptor: takes everything at once, and passes on what it can.

    Attributes:
        error: why nothing more can be written, such as a reader that is gone; None while something can.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._own = descriptor, _open_without_waiting(descriptor)
        self._pending = bytearray()
        self.error: Optional[OSError] = None

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Any) -> int:
        if self.error is None:
            self._pending += data
        self.flush()
        return len(data)

    def flush(self) -> None:
        """Pass on what is taken now."""
        descriptor = self._descriptor if self._own is None else self._own
        while self._pending:
            try:
                written = os.write(descriptor, self._pending[:_MOST_AT_ONCE])
            except BlockingIOError:
                return
            except OSError as error:
                self.error = error
                self._pending.clear()
                return
            del self._pending[:written]

    @property
    def is_behind(self) -> bool:
        """Whether something was not taken yet."""
        self.flush()
        return bool(self._pending)

    def drain(self, deadline: float) -> None:
        """Wait until all is taken, by then at most."""
        poll = select.poll()
        poll.register(self._descriptor if self._own is None else self._own, select.POLLOUT)
        while self.is_behind and (left := deadline - time.monotonic()) > 0:
            poll.poll(1000 * min(left, 1.0))

    def close(self) -> None:
        self._pending.clear()
        super().close()
        if self._own is not None:
            os.close(self._own)
            self._own = None


def _open_without_waiting(descriptor: int) -> Optional[int]:
    """The same file once more, so that who else has it open waits as ever; None where that is not needed or not to be.

    A file on a disk has its end where the other descriptor has it; a socket cannot be opened again.
    """
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return None
    try:
        return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return None


class Unhurried:
    """Within it, ``sys.stdout`` and ``sys.stderr`` keep nobody waiting; at its end they wait until all is taken.

    Attributes:
        seconds: that they wait then at most. Ctrl-C ends it, too.
    """

    def __init__(self) -> None:
        self.seconds = float("inf")
        self._before: tuple[TextIO, TextIO] = (sys.stdout, sys.stderr)
        self._outputs: list[Output] = []

    def was_interrupted(self) -> None:
        self.seconds = _LAST_SECONDS

    def __enter__(self) -> Unhurried:
        sys.stdout, sys.stderr = (self._unhurried(stream) for stream in self._before)
        return self

    def _unhurried(self, stream: TextIO) -> TextIO:
        try:
            stream.flush()
            output = Output(stream.fileno())
        except (AttributeError, OSError, ValueError):
            # It is closed, or somebody's who keeps it in memory.
            return stream
        # On a terminal both are one, and stay in order.
        for other in self._outputs:
            if os.path.samestat(os.fstat(other.fileno()), os.fstat(output.fileno())):
                output.close()
                output = other
        if output not in self._outputs:
            self._outputs.append(output)
        return io.TextIOWrapper(output, stream.encoding, errors="backslashreplace", write_through=True)  # type: ignore[type-var]

    def __exit__(self, *_: object) -> None:
        try:
            deadline = time.monotonic() + self.seconds
            for output in self._outputs:
                output.drain(deadline)
        except KeyboardInterrupt:
            pass
        finally:
            for stream in {sys.stdout, sys.stderr} - set(self._before):
                if isinstance(stream, io.TextIOWrapper):
                    stream.detach()
            sys.stdout, sys.stderr = self._before
            for output in self._outputs:
                output.close()


def _outputs() -> list[Output]:
    buffers = (getattr(stream, "buffer", None) for stream in (sys.stdout, sys.stderr))
    return [buffer for buffer in buffers if isinstance(buffer, Output)]


def is_behind() -> bool:
    """Whether something was written that is not taken yet."""
    return sum(output.is_behind for output in _outputs()) > 0


def why_unread() -> Optional[OSError]:
    """Why nothing more can be written to standard output; None while something can."""
    buffer = getattr(sys.stdout, "buffer", None)
    return buffer.error if isinstance(buffer, Output) else None
