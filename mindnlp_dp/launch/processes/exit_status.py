"""This module describes processes that have ended, and reads the last lines of a rank's log."""

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


def tail(log: Path) -> str:
    """Return the last lines of a log, indented for people."""
    if not log.exists():
        return "  (nothing)"
    with open(log, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
    return "\n".join(f"  {line}" for line in lines or ["(nothing)"])
