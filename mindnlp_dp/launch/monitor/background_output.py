"""Write the launcher's output from a thread, so that no reader keeps the launcher waiting.

A terminal may be stopped (Ctrl-S), or no process may read a pipe. :mod:`mindnlp_dp.launch.run` uses this module while a
job runs: what is printed is put into memory, and a thread writes it. Ranks' logs are read no further until it has
(console.py).
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys
import threading
from typing import Any, Optional, TextIO

_MOST_AT_ONCE = 1 << 16

_MAY_PASS = (errno.ENOSPC, errno.EDQUOT)

# How long to wait for the reader after the user has interrupted the job.
_LAST_SECONDS = 1.0

# How long a thread may take to write to a reader that keeps up.
_BRIEFLY_SECONDS = 0.01


class Output(io.RawIOBase):
    """Accepts all data at once; a thread writes it to a descriptor as fast as the reader takes it.

    Attributes:
        error: why nothing more can be written, such as a reader that is gone; None while writing is possible.
        patience: seconds to wait at the end until the reader has taken all data; None: as long as it takes.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._pending, self._changed = bytearray(), threading.Condition()
        self.error: Optional[OSError] = None
        self.patience: Optional[float] = None
        # It may still wait for the reader when the launcher ends.
        threading.Thread(target=self._write_all, daemon=True, name="output").start()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Any) -> int:
        with self._changed:
            if self.error is None and not self.closed:
                self._pending += data
                self._changed.notify_all()
        return len(data)

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self.closed)
                if self.closed:
                    return
                data = bytes(self._pending[:_MOST_AT_ONCE])
            try:
                written, error = os.write(self._descriptor, data), None
            except BlockingIOError:
                # Another process that has the same pipe or terminal open has made it non-blocking.
                select.select([], [self._descriptor], [], 1.0)
                continue
            except OSError as failed:
                written, error = len(self._pending), failed
            with self._changed:
                # A full disk may have room later; the data that it has not taken is in the logs.
                self.error = None if error is None or error.errno in _MAY_PASS else error
                del self._pending[:written]
                self._changed.notify_all()

    def drain(self, seconds: Optional[float]) -> bool:
        """Wait until all data is taken, for so many seconds at most; return whether it was."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, seconds)

    def close(self) -> None:
        with self._changed:
            super().close()
            self._changed.notify_all()


class BackgroundOutput:
    """Makes ``sys.stdout`` and ``sys.stderr`` write from threads inside the block, and waits for them at its end.

    Ctrl-C ends that wait.
    """

    def __init__(self) -> None:
        self._before: tuple[Optional[TextIO], Optional[TextIO]] = (sys.stdout, sys.stderr)
        self._outputs: list[Output] = []

    def __enter__(self) -> BackgroundOutput:
        sys.stdout, sys.stderr = map(self._unhurried, self._before)  # type: ignore[assignment]
        return self

    def _unhurried(self, stream: Optional[TextIO]) -> Optional[TextIO]:
        if not isinstance(stream, io.TextIOWrapper):
            # None if it was closed before Python started. A notebook's stream may have a descriptor: its server's.
            return stream
        try:
            stream.flush()
            file = os.fstat(stream.fileno())
        except (OSError, ValueError):
            # The stream is closed, or keeps its output in memory.
            return stream
        # On a terminal both streams are one file; with one Output their lines stay in order.
        output = next((other for other in self._outputs if os.path.samestat(os.fstat(other.fileno()), file)), None)
        if output is None:
            self._outputs.append(output := Output(stream.fileno()))
        return io.TextIOWrapper(output, stream.encoding, errors="backslashreplace", write_through=True)  # type: ignore[type-var]

    def __exit__(self, *_: object) -> None:
        try:
            for output in self._outputs:
                output.drain(output.patience)
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


def has_unwritten(stream: Optional[TextIO]) -> bool:
    """Return whether data was written to the stream that its reader has not taken yet."""
    output = _output_of(stream)
    return output is not None and not output.drain(_BRIEFLY_SECONDS)


def write_error() -> Optional[OSError]:
    """Return why nothing more can be written to standard output; None while writing is possible."""
    output = _output_of(sys.stdout)
    return None if output is None else output.error


def _output_of(stream: Optional[TextIO]) -> Optional[Output]:
    buffer = getattr(stream, "buffer", None)
    return buffer if isinstance(buffer, Output) else None
