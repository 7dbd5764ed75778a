"""Whether a job that failed is started again, and when; a record of each failure.

Goes in: failures, and how far the job had got. Comes out: seconds to wait, or the word that it is over.
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

# Failures in a row, none of which finished an update, that are one too many for another try.
MOST_IN_A_ROW = 3
_FIRST_WAIT_SECONDS = 1.0
_LONGEST_WAIT_SECONDS = 30.0


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
