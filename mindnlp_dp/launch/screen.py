"""What a job shows where it was started: ranks' output as it comes, and, on a terminal, a line of how it goes.

Goes in: logs as they grow, how far the ranks are. Comes out: text on standard output and standard error.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Optional

from mindnlp_dp.runtime.progress import Progress

from .status import StatusLine

_CLEAR = "\r\x1b[K"
_LINE_SECONDS = 1.0
_WIDTH = 100


class Screen:
    """Of one try.

    Args:
        tee: "0", rank 0's output; "all", every line with its rank in front; "none".
    """

    def __init__(self, log_dir: Path, nproc: int, tee: str, num_restarts: int) -> None:
        ranks = {"0": [0], "all": range(nproc), "none": []}[tee]
        self._log_dir = log_dir
        self._logs = [_Log(log_dir, rank, f"[{rank}] " if tee == "all" else "") for rank in ranks]
        self._num_restarts = num_restarts
        self._is_terminal = sys.stderr.isatty()
        self._line, self._status, self._said = "", StatusLine(), 0.0

    def stay_with(self, left: Sequence[int]) -> None:
        """Where one rank's output is shown, and that one was lost: show that of the first of those left."""
        if len(self._logs) == 1 and self._logs[0].rank not in left:
            self.show(at_end=True)
            self._logs[0].close()
            self._logs = [_Log(self._log_dir, left[0], "")]

    def say(self, ranks: Sequence[Progress], num_ended: int) -> None:
        """A line of how far they are, at most one a second, in the place of the one before."""
        if self._is_terminal and any(rank.has_met for rank in ranks) and time.monotonic() - self._said >= _LINE_SECONDS:
            self._said = time.monotonic()
            self._line = self._status.text(ranks, num_ended, self._num_restarts)[:_WIDTH]
            self._write(_CLEAR + self._line)

    def show(self, *, at_end: bool = False) -> None:
        """What ranks have written since."""
        new = [(log, text) for log in self._logs if (text := log.new(at_end=at_end))]
        if not new:
            return
        if self._line:
            self._write(_CLEAR)
        try:
            for _, text in new:
                sys.stdout.buffer.write(text)
            sys.stdout.buffer.flush()
        except OSError as error:
            # Who read it has gone (a pager, head), or its disk is full. The job goes on; all of it is in the logs.
            self._logs = []
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            print(f"nothing more is shown, for the output cannot be written to: {error}", file=sys.stderr)
        if self._line:
            self._write(self._line)

    def close(self) -> None:
        if self._line:
            self._write(_CLEAR)
            self._line = ""
        self.show(at_end=True)
        for log in self._logs:
            log.close()

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

    def new(self, *, at_end: bool) -> bytes:
        text = self._read()
        if not self._prefix:
            return text
        lines = (self._rest + text).splitlines(keepends=True)
        self._rest = b"" if at_end or not lines or lines[-1].endswith(b"\n") else lines.pop()
        return b"".join(self._prefix + (line if line.endswith(b"\n") else line + b"\n") for line in lines)

    def _read(self) -> bytes:
        """What was written since; where the log has begun anew (log_file.py), the old one's end, and the new one."""
        text = b"" if self._file is None else self._file.read()
        try:
            there = os.stat(self._path)
            if self._file is not None and os.path.samestat(there, os.fstat(self._file.fileno())):
                return text
            new = open(self._path, "rb")  # noqa: SIM115 -- read for as long as the rank writes
        except FileNotFoundError:
            return text
        if self._file is not None:
            text += self._file.read()
            self._file.close()
        self._file = new
        return text + new.read()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
