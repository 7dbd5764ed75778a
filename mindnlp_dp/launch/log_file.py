"""A rank's output, in a file that begins anew when it has grown large.

Goes in: what this process and those that it starts write to standard output and standard error. Comes out: ``FILE``,
and ``FILE.1``, the one before it: never more than twice the limit, give or take what is written in an update.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Optional

# In MiB; 0: there is no limit.
VARIABLE = "MINDNLP_DP_LOG_MB"
DEFAULT_MB = 256


class LogFile:
    """From now on, where this process's output goes."""

    def __init__(self, path: Path, environ: Mapping[str, str]) -> None:
        self._path, self._most_bytes = path, int(environ.get(VARIABLE, DEFAULT_MB)) << 20
        self._log: Optional[int] = None
        self._open()

    def _open(self) -> None:
        log = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        for stream in self._streams():
            os.dup2(log, stream)
        if self._log is not None:
            os.close(self._log)
        self._log = log

    def _streams(self) -> list[int]:
        """Standard output and error, where the script has not put something else in their place, or closed them."""
        if self._log is None:
            return [1, 2]
        log, ours = os.fstat(self._log), []
        for stream in (1, 2):
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(stream), log):
                    ours.append(stream)
        return ours

    def begin_anew_if_large(self) -> None:
        """Between two updates. Who has it open reads on in the old one, which has another name then."""
        if self._most_bytes and self._log is not None and os.fstat(self._log).st_size > self._most_bytes:
            # Where it cannot be, it grows on.
            with contextlib.suppress(OSError):
                earlier = self._path.with_name(f"{self._path.name}.1")
                self._path.replace(earlier)
                try:
                    self._open()
                except OSError:
                    earlier.replace(self._path)
