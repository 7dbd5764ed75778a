"""Write a rank's output to a file that is rotated when it has grown large; used by :mod:`mindnlp_dp.launch.worker`.

What this process and its children write to standard output and standard error is in ``FILE``, and in ``FILE.1``, the
previous one: together at most twice the limit, plus what is written in an update.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Optional

# The limit in MiB; 0: unlimited.
VARIABLE = "MINDNLP_DP_LOG_MB"
DEFAULT_MB = 256


class LogFile:
    """Redirects this process's output to a file, from its creation on; used by a rank's worker."""

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
        """Return standard output and error, except where the script has redirected or closed them."""
        if self._log is None:
            return [1, 2]
        log, ours = os.fstat(self._log), []
        for stream in (1, 2):
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(stream), log):
                    ours.append(stream)
        return ours

    def begin_anew_if_large(self) -> None:
        """Rotate a large log, between two updates. Processes that have it open still read the old, renamed file."""
        if self._most_bytes and self._log is not None and os.fstat(self._log).st_size > self._most_bytes:
            # A log that cannot be rotated keeps growing.
            with contextlib.suppress(OSError):
                earlier = self._path.with_name(f"{self._path.name}.1")
                self._path.replace(earlier)
                try:
                    self._open()
                except OSError:
                    earlier.replace(self._path)
