"""Monitor one attempt of a job: show its output, and find out why it is over.

:mod:`mindnlp_dp.launch.job` creates a :class:`AttemptMonitor` for each attempt. It polls the reports of the hosts until
all ranks have ended, a rank has failed or was lost with its host, the job hangs, or the job is to restart with more
ranks.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

from mindnlp_dp.launch.errors import POLL_SECONDS
from mindnlp_dp.launch.monitor.console import Console
from mindnlp_dp.launch.monitor.failure_attribution import Failure
from mindnlp_dp.launch.monitor.hangs import EXIT_CODE, START_SECONDS, HangDetector, describe_hang
from mindnlp_dp.launch.monitor.recovery import LostRanks, Outcome, RestartPolicy
from mindnlp_dp.launch.options import JobOptions
from mindnlp_dp.launch.processes.attempt import Attempt, HostReport
from mindnlp_dp.launch.processes.exit_status import Status
from mindnlp_dp.launch.rendezvous.membership import Host, Membership
from mindnlp_dp.launch.termination import Termination
from mindnlp_dp.runtime.heartbeat import RankHeartbeat

# Seconds after the first rank has finished before a message names the ranks that have not.
PATIENCE_SECONDS = 30.0

# How much later than its consequences the cause of a failure may become visible.
_CAUSE_SECONDS = 0.5

# How often the progress of the ranks is checked.
_LOOK_SECONDS = 0.5

# How long the status of a rank on another host may take to arrive after the job's processes have ended.
_LAST_WORD_SECONDS = 5.0

# After SIGTERM, how long the other ranks may take to finish once the first one has.
_FINISH_SECONDS = 30.0

# How long ranks that have finished without lost ranks may take to exit, and mpirun after all ranks have exited.
_LEAVE_SECONDS = 10.0


@dataclass
class JobSnapshot:
    """A snapshot of what all hosts report about the ranks of an attempt."""

    ranks: list[RankHeartbeat]
    statuses: dict[int, Status] = field(default_factory=dict)
    reports: list[HostReport] = field(default_factory=list)

    @property
    def update(self) -> int:
        return max((rank.update for rank in self.ranks), default=0)

    @property
    def has_only_echoes(self) -> bool:
        """Return whether all failed ranks only gave up waiting for another rank, whose own end is not known yet."""
        failed = [status for status in self.statuses.values() if status.exit_code != 0]
        silent = any(
            process.rank is not None and process.rank not in self.statuses
            for report in self.reports
            for process in report.ended
        )
        return bool(failed) and all(status.waited for status in failed) and not silent

    @property
    def has_failed(self) -> bool:
        # A status is more reliable than the exit code of a process, which a library may have changed.
        return any(status.exit_code != 0 for status in self.statuses.values()) or any(
            process.rank is not None and process.rank not in self.statuses and process.returncode != 0
            for report in self.reports
            for process in report.ended
        )


def poll(hosts: Sequence[Host], attempt: Attempt) -> JobSnapshot:
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


class AttemptMonitor:
    """Monitors one attempt until it ends, fails, hangs or is to grow; used by :class:`~mindnlp_dp.launch.job.Job`.

    Attributes:
        seen: last snapshot of the ranks.
        losses: lost ranks without which the others continue in place.
        hang: failure of a job that hangs, or whose ranks never started, or exited without a status; else None.
        grows: whether the attempt was ended only to restart with more ranks.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        attempt: Attempt,
        membership: Membership,
        restart_policy: RestartPolicy,
        *,
        log_dir: Path,
        options: JobOptions,
        termination: Termination,
    ) -> None:
        self._termination = termination
        self._hosts, self._attempt, self._membership, self._restart_policy = hosts, attempt, membership, restart_policy
        self._log_dir, self._options = log_dir, options
        self._began = time.monotonic()
        self._console = Console(log_dir, attempt.num_ranks, options.tee, restart_policy.count)
        self._hangs = HangDetector(options.hang_timeout)
        self._is_patient, self._over, self._deserted = True, 0.0, 0.0
        # The times at which ranks were first seen to have ended.
        self._finished: dict[int, float] = {}
        self._has_asked = self._has_prepared = False
        self.snapshot = JobSnapshot([])
        self.lost_ranks = LostRanks(attempt.num_ranks, membership.nproc.least)
        self.hang: Optional[Failure] = None
        self.grows = False

    def wait_until_over(self, sleep: Callable[[float], None]) -> None:
        """Show logs until all ranks have ended, a rank has failed, the job hangs, or the job is to grow.

        Raises:
            Interrupted: the job was asked to end, and has written a checkpoint or used up its grace period.
        """
        with self._termination.awaited():
            self._wait(sleep)

    def _wait(self, sleep: Callable[[float], None]) -> None:
        looked = 0.0
        while True:
            self.snapshot = snapshot = poll(self._hosts, self._attempt)
            now = time.monotonic()
            failed = self._goes_wrong(now)
            self._note_finished(now)
            if not failed and now - looked >= _LOOK_SECONDS:
                looked = now
                self._look_closer(now)
            self._console.show()
            has_saved = self._has_asked and any(snapshot.ranks[rank].saved for rank in self.lost_ranks.left[:1])
            # Before the first update there is nothing to save. After the end of the first rank no rank saves, but the
            # others get some time to finish, too.
            since = min((self._finished.get(rank, now) for rank in self.lost_ranks.left[:1]), default=now)
            can_save = snapshot.update > 0 and now - since <= _FINISH_SECONDS
            if not failed:
                self._termination.end(has_saved or not can_save)
            for host in self._hosts:
                if host.terminates and (has_saved or not can_save):
                    host.lost = host.lost or "its launcher was asked to end"
            lost = first_lost(self._hosts) is not None
            if self.hang or failed or lost or has_saved or self._has_ended(now):
                break
            sleep(POLL_SECONDS)
        if failed:
            self._poll_other_hosts(sleep)
        elif not (self.hang or lost or has_saved):
            self._console.show_all(sleep)
        self._console.close()
        self.grows = has_saved and not (failed or self.hang or lost)

    def _poll_other_hosts(self, sleep: Callable[[float], None]) -> None:
        """Wait a moment, so that ranks that fail together all report it, and a rank that is exiting is seen as gone.

        If the failed ranks only gave up waiting for another rank, wait longer for that rank's report.
        """
        began = time.monotonic()
        while True:
            sleep(POLL_SECONDS)
            self.snapshot = poll(self._hosts, self._attempt)
            passed = time.monotonic() - began
            if passed >= (_CAUSE_SECONDS if self.snapshot.has_only_echoes else 2 * POLL_SECONDS):
                break

    def _goes_wrong(self, now: float) -> bool:
        """Return whether a rank has failed and the others do not continue without it."""
        snapshot = self.snapshot
        if not self._attempt.in_place:
            return snapshot.has_failed
        gone = [rank for report in snapshot.reports for rank in report.gone]
        news = self.lost_ranks.poll(snapshot.ranks, snapshot.statuses, gone, now)
        return news is Outcome.FAILED or (news is Outcome.CONTINUED and not self._note_survivors(now))

    def _note_survivors(self, now: float) -> bool:
        """Record that the other ranks continue; return False if the job must restart instead, or must end."""
        lost_ranks, seconds = self.lost_ranks, now - self._began
        if not self._restart_policy.continue_in_place(lost_ranks.new, update=self.snapshot.update, seconds=seconds):
            lost_ranks.end()
            return False
        self._console.keep_ranks(lost_ranks.left)
        for failure in lost_ranks.new:
            self._membership.note_lost_rank(self._hosts[0])
            print(
                f"rank {failure.rank} of {self._attempt.num_ranks} {failure.what} after {seconds:.1f} s; the job "
                f"continues in place with {len(lost_ranks.left)} of {self._membership.max_world_size} ranks; its log: "
                f"{self._log_dir}/worker_{failure.rank}.log",
                file=sys.stderr,
            )
        return True

    def _note_finished(self, now: float) -> None:
        ended = [process.rank for report in self.snapshot.reports for process in report.ended]
        left = set(self.lost_ranks.left)
        there = left & {*self.snapshot.statuses, *(rank for rank in ended if rank is not None)}
        self._finished = {rank: self._finished.get(rank, now) for rank in sorted(there)}
        if self._is_patient and there and now - min(self._finished.values()) > PATIENCE_SECONDS:
            self._is_patient = False
            _mention_stragglers(list(self._finished), sorted(left - there))

    def _look_closer(self, now: float) -> None:
        """Do the more expensive work: update the status line, check for hangs, and prepare the next attempt."""
        snapshot, lost_ranks = self.snapshot, self.lost_ranks
        num_ended = len(self._finished) + len(lost_ranks.ranks)
        self._console.say(snapshot.ranks, num_ended)
        stopped = [rank for report in snapshot.reports for rank in report.stopped]
        self._report_missing_ranks(now)
        # Lost ranks are left out, because their records keep what they were last doing.
        if self._hangs.poll([snapshot.ranks[rank] for rank in lost_ranks.left], bool(stopped)):
            stacks = {rank: text for host in self._hosts for rank, text in host.stacks().items()}
            self.hang = describe_hang(
                snapshot.ranks, sorted(self._finished), stacks, stopped,
                lost=lost_ranks.ranks, log_dir=self._log_dir, timeout=self._hangs.timeout,
            )  # fmt: skip
        if not self._has_prepared and self._may_start_again and all(rank.has_joined for rank in snapshot.ranks):
            self._has_prepared = True
            for host in self._hosts:
                host.prepare_restart()
        may_ask = not self._has_asked and lost_ranks.failure is None and snapshot.update > 0
        if may_ask and (self._is_to_end or self._membership.could_grow(len(lost_ranks.left))):
            self._has_asked = True
            self._membership.local.ask_for_checkpoint(1)

    @property
    def _is_to_end(self) -> bool:
        """Return whether the job, or one of its hosts, was asked to end."""
        return self._termination.asked is not None or any(host.terminates for host in self._hosts)

    @property
    def _may_start_again(self) -> bool:
        return self._membership.is_elastic or self._options.max_restarts > self._restart_policy.count

    def _report_missing_ranks(self, now: float) -> None:
        """Report ranks that have not started: mpirun or its daemons may hang, for example on a name server."""
        missing = [number for number, rank in enumerate(self.snapshot.ranks) if not rank.pid]
        if missing and now - self._began > START_SECONDS:
            said = (
                f"ranks {missing} have not begun {START_SECONDS:.0f} s after the job was started; "
                f"see {self._log_dir}/launcher.log"
            )
            self.hang = Failure(missing[0], EXIT_CODE, "never began", said)

    def _is_deserted(self, now: float) -> bool:
        """Return whether all ranks have exited but mpirun, or their other parent, has not; statuses then decide."""
        left = self.lost_ranks.left
        if not {rank for report in self.snapshot.reports for rank in report.gone}.issuperset(left):
            self._deserted = 0.0
            return False
        self._deserted = self._deserted or now
        if now - self._deserted <= _LEAVE_SECONDS:
            return False
        silent = [rank for rank in left if rank not in self.snapshot.statuses]
        if silent:
            self.hang = Failure(silent[0], 1, "was killed, or left past the end of the script,")
        return True

    def _has_ended(self, now: float) -> bool:
        snapshot, lost_ranks = self.snapshot, self.lost_ranks
        if self._is_deserted(now):
            return True
        if lost_ranks.ranks and len(self._finished) == len(lost_ranks.left):
            # mpirun may still wait for the lost ranks.
            gone = {rank for report in snapshot.reports for rank in report.gone}
            return gone.issuperset(lost_ranks.left) or now - max(self._finished.values()) > _LEAVE_SECONDS
        ended = all(report.all_ended for report in snapshot.reports)
        if ended and len(self._hosts) > 1 and len(snapshot.statuses) < self._attempt.num_ranks:
            # Statuses of ranks on other hosts may still be on their way.
            self._over = self._over or now
            return now - self._over > _LAST_WORD_SECONDS
        return ended


def _mention_stragglers(finished: Sequence[int], running: Sequence[int]) -> None:
    """Print which ranks are done and which are not: the latter may be writing files, or waiting forever."""
    if running:
        print(
            f"ranks {finished} finished {PATIENCE_SECONDS:.0f} s ago, ranks {running} have not. If they wait for the "
            "others, they wait forever: every rank must make the same collective calls. Ctrl-C ends the job",
            file=sys.stderr,
        )
