"""Ranks that a try has lost while the others go on without them, in their processes.

Goes in: how far ranks are, and which have ended. Comes out: whether those that are left have gone on, or the try is to
be ended. Ranks do it by themselves (:mod:`mindnlp_dp.trainers.in_place`); the launcher looks on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Optional

from mindnlp_dp.runtime.progress import Progress

from .verdict import Failure, Status, how_it_ended

# How long ranks that all wait may take to go on without one that was lost.
PATIENCE_SECONDS = 5.0


class Losses:
    """Of one try.

    Args:
        num_ranks: with which it began.
        least: ranks that it may have.

    Attributes:
        ranks: those that were lost, and how.
        new: those of them that the others have yet to go on without; the last ones, when they have gone on.
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
        """What has become of the try: "" where nothing is new, "went on" without lost ranks, once, or "failed"."""
        # One that says nothing any more comes before those that say why they ended: it may be why.
        for number in [rank for rank in self.left if rank in gone and rank not in statuses]:
            self._lose(number, Failure(number, 1, "was killed, or left past the end of the script,"))
        failed = [rank for rank in self.left if rank in statuses and statuses[rank].exit_code]
        for number in sorted(failed, key=lambda rank: statuses[rank].time):
            if not statuses[number].waited:
                code = statuses[number].exit_code
                self._lose(number, Failure(number, code, how_it_ended(code)))
        left = self.left
        # Such as one that has tried to go on, and could not.
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
        """The others are not to go on, though they could."""
        self._has_new = True

    @property
    def failure(self) -> Optional[Failure]:
        """The first of those that the others do not go on without."""
        return self.new[0] if self._has_new else None
