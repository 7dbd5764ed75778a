"""Report what a job is doing to ``mindnlp-dp status LOG_DIR`` in another shell, as a table or JSON.

:mod:`mindnlp_dp.launch.monitor.attempt_monitor` writes the status, :mod:`mindnlp_dp.commands.main` reads it.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindnlp_dp.launch.log_dir import LATEST, open_to_write
from mindnlp_dp.launch.monitor.snapshot import JobSnapshot
from mindnlp_dp.runtime.heartbeat import RankHeartbeat
from mindnlp_dp.runtime.printable import printable

STATUS = "status.json"

# The launcher writes twice a second; a status that is older is that of a launcher that was killed or is blocked.
_OLD_SECONDS = 10.0


class StatusFile:
    """The file ``status.json`` of an attempt's folder, by which ``mindnlp-dp status`` knows what a job is doing.

    It is written by the launcher, because ranks' memory is closed to other users.

    Args:
        failures: what is recorded of each failure so far (restarts.py).
    """

    def __init__(self, failures: Sequence[Mapping[str, Any]]) -> None:
        self._failures = failures
        self._log_dir = Path()
        self._status: dict[str, Any] = {}

    def write(self, log_dir: Path, snapshot: JobSnapshot) -> None:
        """Write the status of an attempt to its folder."""
        self._log_dir = log_dir
        now, ranks = time.monotonic(), []
        for number, rank in enumerate(snapshot.ranks):
            entry: dict[str, Any] = {"rank": number, "pid": rank.pid or None, "update": rank.update}
            entry["state"] = _state(rank, has_exited=number in snapshot.gone)
            entry["loss"] = rank.loss if math.isfinite(rank.loss) else None
            if entry["state"] == "waits":
                entry["waits_in"], entry["waits_since"] = rank.blocked_in, round(now - rank.since, 3)
            if entry["state"] in ("waits", "works"):
                entry["last_progress"] = round(now - rank.changed, 3)
            ranks.append(entry)
        self._status = {
            "log_dir": str(self._log_dir), "exit_code": None, "update": snapshot.update,
            # Ranks log the same metrics; one that has failed may have older ones.
            "speed": dict(max(snapshot.ranks, key=lambda rank: (bool(rank.speed), rank.update)).speed),
            "alive": sum(entry["state"] in ("waits", "works") for entry in ranks),
            "failures": self._failures, "ranks": ranks,
        }  # fmt: skip
        self._save()

    def end(self, exit_code: int) -> None:
        """Write that the job is over, if any of its attempts had started."""
        if self._status:
            for entry in self._status["ranks"]:
                entry["state"] = "gone" if entry["state"] in ("waits", "works") else entry["state"]
            self._status.update(exit_code=exit_code, alive=0)
            self._save()

    def _save(self) -> None:
        self._status["time"] = time.time()
        path = self._log_dir / STATUS
        try:
            temporary = path.with_name(f".{STATUS}")
            with open(open_to_write(temporary), "w", encoding="utf-8") as file:
                json.dump(self._status, file, allow_nan=False)
            temporary.replace(path)
        except OSError:
            # The disk is full: then the status is older.
            pass


def read_status(log_dir: Path) -> dict[str, Any]:
    """Return what a job's launcher has last written about its last attempt, or the one in this folder; in seconds.

    Raises:
        ValueError: the folder is not one that ``mindnlp-dp run`` writes to.
    """
    status = None
    for folder in (log_dir, log_dir / LATEST):
        if (folder / STATUS).is_file():
            with contextlib.suppress(OSError, ValueError, RecursionError):
                status = json.loads((folder / STATUS).read_text(encoding="utf-8"))
            break
    if not isinstance(status, dict):
        raise ValueError(f"{log_dir} is not a log folder of mindnlp-dp run: it has no status in {STATUS}")
    return status


def _state(rank: RankHeartbeat, *, has_exited: bool) -> str:
    if rank.exit_code is not None:
        return "done" if rank.exit_code == 0 else f"failed with exit code {rank.exit_code}"
    if not rank.pid:
        return "not begun"
    if has_exited:
        return "gone"
    return "waits" if rank.blocked_in else "works"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def speed_text(speed: Mapping[str, float]) -> str:
    """Format the metrics of a log line for people.

    >>> speed_text({"step_seconds": 0.25, "samples_per_second": 256.0, "mfu": 0.413})
    '0.25 s per step, 256 samples/s, MFU 41.3 %'
    """
    formats = {
        "step_seconds": "{:.4g} s per step",
        "samples_per_second": "{:.4g} samples/s",
        "input_tokens_per_second": "{:.5g} tokens/s",
    }
    parts = [text.format(speed[name]) for name, text in formats.items() if name in speed]
    return ", ".join(parts + ([f"MFU {100 * speed['mfu']:.1f} %"] if "mfu" in speed else []))


def status_text(status: dict[str, Any]) -> str:
    """Format a status as a table for people, without control characters, which its files may contain."""
    lines = [
        f"{status['log_dir']}: update {status['update']}, {status['alive']} of {len(status['ranks'])} ranks alive, "
        f"{_count(len(status['failures']), 'failure')} so far"
    ]
    age = time.time() - status["time"]
    if status["exit_code"] is not None:
        lines.append(f"  the job has ended with exit code {status['exit_code']}")
    elif age > _OLD_SECONDS:
        lines.append(f"  written {age:.0f} s ago: since then its launcher was killed, or is stopped")
    if status["speed"]:
        lines.append(f"  since the last log line: {speed_text(status['speed'])}")
    for entry in status["ranks"]:
        line = f"  rank {entry['rank']:<4} update {entry['update']:<7} {entry['state']}"
        if "waits_in" in entry:
            line += f" in {entry['waits_in']} since {entry['waits_since']:.1f} s"
        elif "last_progress" in entry:
            line += f"; last heard of {entry['last_progress']:.1f} s ago"
        lines.append(line)
    for failure in status["failures"]:
        what = failure["what"].rstrip(",") or "before its ranks started"
        what = what if failure["rank"] is None else f"rank {failure['rank']} {what}"
        then = "not restarted" if failure["restart"] is None else f"restart {failure['restart']}"
        lines.append(f"  failed in update {failure['update']}: {what}; {then}")
    return "\n".join(map(printable, lines))
