"""Show ranks' output, as it is written, where their job was started.

:mod:`mindnlp_dp.launch.monitor.attempt_monitor` calls it. The text goes to standard output and standard error, no
faster than the reader takes it (:mod:`.background_output`).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Optional

from mindnlp_dp.launch.event_loop import POLL_SECONDS, EventLoop
from mindnlp_dp.launch.monitor.background_output import has_unwritten, stop_waiting_for_readers, write_error

# How much is read of a log at once, and how often, before the launcher does something else.
_MOST_BYTES, _MOST_READS = 1 << 20, 16

# How long the rest is shown after an attempt, if the reader is slow or the output does not end.
_REST_SECONDS = 1.0


class Console:
    """Shows the output of one attempt; used by :class:`.AttemptMonitor`.

    Args:
        tee: output to show: "0", rank 0's; "all", every line with its rank in front; "none".
    """

    def __init__(self, log_dir: Path, nproc: int, tee: str, loop: EventLoop) -> None:
        ranks = {"0": [0], "all": range(nproc), "none": []}[tee]
        self._log_dir, self._loop = log_dir, loop
        self._logs = [_Log(log_dir / f"worker_{rank}.log", f"[{rank}] " if tee == "all" else "") for rank in ranks]

    def show(self) -> bool:
        """Show what ranks have written since the last call, if the reader keeps up.

        Returns:
            Whether ranks have written something, or may have: with a slow reader the logs are not checked.
        """
        if self._logs and (error := write_error()):
            # The reader has gone (a pager, head), or the output's disk has failed.
            self._logs = []
            print(f"output is no longer shown, only written to {self._log_dir}: {error}", file=sys.stderr)
        was_new = False
        for _ in range(_MOST_READS):
            # Asked only once: a moment later the answer may differ, although the logs were not checked.
            if is_unread := has_unwritten(sys.stdout):
                break
            new = [text for log in self._logs if (text := log.new()) is not None]
            if not new:
                break
            was_new = True
            for text in new:
                _write(text)
        return was_new or is_unread

    def show_all(self, is_asked_to_end: Callable[[], bool]) -> None:
        """Show all that finished ranks have written, however long the reader takes, or until a signal comes."""
        try:
            while self.show():
                if is_asked_to_end():
                    raise KeyboardInterrupt
                self._loop.run_once(POLL_SECONDS if has_unwritten(sys.stdout) else 0)
        except KeyboardInterrupt:
            stop_waiting_for_readers()

    def close(self) -> None:
        """Show the rest of the output as far as it is read at once: other ranks wait to be ended, or started."""
        deadline = time.monotonic() + _REST_SECONDS
        while self.show() and time.monotonic() < deadline:
            pass
        for log in self._logs:
            _write(log.end())
        if self._logs and has_unwritten(sys.stdout):
            print(f"no process reads this output; the rest of it is in {self._log_dir}", file=sys.stderr)
        for log in self._logs:
            log.close()


def _write(text: bytes) -> None:
    """Write to standard output, which may be closed, or take text only, as in a notebook."""
    if (buffer := getattr(sys.stdout, "buffer", None)) is not None:
        buffer.write(text)
        buffer.flush()
    elif sys.stdout is not None:
        sys.stdout.write(text.decode(errors="replace"))


class _Log:
    """Reads one rank's log as it grows; with a prefix, line by line."""

    def __init__(self, path: Path, prefix: str) -> None:
        self._path, self._prefix = path, prefix.encode()
        self._file: Optional[BinaryIO] = None
        self._rest = b""

    def new(self) -> Optional[bytes]:
        """Return the new text that is to be shown; None if nothing was written since the last call."""
        text = self._read()
        if not text:
            return None
        if not self._prefix:
            return text
        lines = (self._rest + text).splitlines(keepends=True)
        # A line that is so long is shown in pieces.
        is_complete = lines[-1].endswith(b"\n") or len(lines[-1]) >= _MOST_BYTES
        self._rest = b"" if is_complete else lines.pop()
        return b"".join(self._prefix + (line if line.endswith(b"\n") else line + b"\n") for line in lines)

    def end(self) -> bytes:
        """Return the last line if it has no line end."""
        rest, self._rest = self._rest, b""
        return self._prefix + rest + b"\n" if rest else b""

    def _read(self) -> bytes:
        """Return some of the new text; after a rotation (log_dir.py), the end of the old file comes first."""
        text = b"" if self._file is None else self._file.read(_MOST_BYTES)
        if text:
            return text
        try:
            there = os.stat(self._path)
            if self._file is not None:
                if os.path.samestat(there, os.fstat(self._file.fileno())):
                    return b""
                # This was written after the first read.
                if text := self._file.read(_MOST_BYTES):
                    return text
                self._file.close()
            self._file = open(self._path, "rb")  # noqa: SIM115 -- read for as long as the rank writes
        except OSError:
            # The log does not exist yet, or this process has run out of descriptors: then it is only in its folder.
            return b""
        return self._file.read(_MOST_BYTES)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
