"""A snapshot of what all hosts of a job report about an attempt.

:mod:`mindnlp_dp.launch.monitor.attempt_monitor` takes one in each round, and a last one when all ranks were ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Optional

from mindnlp_dp.launch.processes.attempt import Attempt, HostReport
from mindnlp_dp.launch.processes.exit_status import ExitedProcess
from mindnlp_dp.launch.rendezvous.membership import Host
from mindnlp_dp.runtime.heartbeat import RankHeartbeat, Status


@dataclass
class JobSnapshot:
    """Progress of each rank, statuses of the ranks that have recorded their end, and all hosts' reports."""

    ranks: list[RankHeartbeat]
    statuses: dict[int, Status] = field(default_factory=dict)
    reports: list[HostReport] = field(default_factory=list)

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
    def ended(self) -> list[ExitedProcess]:
        """Return the launchers' own child processes that have ended: ranks, or mpirun, which has no rank."""
        return [process for report in self.reports for process in report.ended]

    @property
    def gone(self) -> set[int]:
        """Return the ranks whose processes have ended."""
        return {rank for report in self.reports for rank in report.gone}

    @property
    def has_only_secondary_failures(self) -> bool:
        """Return whether all failed ranks only gave up waiting for another rank, whose own end is not known yet."""
        failed = [status for status in self.statuses.values() if status.exit_code != 0]
        silent = any(process.rank is not None and process.rank not in self.statuses for process in self.ended)
        return bool(failed) and all(status.waited for status in failed) and not silent

    @property
    def has_failed(self) -> bool:
        """Return whether a rank has recorded a failure, or has ended without a status, whatever its exit code is."""
        return any(status.exit_code != 0 for status in self.statuses.values()) or any(
            process.rank is not None and process.rank not in self.statuses for process in self.ended
        )


def take_snapshot(hosts: Sequence[Host], attempt: Attempt) -> JobSnapshot:
    """Return a snapshot of the ranks of an attempt."""
    snapshot = JobSnapshot([RankHeartbeat()] * attempt.num_ranks)
    for host in hosts:
        report = host.poll()
        snapshot.reports.append(report)
        snapshot.statuses.update(report.statuses)
        for rank, so_far in report.ranks.items():
            if rank < attempt.num_ranks:
                snapshot.ranks[rank] = so_far
    return snapshot


def first_lost(hosts: Sequence[Host]) -> Optional[Host]:
    """Return the first host that is lost, or None."""
    return next((host for host in hosts if host.lost), None)
