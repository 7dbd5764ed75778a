"""Decide whether a job is restarted after a failed attempt; :mod:`mindnlp_dp.launch.launch_job` asks it."""

from __future__ import annotations

import time
from typing import Any, Optional

from mindnlp_dp.launch.log_dir import LogDir
from mindnlp_dp.launch.monitor.failure_attribution import Failure

# After so many failures in a row without a finished update, the job is not restarted.
MOST_IN_A_ROW = 3


class RestartPolicy:
    """The restart policy of one job; used by :class:`~mindnlp_dp.launch.launch_job.Job`.

    Attributes:
        count: number of restarts so far.
        why_not: why the job is not restarted, once that is decided.
        failures: what is recorded of each failure so far.
    """

    def __init__(self, most: int, log_dir: LogDir) -> None:
        self._most, self._log_dir = most, log_dir
        self.count = 0
        self.why_not = ""
        self.failures: list[dict[str, Any]] = []
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
            self.why_not = f"it was restarted {self.count} times, the maximum (--max-restarts)" if self._most else ""
        elif self._in_a_row >= MOST_IN_A_ROW:
            self.why_not = f"{self._in_a_row} attempts in a row have not finished a single update"
        else:
            # A job that made progress is restarted at once, the others after 1 s, then 2 s.
            wait = float(self._in_a_row)
            self.count += 1
        self.failures.append({
            "time": time.time(), "rank": failure.rank, "exit_code": failure.exit_code, "what": failure.what,
            "update": update, "seconds": round(seconds, 3),
            "restart": None if wait is None else self.count, "waits": wait,
        })  # fmt: skip
        self._log_dir.record(self.failures[-1])
        return wait

    def made_progress(self) -> None:
        """Reset the count of failures in a row, after an attempt that made progress and was ended to grow."""
        self._in_a_row = 0
