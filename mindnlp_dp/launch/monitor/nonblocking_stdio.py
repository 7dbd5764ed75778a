"""Write the launcher's output without blocking, even if its reader has paused.

A terminal may be stopped (Ctrl-S), or no process may read a pipe. :mod:`mindnlp_dp.launch.run` uses this module while a
job runs. Standard output and standard error are passed on as fast as the reader takes them. The rest stays in memory;
ranks' logs are read no further until it is taken (console.py).
"""

from __future__ import annotations

import codecs
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

# How long to wait for the reader after the user has interrupted the job.
_LAST_SECONDS = 1.0


class Output(io.RawIOBase):
    """A writer to one descriptor that accepts all data at once, and passes on what the reader takes.

    Attributes:
        error: why nothing more can be written, such as a reader that is gone; None while writing is possible.
        patience: seconds to wait at the end until the reader has taken all data.
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
        """Pass on what the reader takes now."""
        while self._pending:
            try:
                written = self._write_some()
            except BlockingIOError:
                return
            except OSError as error:
                # A full disk may have room later; the data that it has not taken is in the logs.
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
        # A pipe that is ready takes PIPE_BUF bytes without blocking; so does a terminal, with rare exceptions.
        return os.write(self._descriptor, self._pending[: select.PIPE_BUF]) if self._can_be_written(0) else 0

    def _can_be_written(self, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        return bool(poll.poll(1000 * seconds))

    @property
    def has_unwritten(self) -> bool:
        """Return whether the reader has not taken all data yet."""
        self.flush()
        return bool(self._pending)

    def drain(self) -> None:
        """Wait until all data is taken, for at most :attr:`patience` seconds."""
        deadline = time.monotonic() + self.patience
        while self.has_unwritten and (left := deadline - time.monotonic()) > 0:
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
    """Open the same file again, so that other holders of it still block; None if that is impossible or not needed.

    It is not needed for a file on a disk, where a new descriptor would have another position.
    """
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return None
    try:
        if stat.S_ISSOCK(mode):
            return socket.socket(fileno=os.dup(descriptor))
        return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        # For example another user's terminal.
        return None


class _TextSink(io.RawIOBase):
    """A writer to a stream of text, such as a notebook's, or to nothing."""

    def __init__(self, stream: Optional[TextIO]) -> None:
        self._stream = stream
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if self._stream is not None:
            self._stream.write(self._decode(bytes(data)))
        return len(data)


class NonBlockingStdio:
    """Makes ``sys.stdout`` and ``sys.stderr`` non-blocking inside the block, and waits at its end until all is taken.

    Ctrl-C ends that wait.
    """

    def __init__(self) -> None:
        self._before: tuple[Optional[TextIO], Optional[TextIO]] = (sys.stdout, sys.stderr)
        self._outputs: list[Output] = []

    def __enter__(self) -> NonBlockingStdio:
        sys.stdout, sys.stderr = (self._unhurried(stream) for stream in self._before)
        return self

    def _unhurried(self, stream: Optional[TextIO]) -> TextIO:
        if not isinstance(stream, io.TextIOWrapper):
            # None if it was closed before Python started. A notebook's stream may have a descriptor: its server's.
            sink = _TextSink(stream)
            return io.TextIOWrapper(sink, "utf-8", errors="backslashreplace", write_through=True)  # type: ignore[type-var]
        try:
            stream.flush()
            output = Output(stream.fileno())
        except (OSError, ValueError):
            # The stream is closed, or keeps its output in memory.
            return stream
        # On a terminal both streams are one file; with one Output their lines stay in order.
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
            sys.stdout, sys.stderr = self._before  # type: ignore[assignment]
            for output in self._outputs:
                output.close()


def stop_waiting_for_readers() -> None:
    """Stop waiting for slow readers after a second, because the user wants the job to end."""
    for stream in (sys.stdout, sys.stderr):
        if (output := _output_of(stream)) is not None:
            output.patience = _LAST_SECONDS


def has_unwritten(stream: TextIO) -> bool:
    """Return whether data was written to the stream that its reader has not taken yet."""
    output = _output_of(stream)
    return output is not None and output.has_unwritten


def write_error() -> Optional[OSError]:
    """Return why nothing more can be written to standard output; None while writing is possible."""
    output = _output_of(sys.stdout)
    return None if output is None else output.error


def _output_of(stream: TextIO) -> Optional[Output]:
    buffer = getattr(stream, "buffer", None)
    return buffer if isinstance(buffer, Output) else None
