"""Detect that a job hangs: report which ranks wait, in which collective, since when, and where the missing ranks are.

:mod:`mindnlp_dp.launch.monitor.attempt_monitor` polls the ranks' progress (:mod:`mindnlp_dp.runtime.heartbeat`) with
it. When no rank has made progress for some time, a message is built from the stacks of all ranks. Live threads are not
a sign of progress: the threads of a rank that hangs in a collective live, too.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from mindnlp_dp.launch.monitor.failure_attribution import Failure
from mindnlp_dp.launch.processes.stack_dumps import describe_location
from mindnlp_dp.runtime.heartbeat import RankHeartbeat

# The exit code of timeout(1).
EXIT_CODE = 124

# A longer interval is not counted: the launcher itself was stopped, and has not seen a rank hang.
_MOST_SECONDS_BETWEEN_LOOKS = 1.0

# The additional time that ranks get until all have joined.
START_SECONDS = 120.0


class HangDetector:
    """Checks whether ranks make progress; used by :class:`~mindnlp_dp.launch.monitor.attempt_monitor.AttemptMonitor`.

    Args:
        timeout: seconds after which the job hangs if some rank waits for others and no rank makes progress; 0: never.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._seen: list[int] = []
        self._stalled, self._looked = 0.0, time.monotonic()

    def poll(self, ranks: Sequence[RankHeartbeat], is_stopped: bool = False) -> bool:
        """Return whether the ranks hang. Until all have joined, no rank reports progress, and imports take time.

        Args:
            is_stopped: whether some rank's process is stopped (SIGSTOP), and makes no progress though no rank waits.
        """
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, _MOST_SECONDS_BETWEEN_LOOKS), now
        changes = [rank.changes for rank in ranks]
        # If no rank waits, each rank is busy with a long computation, or has ended.
        if changes != self._seen or not (is_stopped or any(rank.blocked_in for rank in ranks)):
            self._seen, self._stalled = changes, 0.0
        else:
            self._stalled += passed
        have_met = all(rank.has_joined for rank in ranks)
        return 0 < self.timeout <= (self._stalled if have_met else self._stalled - START_SECONDS)


def describe_hang(
    ranks: Sequence[RankHeartbeat],
    finished: Sequence[int],
    stacks: Mapping[int, str],
    stopped: Collection[int],
    *,
    log_dir: Path,
    timeout: float,
) -> Failure:
    """Describe a hang as a failure: which ranks wait, and for which ranks.

    Args:
        finished: ranks that have ended.
        stacks: stacks of the ranks that have answered (:func:`stacks_of`).
        stopped: ranks whose processes are stopped.
    """
    now = time.monotonic()
    running = [number for number in range(len(ranks)) if number not in finished]
    waiting = [number for number in running if ranks[number].blocked_in and number not in stopped]
    others = [number for number in running if number not in waiting]
    said = [f"the job hangs: no rank has made progress for {timeout:.0f} s."]
    calls: dict[str, list[int]] = {}
    for number in waiting:
        calls.setdefault(f"{ranks[number].blocked_in}, in update {ranks[number].update}", []).append(number)
    for call, numbers in calls.items():
        since = max(now - ranks[number].since for number in numbers)
        verb = "waits" if len(numbers) == 1 else "wait"
        said.append(f"{_ranks(numbers)} {verb} in {call}, since {since:.0f} s.")
    for number in others:
        said.append(
            f"Rank {number} did not join: "
            f"{describe_location(ranks[number], stacks.get(number, ''), number in stopped)}."
        )
    if finished and not others:
        said.append(
            f"{_ranks(list(finished))} {'has' if len(finished) == 1 else 'have'} reached the end of the script."
        )
    if len(calls) > 1 and not others and not finished:
        said.append("Every rank must make the same collective calls, in the same order.")
    said.append(f"Stacks of all: {log_dir}/worker_*.stacks")
    blamed = others or list(finished) or waiting
    return Failure(min(blamed, key=lambda number: (ranks[number].update, number)), EXIT_CODE, "hung", " ".join(said))


def _ranks(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"Rank {numbers[0]}"
    return f"Ranks {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
