"""This module describes processes that have ended, and reads files that may be gone, such as the end of a log."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

TAIL_LINES = 15

# The limit for a log whose lines are long.
_TAIL_BYTES = 1 << 15


@dataclass(frozen=True)
class ExitedProcess:
    """A process that has ended: its rank, None for mpirun, and its return code as subprocess gives it."""

    rank: Optional[int]
    returncode: int


def read_text(path: Path) -> str:
    """Return the text of a file; "" if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def head(log: Path) -> str:
    """Return the first lines of a log, indented for people."""
    return _indented(_read(log, 0)[:TAIL_LINES])


def tail(log: Path) -> str:
    """Return the last lines of a log, or the first of faulthandler's last report in them, indented for people."""
    lines = _read(log, -_TAIL_BYTES)
    # The innermost frame is the first line of such a report, and all others may be more than are shown.
    fatal = [number for number, line in enumerate(lines) if line.startswith("Fatal Python error: ")]
    return _indented(lines[fatal[-1] :][:TAIL_LINES] if fatal else lines[-TAIL_LINES:])


def _read(log: Path, begin: int) -> list[str]:
    """Return the lines after position ``begin``, which is counted from the end if it is negative."""
    if not log.exists():
        return []
    with open(log, "rb") as file:
        if begin:
            file.seek(max(0, file.seek(0, os.SEEK_END) + begin))
        return file.read(_TAIL_BYTES).decode(errors="replace").splitlines()


def _indented(lines: list[str]) -> str:
    return "\n".join(f"  {line}" for line in lines or ["(nothing)"])
