"""Track the ranks that an attempt has lost while the others continue without them, in the same processes.

:mod:`mindnlp_dp.launch.watch` polls it to learn whether the remaining ranks have continued, or the attempt must end.
Ranks recover by themselves (:mod:`mindnlp_dp.training.trainer.shrink_recovery`); the launcher only monitors them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Optional

from mindnlp_dp.runtime.heartbeat import Progress

from .verdict import Failure, Status, how_it_ended

# How long the remaining ranks may all be waiting before they continue without a lost rank.
PATIENCE_SECONDS = 5.0


class Losses:
    """The lost ranks of one attempt; used by :class:`~mindnlp_dp.launch.watch.Watch`.

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
        self._stuck_since = 0.0

    @property
    def left(self) -> list[int]:
        return [rank for rank in range(self._num_ranks) if rank not in self.ranks]

    def look(self, ranks: Sequence[Progress], statuses: Mapping[int, Status], gone: Collection[int], now: float) -> str:
        """Return "went on" once when the others continue without lost ranks, "failed", or "" if nothing is new."""
        # Ranks that are gone without a status come before those with one, because they may be the cause.
        for number in [rank for rank in self.left if rank in gone and rank not in statuses]:
            self._lose(number, Failure(number, 1, "was killed, or left past the end of the script,"))
        failed = [rank for rank in self.left if rank in statuses and statuses[rank].exit_code]
        for number in sorted(failed, key=lambda rank: statuses[rank].time):
            if not statuses[number].waited:
                code = statuses[number].exit_code
                self._lose(number, Failure(number, code, how_it_ended(code)))
        left = self.left
        # For example a rank that has tried to continue, and could not.
        if any(statuses[number].exit_code for number in left if number in statuses):
            return "failed"
        if not self._has_new:
            return ""
        if len(left) < self._least or not all(ranks[number].has_met for number in left):
            return "failed"
        if all(ranks[number].members == len(left) for number in left):
            self._has_new = False
            return "went on"
        if any(number in statuses for number in left):
            return "failed"
        waits = all(ranks[number].waits_in for number in left)
        self._stuck_since = (self._stuck_since or now) if waits else 0.0
        return "failed" if waits and now - self._stuck_since > PATIENCE_SECONDS else ""

    def _lose(self, number: int, failure: Failure) -> None:
        self.ranks[number] = failure
        self.new = [*(self.new if self._has_new else []), failure]
        self._has_new = True
        self._stuck_since = 0.0

    def end(self) -> None:
        """Count the attempt as failed, although the other ranks could continue."""
        self._has_new = True

    @property
    def failure(self) -> Optional[Failure]:
        """Return the first loss after which the others have not continued; None without one."""
        return self.new[0] if self._has_new else None
