"""Track the ranks that were lost, and decide whether the job continues without them, is restarted, or ends.

:mod:`mindnlp_dp.launch.monitor.attempt_monitor` polls :class:`LostRanks` to learn whether the remaining ranks have
continued in the same processes; they recover by themselves (:mod:`mindnlp_dp.training.trainer.shrink_recovery`).
:mod:`mindnlp_dp.launch.job` asks :class:`RestartPolicy` after each failed attempt.
"""

from __future__ import annotations

import enum
import json
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

from mindnlp_dp.launch.log_dir import RECORD
from mindnlp_dp.launch.monitor.failure_attribution import Failure, describe_status
from mindnlp_dp.runtime.heartbeat import RankHeartbeat, Status

# How long the remaining ranks may all wait, without any progress, before they continue without a lost rank. On a busy
# machine mpirun tells them of the loss some seconds late.
PATIENCE_SECONDS = 15.0


class Outcome(enum.Enum):
    """What has become of an attempt that may continue without lost ranks."""

    UNCHANGED = "unchanged"
    CONTINUED = "continued"
    FAILED = "failed"


class LostRanks:
    """The lost ranks of one attempt; used by :class:`~mindnlp_dp.launch.monitor.attempt_monitor.AttemptMonitor`.

    Args:
        num_ranks: number of ranks at the start of the attempt.
        least: minimum number of ranks.

    Attributes:
        ranks: lost ranks, and how each was lost.
        new: losses after which the others have yet to continue; once they have, the losses that were handled last.
    """

    def __init__(self, num_ranks: int, least: int) -> None:
        self._num_ranks, self._least = num_ranks, least
        self.ranks: dict[int, Failure] = {}
        self.new: list[Failure] = []
        self._has_new = False
        self._stuck_since, self._changes = 0.0, list[int]()

    @property
    def left(self) -> list[int]:
        return [rank for rank in range(self._num_ranks) if rank not in self.ranks]

    def poll(
        self, ranks: Sequence[RankHeartbeat], statuses: Mapping[int, Status], gone: Collection[int], now: float
    ) -> Outcome:
        """Return CONTINUED once when the others continue without lost ranks, FAILED, or UNCHANGED."""
        # Ranks that are gone without a status come before those with one, because they may be the cause.
        for number in [rank for rank in self.left if rank in gone and rank not in statuses]:
            self._lose(number, Failure(number, 1, "was killed, or left past the end of the script,"))
        failed = [rank for rank in self.left if rank in statuses and statuses[rank].exit_code]
        for number in sorted(failed, key=lambda rank: statuses[rank].time):
            if not statuses[number].waited:
                self._lose(number, Failure(number, statuses[number].exit_code, describe_status(statuses[number])))
        left = self.left
        # For example a rank that has tried to continue, and could not.
        if any(statuses[number].exit_code for number in left if number in statuses):
            return Outcome.FAILED
        if not self._has_new:
            return Outcome.UNCHANGED
        if len(left) < self._least or not all(ranks[number].has_joined for number in left):
            return Outcome.FAILED
        if all(ranks[number].members == len(left) for number in left):
            self._has_new = False
            return Outcome.CONTINUED
        if any(number in statuses for number in left):
            return Outcome.FAILED
        waits, changes = all(ranks[number].blocked_in for number in left), [ranks[number].changes for number in left]
        if not waits or changes != self._changes:
            self._stuck_since, self._changes = now, changes
        return Outcome.FAILED if waits and now - self._stuck_since > PATIENCE_SECONDS else Outcome.UNCHANGED

    def _lose(self, number: int, failure: Failure) -> None:
        self.ranks[number] = failure
        self.new = [*(self.new if self._has_new else []), failure]
        self._has_new = True
        self._changes = []

    def end(self) -> None:
        """Count the attempt as failed, although the other ranks could continue."""
        self._has_new = True

    @property
    def failure(self) -> Optional[Failure]:
        """Return the first loss after which the others have not continued; None without one."""
        return self.new[0] if self._has_new else None


# After so many failures in a row without a finished update, the job is not restarted.
MOST_IN_A_ROW = 3

_FIRST_WAIT_SECONDS = 1.0

_LONGEST_WAIT_SECONDS = 30.0


class RestartPolicy:
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
            self.why_not = f"{self._in_a_row} attempts in a row have not finished a single update"
        else:
            # A job that made progress is restarted at once.
            longer = 2 ** (self._in_a_row - 1)
            wait = min(_LONGEST_WAIT_SECONDS, _FIRST_WAIT_SECONDS * longer) if self._in_a_row else 0.0
            self.count += 1
        self._record(failure, update, seconds, {"restart": None if wait is None else self.count, "waits": wait})
        return wait

    def continue_in_place(self, failures: Sequence[Failure], *, update: int, seconds: float) -> bool:
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

    def made_progress(self) -> None:
        """Reset the count of failures in a row, after an attempt that made progress and was ended to grow."""
        self._in_a_row = 0
