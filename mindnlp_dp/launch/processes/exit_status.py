"""This module reads and writes the files in which a rank records how it ended, and the last lines of its log."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

TAIL_LINES = 15

# The limit for a log whose lines are long.
_TAIL_BYTES = 1 << 15


@dataclass(frozen=True)
class Status:
    """What a rank records at its end, for the launcher.

    Attributes:
        time: time of the end, by the clock of :func:`time.monotonic`, which users cannot set.
        waited: whether the rank gave up waiting for another rank.
        of: attempt of the rank (:func:`~mindnlp_dp.launch.processes.environment.attempt_name`): a rank of a host that
            was cut off may write its status to a shared folder when another attempt has already started.
    """

    exit_code: int
    time: float
    waited: bool = False
    of: str = ""


@dataclass(frozen=True)
class ExitedProcess:
    """A process that has ended: its rank, None for mpirun, and its return code as subprocess gives it."""

    rank: Optional[int]
    returncode: int


def write_status(log_dir: Path, rank: int, status: Status) -> None:
    """Record how a rank ended, in one rename."""
    path = log_dir / f"worker_{rank}.status"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(vars(status)))
    temporary.replace(path)


def read_statuses(log_dir: Path, ranks: Iterable[int], of: Optional[str] = None) -> dict[int, Status]:
    """Return the statuses of the ranks that have written one; with ``of``, only those of that attempt."""
    statuses = {}
    for rank in ranks:
        try:
            said = json.loads((log_dir / f"worker_{rank}.status").read_text())
            status = Status(int(said["exit_code"]), float(said["time"]), bool(said["waited"]), str(said["of"]))
        except (OSError, ValueError, TypeError, KeyError):
            # The rank has not written one, or it has another format.
            continue
        if of is None or status.of == of:
            statuses[rank] = status
    return statuses


def tail(log: Path) -> str:
    """Return the last lines of a log, indented for people."""
    if not log.exists():
        return "  (nothing)"
    with open(log, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
    return "\n".join(f"  {line}" for line in lines or ["(nothing)"])
