"""A snapshot of what all hosts of a job report about an attempt.

:mod:`mindnlp_dp.launch.monitor.attempt_monitor` takes one in each round, and a last one when all ranks were ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Optional

from mindnlp_dp.launch.membership import Host
from mindnlp_dp.launch.processes.attempt import Attempt, HostReport
from mindnlp_dp.launch.processes.exit_status import ExitedProcess
from mindnlp_dp.runtime.heartbeat import RankHeartbeat


@dataclass
class JobSnapshot:
    """The heartbeat of each rank, and all hosts' reports."""

    ranks: list[RankHeartbeat]
    reports: list[HostReport] = field(default_factory=list)

    @property
    def ends(self) -> dict[int, RankHeartbeat]:
        """Return the heartbeats of the ranks that have recorded the end of their script."""
        return {number: rank for number, rank in enumerate(self.ranks) if rank.exit_code is not None}

    @property
    def failed(self) -> dict[int, RankHeartbeat]:
        """Return the heartbeats of the ranks that have recorded a failure."""
        return {number: rank for number, rank in self.ends.items() if rank.exit_code}

    @property
    def has_succeeded(self) -> bool:
        return len(self.ends) == len(self.ranks) and not self.failed

    @property
    def oom_kills(self) -> int:
        """Return how many processes the kernel has killed for lack of memory, on all hosts."""
        return sum(report.oom_kills for report in self.reports)

    @property
    def update(self) -> int:
        return max((rank.update for rank in self.ranks), default=0)

    @property
    def has_begun(self) -> bool:
        """Return whether any rank has started."""
        return any(rank.pid for rank in self.ranks)

    @property
    def exited(self) -> list[ExitedProcess]:
        """Return the launchers' own child processes that have ended: ranks, or mpirun, which has no rank."""
        return [process for report in self.reports for process in report.ended]

    @property
    def gone(self) -> set[int]:
        """Return the ranks whose processes have ended."""
        return {rank for report in self.reports for rank in report.gone}

    @property
    def stopped(self) -> list[int]:
        """Return the ranks whose processes are stopped (SIGSTOP)."""
        return [rank for report in self.reports for rank in report.stopped]

    @property
    def silent(self) -> dict[int, int]:
        """Return the ranks whose processes have ended without a recorded end, and their return codes."""
        return {p.rank: p.returncode for p in self.exited if p.rank is not None and not self._is_final(p.rank)}

    @property
    def exited_silently(self) -> list[int]:
        """Return the ranks that are gone without a recorded end, or whose threads were still running then."""
        return [rank for rank in sorted(self.gone) if not self._is_final(rank)]

    def _is_final(self, rank: int) -> bool:
        return rank in self.ends and rank not in self.with_threads

    @property
    def with_threads(self) -> list[int]:
        """Return the ranks whose main thread has succeeded, and that have not recorded the end of other threads."""
        return [number for number, rank in self.ends.items() if not rank.exit_code and not rank.threads_ended]

    @property
    def are_processes_over(self) -> bool:
        return all(report.all_ended for report in self.reports)

    @property
    def has_only_secondary_failures(self) -> bool:
        """Return whether all failed ranks only gave up waiting for another rank, whose own end is not known yet."""
        return bool(self.failed) and all(rank.waited for rank in self.failed.values()) and not self.silent

    @property
    def has_failed(self) -> bool:
        """Return whether a rank has recorded a failure, or has ended without a record, whatever its exit code is."""
        return bool(self.failed or self.silent)


def take_snapshot(hosts: Sequence[Host], attempt: Attempt) -> JobSnapshot:
    """Return a snapshot of the ranks of an attempt."""
    snapshot = JobSnapshot([RankHeartbeat()] * attempt.num_ranks)
    for host in hosts:
        report = host.poll()
        snapshot.reports.append(report)
        for rank, so_far in report.ranks.items():
            if rank < attempt.num_ranks:
                snapshot.ranks[rank] = so_far
    return snapshot


def first_lost(hosts: Sequence[Host]) -> Optional[Host]:
    """Return the first host that is lost, or None."""
    return next((host for host in hosts if host.lost), None)
