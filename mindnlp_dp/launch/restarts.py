"""Decide whether and when a failed job is restarted, and record each failure.

:mod:`mindnlp_dp.launch.job` asks it after each failed attempt, and waits so many seconds, or ends the job.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

from .log_dir import RECORD
from .verdict import Failure

# After so many failures in a row without a finished update, the job is not restarted.
MOST_IN_A_ROW = 3
_FIRST_WAIT_SECONDS = 1.0
_LONGEST_WAIT_SECONDS = 30.0


class Restarts:
    """The restart policy of one job; used by :class:`~mindnlp_dp.launch.job.Job`.

    Attributes:
        count: number of restarts so far.
        why_not: why the job is not restarted, once that is decided.
    """

    def __init__(self, most: int, log_dir: Path) -> None:
        self._most, self._log_dir = most, log_dir
        self.count = 0
        self.why_not = ""
        self._in_a_row = 0

    def after(self, failure: Failure, *, update: int, seconds: float) -> Optional[float]:
        """Return the seconds to wait before the next attempt; None if the job is not restarted.

        Args:
            update: update that the failed attempt has reached; 0: it has finished none.
            seconds: duration of the attempt.
        """
        self._in_a_row = 0 if update else self._in_a_row + 1
        wait: Optional[float] = None
        if self.count >= self._most:
            self.why_not = f"it was restarted {self.count} times, as --max-restarts says" if self._most else ""
        elif self._in_a_row >= MOST_IN_A_ROW:
            self.why_not = f"{self._in_a_row} tries in a row have not finished a single update"
        else:
            # A job that made progress is restarted at once.
            longer = 2 ** (self._in_a_row - 1)
            wait = min(_LONGEST_WAIT_SECONDS, _FIRST_WAIT_SECONDS * longer) if self._in_a_row else 0.0
            self.count += 1
        self._record(failure, update, seconds, {"restart": None if wait is None else self.count, "waits": wait})
        return wait

    def go_on_in_place(self, failures: Sequence[Failure], *, update: int, seconds: float) -> bool:
        """Return whether the other ranks may continue without the lost ones; each lost rank counts as a restart."""
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
        """Reset the count of failures in a row, after an attempt that made progress and was ended to grow."""
        self._in_a_row = 0
