"""Report what a job is doing: a status line where it runs, and ``mindnlp-dp status LOG_DIR`` from another shell.

:mod:`mindnlp_dp.launch.monitor.console` calls it for the line; :mod:`mindnlp_dp.commands.main` for a table or JSON of a
log folder.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindnlp_dp.launch.log_dir import PROGRESS, RECORD, progress_file
from mindnlp_dp.runtime.heartbeat import RankHeartbeat, is_of_this_system, read
from mindnlp_dp.runtime.printable import printable

# The time over which samples per second are averaged.
_WINDOW_SECONDS = 10.0


class StatusLine:
    """Formats the status line of a running job."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque()

    def text(self, ranks: Sequence[RankHeartbeat], num_ended: int, num_restarts: int) -> str:
        """Return update, loss, samples per second, ranks alive and restarts; unknown values are left out."""
        # Not simply rank 0, which may have been lost.
        now, first = time.monotonic(), max(ranks, key=lambda rank: rank.samples)
        self._seen.append((now, first.samples))
        while now - self._seen[0][0] > _WINDOW_SECONDS and len(self._seen) > 2:
            self._seen.popleft()
        (began, before), (ended, after) = self._seen[0], self._seen[-1]
        parts = [f"update {max(rank.update for rank in ranks)}"]
        if not math.isnan(first.loss):
            parts.append(f"loss {first.loss:.4g}")
        if after > before:
            parts.append(f"{(after - before) / (ended - began):.4g} samples/s")
        alive = sum(rank.changes > 0 for rank in ranks) - num_ended
        parts.append(f"{max(0, alive)} of {len(ranks)} ranks alive")
        if num_restarts:
            parts.append(f"{num_restarts} restart{'s' if num_restarts > 1 else ''}")
        return ", ".join(parts)


def read_of_all_hosts(log_dir: Path) -> list[RankHeartbeat]:
    """Return the progress of all ranks; ranks of hosts that do not share this folder appear as not started."""
    return [rank for rank, _ in _read_of_all_hosts(log_dir)]


def _read_of_all_hosts(log_dir: Path) -> list[tuple[RankHeartbeat, bool]]:
    """Return each rank's progress, and whether it is on this system: only then its process and times can be used."""
    others = log_dir.glob(progress_file(1).replace("1", "*"))
    paths = [log_dir / PROGRESS, *(path for path in others if path.name.rpartition("_")[2].isdecimal())]
    ranks = [(rank, True) for rank in read(paths[0])]
    for path in paths:
        is_here = is_of_this_system(path)
        for number, rank in enumerate(read(path)):
            if rank.pid and number < len(ranks):
                ranks[number] = rank, is_here
    return ranks


def status_of(log_dir: Path) -> dict[str, Any]:
    """Return what is known about a job on this host, ready for JSON; times in seconds.

    Ranks on other hosts that write to the same folder appear as they last reported.

    Raises:
        ValueError: the folder is not one that ``mindnlp-dp run`` writes to.
    """
    found = _read_of_all_hosts(log_dir)
    if not found:
        raise ValueError(f"{log_dir} is not a log folder of mindnlp-dp run: it has no file {PROGRESS!r}")
    now, shown = time.monotonic(), []
    for number, (rank, is_here) in enumerate(found):
        entry: dict[str, Any] = {"rank": number, "pid": rank.pid or None, "update": rank.update}
        entry["state"] = _state(rank, is_here=is_here)
        entry["here"] = is_here
        entry["loss"] = None if math.isnan(rank.loss) else rank.loss
        if entry["state"] == "waits":
            entry["waits_in"] = rank.blocked_in
            entry["waits_since"] = round(now - rank.since, 3) if is_here else None
        if entry["state"] in ("waits", "works") and is_here:
            entry["last_progress"] = round(now - rank.changed, 3)
        shown.append(entry)
    return {
        "log_dir": str(log_dir),
        "update": max(rank.update for rank, _ in found),
        # Ranks log the same metrics; one that was lost has older ones.
        "speed": dict(max((rank for rank, _ in found), key=lambda rank: (bool(rank.speed), rank.update)).speed),
        "alive": sum(entry["state"] in ("waits", "works") for entry in shown),
        "failures": _failures(log_dir),
        "ranks": shown,
    }


def _state(rank: RankHeartbeat, *, is_here: bool) -> str:
    if rank.exit_code is not None:
        return "done" if rank.exit_code == 0 else f"failed with exit code {rank.exit_code}"
    if not rank.pid:
        return "not begun"
    if is_here and not rank.state:
        return "gone"
    return "waits" if rank.blocked_in else "works"


def _failures(log_dir: Path) -> list[dict[str, Any]]:
    try:
        lines = (log_dir / RECORD).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    failures = []
    for line in lines:
        try:
            failures.append(json.loads(line))
        except ValueError:
            # The line is only half written at this moment.
            continue
    return failures


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def speed_text(speed: Mapping[str, float]) -> str:
    """Format the metrics of a log line for people.

    >>> speed_text({"step_seconds": 0.25, "samples_per_second": 256.0, "mfu": 0.413})
    '0.25 s a step, 256 samples/s, MFU 41.3 %'
    """
    formats = {
        "step_seconds": "{:.4g} s a step",
        "samples_per_second": "{:.4g} samples/s",
        "input_tokens_per_second": "{:.5g} tokens/s",
    }
    parts = [text.format(speed[name]) for name, text in formats.items() if name in speed]
    return ", ".join(parts + ([f"MFU {100 * speed['mfu']:.1f} %"] if "mfu" in speed else []))


def status_text(status: dict[str, Any]) -> str:
    """Format a status as a table for people, without control characters, which its files may contain."""
    failures = [failure for failure in map(_failure_text, status["failures"]) if failure]
    lines = [
        f"{status['log_dir']}: update {status['update']}, {status['alive']} of {len(status['ranks'])} ranks alive, "
        f"{_count(len(failures), 'failure')} so far"
    ]
    if status["speed"]:
        lines.append(f"  since the last log line: {speed_text(status['speed'])}")
    for entry in status["ranks"]:
        line = f"  rank {entry['rank']:<4} update {entry['update']:<7} {entry['state']}"
        if "waits_in" in entry:
            line += f" in {entry['waits_in']}"
            line += "" if entry["waits_since"] is None else f" since {entry['waits_since']:.1f} s"
        elif "last_progress" in entry:
            line += f"; last heard of {entry['last_progress']:.1f} s ago"
        lines.append(line + ("" if entry["here"] else ", on another host, when it was last heard"))
    lines += failures
    if others := len(status["failures"]) - len(failures):
        lines.append(f"  {_count(others, 'line')} of {RECORD} that the launcher did not write")
    return "\n".join(map(printable, lines))


def _failure_text(failure: Any) -> str:
    """Return the line of a failure; empty for an entry that is not one, such as a line that a user has added."""
    try:
        rank, what, restart, update = (failure[name] for name in ("rank", "what", "restart", "update"))
    except (TypeError, KeyError):
        return ""
    what = what or "before its ranks started"
    what = what if rank is None else f"rank {rank} {what}"
    then = "not restarted" if restart is None else f"restart {restart}"
    return f"  failed in update {update}: {what}; {then}"
