"""Monitor one attempt of a job: show its output, and find out why it ended.

:mod:`mindnlp_dp.launch.job` creates a :class:`AttemptMonitor` for each attempt. It polls the reports of the hosts until
the attempt is to end, for one of the reasons in :class:`StopReason`.
"""

from __future__ import annotations

import enum
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Optional

from mindnlp_dp.launch.event_loop import POLL_SECONDS, EventLoop
from mindnlp_dp.launch.monitor.console import Console
from mindnlp_dp.launch.monitor.failure_attribution import Failure, find_failure
from mindnlp_dp.launch.monitor.hangs import EXIT_CODE, START_SECONDS, HangDetector, describe_hang
from mindnlp_dp.launch.monitor.recovery import LostRanks, Outcome, RestartPolicy
from mindnlp_dp.launch.monitor.snapshot import JobSnapshot, first_lost, take_snapshot
from mindnlp_dp.launch.options import JobOptions
from mindnlp_dp.launch.processes.attempt import Attempt
from mindnlp_dp.launch.processes.stack_dumps import describe_exit
from mindnlp_dp.launch.rendezvous.membership import Host, Membership
from mindnlp_dp.launch.termination import Termination
from mindnlp_dp.runtime.heartbeat import Status

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


class StopReason(enum.Enum):
    """Why an attempt is over, or is to be ended."""

    # All ranks have exited, as far as they are not lost.
    ALL_EXITED = enum.auto()
    # A rank has failed, and the others do not continue without it.
    RANK_FAILED = enum.auto()
    # No rank makes progress, ranks have never started, or mpirun does not end although all ranks are gone.
    HANG = enum.auto()
    HOST_LOST = enum.auto()
    # A checkpoint was written, so that the job can restart with more ranks.
    SAVED = enum.auto()


@dataclass(frozen=True)
class AttemptResult:
    """How an attempt ended.

    Attributes:
        failure: how it failed; None if it succeeded or was ended in order to grow.
        grows: whether it was ended only to restart with more ranks.
        failed_before_start: whether it failed before any rank had started, and did not hang.
        update: the last update that a rank had finished.
        shown_status: status of rank 0 when its output was last shown.
    """

    failure: Optional[Failure] = None
    grows: bool = False
    failed_before_start: bool = False
    update: int = 0
    shown_status: Optional[Status] = None


class AttemptMonitor:
    """Monitors one attempt until it is over or is to be ended; used by :class:`~mindnlp_dp.launch.job.Job`."""

    def __init__(
        self,
        hosts: Sequence[Host],
        attempt: Attempt,
        membership: Membership,
        restart_policy: RestartPolicy,
        *,
        loop: EventLoop,
        log_dir: Path,
        options: JobOptions,
        termination: Termination,
    ) -> None:
        self._loop, self._termination = loop, termination
        self._hosts, self._attempt, self._membership, self._restart_policy = hosts, attempt, membership, restart_policy
        self._log_dir, self._options = log_dir, options
        self._began = time.monotonic()
        self._console = Console(log_dir, attempt.num_ranks, options.tee, restart_policy.count, loop)
        self._hangs = HangDetector(options.hang_timeout)
        self._is_patient, self._looked, self._over, self._deserted = True, 0.0, 0.0, 0.0
        self._has_named_late = False
        # The times at which ranks were first seen to have ended.
        self._finished: dict[int, float] = {}
        self._has_asked = self._has_prepared = False
        self._snapshot = JobSnapshot([])
        self._lost_ranks = LostRanks(attempt.num_ranks, membership.nproc.least)
        # How the job hangs, if it does.
        self._hang: Optional[Failure] = None

    def wait(self) -> StopReason:
        """Show logs until the attempt is over or is to be ended; return why.

        Raises:
            Interrupted: the job was asked to end, and has written a checkpoint or used up its grace period.
        """
        with self._termination.awaited():
            while (reason := self._poll()) is None:
                self._loop.run_once(POLL_SECONDS)
            if reason is StopReason.RANK_FAILED:
                self._poll_other_hosts()
            elif reason is StopReason.ALL_EXITED and self._have_succeeded(self._snapshot):
                self._console.show_all()
            self._console.close()
        return reason

    def _poll(self) -> Optional[StopReason]:
        """Poll the ranks, show their output, and return why the attempt is over; None while it continues."""
        self._snapshot = take_snapshot(self._hosts, self._attempt)
        now = time.monotonic()
        has_failed = self._check_failed(now)
        self._note_finished(now)
        if not has_failed and now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            self._look_closer(now)
        self._console.show()
        may_end = self._has_saved or not self._can_save(now)
        if not has_failed:
            self._termination.end(may_end)
        for host in self._hosts:
            if host.terminates and may_end:
                host.lost = host.lost or "its launcher was asked to end"
        if has_failed:
            return StopReason.RANK_FAILED
        if self._hang:
            return StopReason.HANG
        if first_lost(self._hosts) is not None:
            return StopReason.HOST_LOST
        if self._has_saved:
            return StopReason.SAVED
        if self._has_ended(now):
            return StopReason.HANG if self._hang else StopReason.ALL_EXITED
        return None

    @property
    def _has_saved(self) -> bool:
        """Return whether the checkpoint is written for which the first remaining rank was asked."""
        return self._has_asked and any(self._snapshot.ranks[rank].saved for rank in self._lost_ranks.left[:1])

    def _can_save(self, now: float) -> bool:
        """Return whether a checkpoint can still be written.

        Before the first update there is nothing to save. After the end of the first rank no rank saves, but the others
        get some time to finish, too.
        """
        since = min((self._finished.get(rank, now) for rank in self._lost_ranks.left[:1]), default=now)
        return self._snapshot.update > 0 and now - since <= _FINISH_SECONDS

    def result(self, reason: StopReason) -> AttemptResult:
        """Return how the attempt ended; to be called after :meth:`wait`, once all ranks were ended."""
        # Ranks that had to be ended may have written their statuses meanwhile. Their processes count as they were
        # before, because ranks that the launcher has ended would look like failures.
        after = take_snapshot(self._hosts, self._attempt)
        shown_status = self._snapshot.statuses.get(0)
        snapshot = replace(self._snapshot, ranks=after.ranks, statuses=after.statuses)
        left = self._lost_ranks.left
        grows, failure = reason is StopReason.SAVED and not self._have_succeeded(after), None
        if not grows:
            failure = self._lost_ranks.failure or self._hang
            failure = failure or find_failure(snapshot, self._hosts, self._attempt, self._log_dir, left)
        has_begun = snapshot.has_begun or any(self._log_dir.glob("worker_*.log"))
        failed_before_start = failure is not None and self._hang is None and not has_begun
        return AttemptResult(failure, grows, failed_before_start, snapshot.update, shown_status)

    def _have_succeeded(self, snapshot: JobSnapshot) -> bool:
        statuses = snapshot.statuses
        return all(rank in statuses and not statuses[rank].exit_code for rank in self._lost_ranks.left)

    def _poll_other_hosts(self) -> None:
        """Wait a moment, so that ranks that fail together all report it, and a rank that is exiting is seen as gone.

        If the failed ranks only gave up waiting for another rank, wait longer for that rank's report.
        """
        began = time.monotonic()
        while True:
            self._loop.run_once(POLL_SECONDS)
            self._snapshot = take_snapshot(self._hosts, self._attempt)
            passed = time.monotonic() - began
            if passed >= (_CAUSE_SECONDS if self._snapshot.has_only_secondary_failures else 2 * POLL_SECONDS):
                break

    def _check_failed(self, now: float) -> bool:
        """Return whether a rank has failed and the others do not continue without it."""
        snapshot = self._snapshot
        if not self._attempt.in_place:
            return snapshot.has_failed
        news = self._lost_ranks.poll(snapshot.ranks, snapshot.statuses, snapshot.gone, now)
        return news is Outcome.FAILED or (news is Outcome.CONTINUED and not self._note_survivors(now))

    def _note_survivors(self, now: float) -> bool:
        """Record that the other ranks continue; return False if the job must restart instead, or must end."""
        lost_ranks, seconds = self._lost_ranks, now - self._began
        if not self._restart_policy.continue_in_place(lost_ranks.new, update=self._snapshot.update, seconds=seconds):
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
        left = set(self._lost_ranks.left)
        there = left & {*self._snapshot.statuses, *(process.rank for process in self._snapshot.ended)}
        self._finished = {rank: self._finished.get(rank, now) for rank in sorted(there)}
        if self._is_patient and there and now - min(self._finished.values()) > PATIENCE_SECONDS:
            self._is_patient = False
            _mention_stragglers(list(self._finished), sorted(left - there))

    def _look_closer(self, now: float) -> None:
        """Do the more expensive work: update the status line, check for hangs, and prepare the next attempt."""
        snapshot, lost_ranks = self._snapshot, self._lost_ranks
        num_ended = len(self._finished) + len(lost_ranks.ranks)
        self._console.say(snapshot.ranks, num_ended)
        stopped = [rank for report in snapshot.reports for rank in report.stopped]
        self._report_missing_ranks(now)
        # Lost ranks are left out, because their records keep what they were last doing.
        if self._hangs.poll([snapshot.ranks[rank] for rank in lost_ranks.left], bool(stopped)):
            self._hang = describe_hang(
                snapshot.ranks, sorted(self._finished), self._stacks(), stopped,
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
        missing = [number for number, rank in enumerate(self._snapshot.ranks) if not rank.pid]
        if missing and now - self._began > START_SECONDS:
            said = (
                f"ranks {missing} have not begun {START_SECONDS:.0f} s after the job was started; "
                f"see {self._log_dir}/launcher.log"
            )
            self._hang = Failure(missing[0], EXIT_CODE, "never began", said)

    def _is_deserted(self, now: float) -> bool:
        """Return whether all ranks have exited but mpirun, or their other parent, has not; statuses then decide."""
        left = self._lost_ranks.left
        if not self._snapshot.gone.issuperset(left):
            self._deserted = 0.0
            return False
        self._deserted = self._deserted or now
        if now - self._deserted <= _LEAVE_SECONDS:
            return False
        silent = [rank for rank in left if rank not in self._snapshot.statuses]
        if silent:
            self._hang = Failure(silent[0], 1, "was killed, or left past the end of the script,")
        return True

    def _is_late(self, now: float) -> bool:
        """Name the processes that do not end although all ranks have finished; return whether to end them now.

        A thread of the script may still work, or the clean-up of a library or a driver hangs.
        """
        snapshot, left = self._snapshot, self._lost_ranks.left
        late = [rank for rank in left if rank not in snapshot.gone]
        if not late or any(rank not in snapshot.statuses for rank in left):
            return False
        timeout, passed = self._options.hang_timeout, now - max(self._finished[rank] for rank in left)
        if passed > PATIENCE_SECONDS and not self._has_named_late:
            self._has_named_late = True
            _mention_late(late, snapshot, self._stacks(), timeout)
        return bool(timeout) and passed > max(timeout, PATIENCE_SECONDS)

    def _stacks(self) -> dict[int, str]:
        return {rank: text for host in self._hosts for rank, text in host.stacks().items()}

    def _has_ended(self, now: float) -> bool:
        snapshot, lost_ranks = self._snapshot, self._lost_ranks
        if self._is_deserted(now) or self._is_late(now):
            return True
        if lost_ranks.ranks and len(self._finished) == len(lost_ranks.left):
            # mpirun may still wait for the lost ranks.
            return snapshot.gone.issuperset(lost_ranks.left) or now - max(self._finished.values()) > _LEAVE_SECONDS
        ended = all(report.all_ended for report in snapshot.reports)
        if ended and len(self._hosts) > 1 and len(snapshot.statuses) < self._attempt.num_ranks:
            # Statuses of ranks on other hosts may still be on their way.
            self._over = self._over or now
            return now - self._over > _LAST_WORD_SECONDS
        return ended


def _mention_late(late: Sequence[int], snapshot: JobSnapshot, stacks: Mapping[int, str], timeout: float) -> None:
    """Print which processes have not ended although all ranks have finished, and where they are."""
    print(f"all ranks have finished, the last one {PATIENCE_SECONDS:.0f} s ago:", file=sys.stderr)
    # Those with a stack first, because the others may wait for them.
    for rank in sorted(late, key=lambda rank: not stacks.get(rank)):
        where = describe_exit(snapshot.ranks[rank], stacks.get(rank, ""))
        print(f"the process of rank {rank} ({snapshot.ranks[rank].pid}) has not ended: {where}", file=sys.stderr)
    end = f"It is ended after {timeout:.0f} s (--hang-timeout)" if timeout else "Ctrl-C ends it"
    print(f"{end}; the job has succeeded", file=sys.stderr)


def _mention_stragglers(finished: Sequence[int], running: Sequence[int]) -> None:
    """Print which ranks are done and which are not: the latter may be writing files, or waiting forever."""
    if running:
        print(
            f"ranks {finished} finished {PATIENCE_SECONDS:.0f} s ago, ranks {running} have not. If they wait for the "
            "others, they wait forever: every rank must make the same collective calls. Ctrl-C ends the job",
            file=sys.stderr,
        )
