"""The launcher's output, which never keeps it waiting: whoever reads it may not, be it a terminal that was stopped
(Ctrl-S), a pager, or a pipe that nobody empties.

Goes in: what is written to standard output and standard error while a job runs. Comes out: the same, as fast as it is
taken. What is not taken yet stays in memory; ranks' logs are read no further until it is (:mod:`.screen`).
"""

from __future__ import annotations

import errno
import io
import os
import select
import socket
import stat
import sys
import time
from typing import Any, Optional, TextIO, Union

_MOST_AT_ONCE = 1 << 16
_MAY_PASS = (errno.ENOSPC, errno.EDQUOT)
# Of somebody who has interrupted the job.
_LAST_SECONDS = 1.0


class Output(io.RawIOBase):
    """Of one descriptor: takes everything at once, and passes on what it can.

    Attributes:
        error: why nothing more can be written, such as a reader that is gone; None while something can.
        patience: seconds that somebody waits at the end until all is taken.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._own = descriptor, _open_without_waiting(descriptor)
        self._pending = bytearray()
        self.error: Optional[OSError] = None
        self.patience = float("inf")

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
        while self._pending:
            try:
                written = self._write_some()
            except BlockingIOError:
                return
            except OSError as error:
                # A disk that is full may have room later; what it has not taken is in the logs.
                self.error = None if error.errno in _MAY_PASS else error
                self._pending.clear()
                return
            if not written:
                return
            del self._pending[:written]

    def _write_some(self) -> int:
        if isinstance(self._own, socket.socket):
            return self._own.send(self._pending[:_MOST_AT_ONCE], socket.MSG_DONTWAIT)
        if self._own is not None:
            return os.write(self._own, self._pending[:_MOST_AT_ONCE])
        # A pipe that can be written to takes so much; so does a terminal but for a rare moment.
        return os.write(self._descriptor, self._pending[: select.PIPE_BUF]) if self._can_be_written(0) else 0

    def _can_be_written(self, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        return bool(poll.poll(1000 * seconds))

    @property
    def is_behind(self) -> bool:
        """Whether something was not taken yet."""
        self.flush()
        return bool(self._pending)

    def drain(self) -> None:
        """Wait until all is taken, with :attr:`patience`."""
        deadline = time.monotonic() + self.patience
        while self.is_behind and (left := deadline - time.monotonic()) > 0:
            self._can_be_written(min(left, 1.0))

    def close(self) -> None:
        self._pending.clear()
        super().close()
        if isinstance(self._own, socket.socket):
            self._own.close()
        elif self._own is not None:
            os.close(self._own)
        self._own = None


def _open_without_waiting(descriptor: int) -> Union[int, socket.socket, None]:
    """The same file once more, so that who else has it open waits as ever; None where that cannot be, or need not.

    A file on a disk has its end where the other descriptor has it.
    """
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return None
    try:
        if stat.S_ISSOCK(mode):
            return socket.socket(fileno=os.dup(descriptor))
        return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        # Another user's terminal.
        return None


class Unhurried:
    """Within it, ``sys.stdout`` and ``sys.stderr`` keep nobody waiting; at its end they wait until all is taken.

    Ctrl-C ends that, too.
    """

    def __init__(self) -> None:
        self._before: tuple[TextIO, TextIO] = (sys.stdout, sys.stderr)
        self._outputs: list[Output] = []

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
            for output in self._outputs:
                output.drain()
        except KeyboardInterrupt:
            pass
        finally:
            for stream in {sys.stdout, sys.stderr} - set(self._before):
                if isinstance(stream, io.TextIOWrapper):
                    stream.detach()
            sys.stdout, sys.stderr = self._before
            for output in self._outputs:
                output.close()


def hurry() -> None:
    """Somebody wants the job to end: what is not read at once is not waited for."""
    for stream in (sys.stdout, sys.stderr):
        if (output := _output_of(stream)) is not None:
            output.patience = _LAST_SECONDS


def is_behind(stream: TextIO) -> bool:
    """Whether something was written to it that is not taken yet."""
    output = _output_of(stream)
    return output is not None and output.is_behind


def why_unread() -> Optional[OSError]:
    """Why nothing more can be written to standard output; None while something can."""
    output = _output_of(sys.stdout)
    return None if output is None else output.error


def _output_of(stream: TextIO) -> Optional[Output]:
    buffer = getattr(stream, "buffer", None)
    return buffer if isinstance(buffer, Output) else None
