"""What a job shows where it was started: ranks' output as it comes, and, on a terminal, a line of how it goes.

Goes in: logs as they grow, how far the ranks are. Comes out: text on standard output and standard error, no faster than
somebody takes it (:mod:`.output`).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, Optional

from mindnlp_dp.runtime.progress import Progress

from .engines import POLL_SECONDS
from .output import hurry, is_behind, why_unread
from .status import StatusLine

_CLEAR = "\r\x1b[K"
_LINE_SECONDS = 1.0
_WIDTH = 100
# Of one log, read at once, and how often before something else is looked at.
_MOST_BYTES, _MOST_READS = 1 << 20, 16
# When a try is over, for output whose reader does not keep up, or that comes without an end.
_REST_SECONDS = 1.0


class Screen:
    """Of one try.

    Args:
        tee: "0", rank 0's output; "all", every line with its rank in front; "none".
    """

    def __init__(self, log_dir: Path, nproc: int, tee: str, num_restarts: int) -> None:
        # Whoever has closed standard output wants to see nothing.
        ranks = {"0": [0], "all": range(nproc), "none": []}[tee if sys.stdout is not None else "none"]
        self._log_dir = log_dir
        self._logs = [_Log(log_dir, rank, f"[{rank}] " if tee == "all" else "") for rank in ranks]
        self._num_restarts = num_restarts
        self._is_terminal = sys.stderr.isatty()
        self._line, self._status, self._said = "", StatusLine(), 0.0

    def stay_with(self, left: Sequence[int]) -> None:
        """Where one rank's output is shown, and that one was lost: show that of the first of those left."""
        if len(self._logs) == 1 and self._logs[0].rank not in left:
            lost = self._logs[0]
            self._show_the_rest()
            lost.close()
            # None, where nobody reads any more.
            self._logs = [_Log(self._log_dir, left[0], "")] if self._logs else []

    def say(self, ranks: Sequence[Progress], num_ended: int) -> None:
        """A line of how far they are, at most one a second, in the place of the one before."""
        is_time = time.monotonic() - self._said >= _LINE_SECONDS
        if self._is_terminal and is_time and any(rank.has_met for rank in ranks) and not is_behind(sys.stderr):
            self._said = time.monotonic()
            self._line = self._status.text(ranks, num_ended, self._num_restarts)[:_WIDTH]
            self._write(_CLEAR + self._line)

    def show(self) -> bool:
        """What ranks have written since, where who reads this keeps up.

        Returns:
            Whether there was something, or may be: whoever reads it was behind.
        """
        if self._logs and (error := why_unread()):
            # Who read it has gone (a pager, head), or its disk is full.
            self._logs = []
            print(f"nothing more is shown, but written to {self._log_dir}: {error}", file=sys.stderr)
        was_new = False
        for _ in range(_MOST_READS):
            # Asked once: a moment later it may have been read, and nobody has looked into the logs.
            if was_behind := is_behind(sys.stdout):
                break
            new = [text for log in self._logs if (text := log.new()) is not None]
            if not new:
                break
            if self._line and not was_new:
                self._write(_CLEAR)
            was_new = True
            for text in new:
                sys.stdout.buffer.write(text)
            sys.stdout.buffer.flush()
        if self._line and was_new:
            self._write(self._line)
        return was_new or was_behind

    def show_all(self, sleep: Callable[[float], None]) -> None:
        """What ranks that have come to their end have written, however long it takes until it is read, or Ctrl-C."""
        try:
            while self.show():
                sleep(POLL_SECONDS if is_behind(sys.stdout) else 0)
        except KeyboardInterrupt:
            hurry()

    def close(self) -> None:
        if self._line:
            self._write(_CLEAR)
            self._line = ""
        self._show_the_rest()
        for log in self._logs:
            log.close()

    def _show_the_rest(self) -> None:
        """As far as it is read at once: others wait to be ended, or started."""
        deadline = time.monotonic() + _REST_SECONDS
        while self.show() and time.monotonic() < deadline:
            if is_behind(sys.stdout):
                time.sleep(_REST_SECONDS / 100)
        for log in self._logs:
            sys.stdout.buffer.write(log.end())
        if self._logs and is_behind(sys.stdout):
            print(f"the rest of what ranks have written is in {self._log_dir}: nobody reads it here", file=sys.stderr)

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


class _Log:
    """One rank's, as it grows; with a prefix, line by line."""

    def __init__(self, log_dir: Path, rank: int, prefix: str) -> None:
        self.rank = rank
        self._path, self._prefix = log_dir / f"worker_{rank}.log", prefix.encode()
        self._file: Optional[BinaryIO] = None
        self._rest = b""

    def new(self) -> Optional[bytes]:
        """What is to be shown of what was written since; None where nothing was."""
        text = self._read()
        if not text:
            return None
        if not self._prefix:
            return text
        lines = (self._rest + text).splitlines(keepends=True)
        # A line that has no end for so long is shown in pieces.
        is_whole = lines[-1].endswith(b"\n") or len(lines[-1]) >= _MOST_BYTES
        self._rest = b"" if is_whole else lines.pop()
        return b"".join(self._prefix + (line if line.endswith(b"\n") else line + b"\n") for line in lines)

    def end(self) -> bytes:
        """A last line that has no end."""
        rest, self._rest = self._rest, b""
        return self._prefix + rest + b"\n" if rest else b""

    def _read(self) -> bytes:
        """Some of what was written since; when the log has begun anew (log_file.py), the old one's end comes first."""
        text = b"" if self._file is None else self._file.read(_MOST_BYTES)
        if text:
            return text
        try:
            there = os.stat(self._path)
            if self._file is not None:
                if os.path.samestat(there, os.fstat(self._file.fileno())):
                    return b""
                # Written since it was asked.
                if text := self._file.read(_MOST_BYTES):
                    return text
                self._file.close()
            self._file = open(self._path, "rb")  # noqa: SIM115 -- read for as long as the rank writes
        except OSError:
            # It is not there yet, or there are no descriptors left: the log stays in its folder.
            return b""
        return self._file.read(_MOST_BYTES)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
