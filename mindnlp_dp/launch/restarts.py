"""Whether a job that failed is started again, and when; a record of each failure.

Goes in: failures, and how far the job had got. Comes out: seconds to wait, or the word that it is over.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

from .verdict import Failure

# Failures in a row, none of which finished an update, that are one too many for another try.
MOST_IN_A_ROW = 3
_FIRST_WAIT_SECONDS = 1.0
_LONGEST_WAIT_SECONDS = 30.0
RECORD = "failures.jsonl"
# What ranks and their engine write into a log folder.
_WRITTEN = re.compile(r"worker_\d+\.(log|log\.\d+|status|stacks)|launcher(_\d+)?\.log|scheduler\.log")
_OF_THE_JOB = re.compile(rf"{re.escape(RECORD)}|progress(_\d+)?|fork_server\.log|environ_changes\.json")
_TRY = re.compile(r"try_\d+")


def put_logs_aside(log_dir: Path, number: int) -> None:
    """What the try before number ``number`` has written, into a folder of its own."""
    folder = log_dir / f"try_{number}"
    folder.mkdir(parents=True, exist_ok=True)
    for path in log_dir.iterdir():
        if _WRITTEN.fullmatch(path.name):
            try:
                path.replace(folder / path.name)
            except FileNotFoundError:
                # Another host's launcher has, in a folder that they share.
                pass


def forget_earlier_jobs(log_dir: Path) -> None:
    """Remove what earlier jobs have left in the log folder, and nothing else: their ranks' ends are not this job's."""
    tries = [path for path in log_dir.iterdir() if _TRY.fullmatch(path.name) and path.is_dir()]
    for folder in [log_dir, *tries]:
        for path in folder.iterdir():
            if (_WRITTEN.fullmatch(path.name) or _OF_THE_JOB.fullmatch(path.name)) and not path.is_dir():
                path.unlink(missing_ok=True)
        if folder != log_dir and not any(folder.iterdir()):
            folder.rmdir()


class Restarts:
    """Of one job.

    Attributes:
        count: how many times it was started again.
        why_not: why it is not started again, once that is so.
    """

    def __init__(self, most: int, log_dir: Path) -> None:
        self._most, self._log_dir = most, log_dir
        self.count = 0
        self.why_not = ""
        self._in_a_row = 0

    def after(self, failure: Failure, *, update: int, seconds: float) -> Optional[float]:
        """Seconds to wait before the next try; None: there is none.

        Args:
            update: that this try has reached; 0: it has finished none.
            seconds: how long it ran.
        """
        self._in_a_row = 0 if update else self._in_a_row + 1
        wait: Optional[float] = None
        if self.count >= self._most:
            self.why_not = f"it was restarted {self.count} times, as --max-restarts says" if self._most else ""
        elif self._in_a_row >= MOST_IN_A_ROW:
            self.why_not = f"{self._in_a_row} tries in a row have not finished a single update"
        else:
            # One that got on is taken up at once.
            longer = 2 ** (self._in_a_row - 1)
            wait = min(_LONGEST_WAIT_SECONDS, _FIRST_WAIT_SECONDS * longer) if self._in_a_row else 0.0
            self.count += 1
        self._record(failure, update, seconds, {"restart": None if wait is None else self.count, "waits": wait})
        return wait

    def go_on_in_place(self, failures: Sequence[Failure], *, update: int, seconds: float) -> bool:
        """Whether the other ranks may go on without those that were lost; each counts as a restart."""
        if self.count + len(failures) > self._most or not update:
            return False
        self._in_a_row = 0
        for failure in failures:
            self.count += 1
            self._record(failure, update, seconds, {"restart": self.count, "waits": 0.0, "in_place": True})
        return True

    def _record(self, failure: Failure, update: int, seconds: float, then: dict[str, Any]) -> None:
        entry = {
            "time": time.time(), "rank": failure.rank, "exit_code": failure.exit_code, "what": failure.what,
            "update": update, "seconds": round(seconds, 3), **then,
        }  # fmt: skip
        try:
            with open(self._log_dir / RECORD, "a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        except OSError as error:
            print(f"this failure is not in {self._log_dir / RECORD}: {error}", file=sys.stderr)

    def got_on(self) -> None:
        """A try was ended for another reason, behind an update."""
        self._in_a_row = 0
