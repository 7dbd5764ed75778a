"""Monitor one attempt of a job: show its output, and find out why it is over.

:mod:`mindnlp_dp.launch.job` creates a :class:`Watch` for each attempt. It polls the reports of the hosts until all
ranks have ended, a rank has failed or was lost with its host, the job hangs, or the job is to restart with more ranks.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

from mindnlp_dp.launch.errors import POLL_SECONDS
from mindnlp_dp.launch.job_options import JobOptions
from mindnlp_dp.launch.monitor.console import Screen
from mindnlp_dp.launch.monitor.failure_attribution import Failure
from mindnlp_dp.launch.monitor.hangs import EXIT_CODE, START_SECONDS, HangDetector, describe_hang
from mindnlp_dp.launch.monitor.recovery import Losses, Restarts
from mindnlp_dp.launch.processes.attempt import Report, Try
from mindnlp_dp.launch.processes.exit_status import Status
from mindnlp_dp.launch.rendezvous.membership import Host, Members
from mindnlp_dp.launch.termination import Termination
from mindnlp_dp.runtime.heartbeat import Progress

# Seconds after the first rank has finished before a message names the ranks that have not.
PATIENCE_SECONDS = 30.0

# How much later than its consequences the cause of a failure may become visible.
_CAUSE_SECONDS = 0.5

# How often the progress of the ranks is checked.
_LOOK_SECONDS = 0.5

# How long the status of a rank on another host may take to arrive after the job's processes have ended.
_LAST_WORD_SECONDS = 5.0

# How long ranks that have finished without lost ranks may take to exit, and mpirun after all ranks have exited.
_LEAVE_SECONDS = 10.0


@dataclass
class Seen:
    """A snapshot of what all hosts report about the ranks of an attempt."""

    ranks: list[Progress]
    statuses: dict[int, Status] = field(default_factory=dict)
    reports: list[Report] = field(default_factory=list)

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


def look(hosts: Sequence[Host], this: Try) -> Seen:
    """Return a snapshot of the ranks of an attempt."""
    seen = Seen([Progress()] * this.num_ranks)
    for host in hosts:
        report = host.look()
        seen.reports.append(report)
        seen.statuses.update(report.statuses)
        for rank, so_far in report.ranks.items():
            if rank < this.num_ranks:
                seen.ranks[rank] = so_far
    return seen


def first_lost(hosts: Sequence[Host]) -> Optional[Host]:
    return next((host for host in hosts if host.lost), None)


class Watch:
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
        this: Try,
        members: Members,
        restarts: Restarts,
        *,
        log_dir: Path,
        options: JobOptions,
        termination: Termination,
    ) -> None:
        self._termination = termination
        self._hosts, self._try, self._members, self._restarts = hosts, this, members, restarts
        self._log_dir, self._options = log_dir, options
        self._began = time.monotonic()
        self._screen = Screen(log_dir, this.num_ranks, options.tee, restarts.count)
        self._hangs = HangDetector(options.hang_timeout)
        self._is_patient, self._over, self._deserted = True, 0.0, 0.0
        # The times at which ranks were first seen to have ended.
        self._finished: dict[int, float] = {}
        self._has_asked = self._has_prepared = False
        self.seen = Seen([])
        self.losses = Losses(this.num_ranks, members.nproc.least)
        self.hang: Optional[Failure] = None
        self.grows = False

    def wait_until_over(self, sleep: Callable[[float], None]) -> None:
        """Show logs until all ranks have ended, a rank has failed, the job hangs, or the job is to grow.

        Raises:
            Interrupted: the job was asked to end, and has written a checkpoint or used up its grace period.
        """
        with self._termination.awaited():
            self._until_it_is_over(sleep)

    def _until_it_is_over(self, sleep: Callable[[float], None]) -> None:
        looked = 0.0
        while True:
            self.seen = seen = look(self._hosts, self._try)
            now = time.monotonic()
            failed = self._goes_wrong(now)
            self._note_finished(now)
            if not failed and now - looked >= _LOOK_SECONDS:
                looked = now
                self._look_closer(now)
            self._screen.show()
            has_saved = self._has_asked and any(seen.ranks[rank].saved for rank in self.losses.left[:1])
            # Before the first update there is nothing to save. After the end of the first rank no rank saves, but the
            # others get some time to finish, too.
            since = min((self._finished.get(rank, now) for rank in self.losses.left[:1]), default=now)
            can_save = seen.update > 0 and now - since <= _LEAVE_SECONDS
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
            self._hear_the_others(sleep)
        elif not (self.hang or lost or has_saved):
            self._screen.show_all(sleep)
        self._screen.close()
        self.grows = has_saved and not (failed or self.hang or lost)

    def _hear_the_others(self, sleep: Callable[[float], None]) -> None:
        """Wait a moment, so that ranks that fail together all report it, and a rank that is exiting is seen as gone.

        If the failed ranks only gave up waiting for another rank, wait longer for that rank's report.
        """
        began = time.monotonic()
        while True:
            sleep(POLL_SECONDS)
            self.seen = look(self._hosts, self._try)
            passed = time.monotonic() - began
            if passed >= (_CAUSE_SECONDS if self.seen.has_only_echoes else 2 * POLL_SECONDS):
                break

    def _goes_wrong(self, now: float) -> bool:
        """Return whether a rank has failed and the others do not continue without it."""
        seen = self.seen
        if not self._try.in_place:
            return seen.has_failed
        gone = [rank for report in seen.reports for rank in report.gone]
        news = self.losses.look(seen.ranks, seen.statuses, gone, now)
        return news == "failed" or (news == "went on" and not self._note_those_left(now))

    def _note_those_left(self, now: float) -> bool:
        """Record that the other ranks continue; return False if the job must restart instead, or must end."""
        losses, seconds = self.losses, now - self._began
        if not self._restarts.go_on_in_place(losses.new, update=self.seen.update, seconds=seconds):
            losses.end()
            return False
        self._screen.stay_with(losses.left)
        for failure in losses.new:
            self._members.lose_a_rank(self._hosts[0])
            print(
                f"rank {failure.rank} of {self._try.num_ranks} {failure.what} after {seconds:.1f} s; the job goes on "
                f"in place with {len(losses.left)} of {self._members.max_world_size} ranks; its log: "
                f"{self._log_dir}/worker_{failure.rank}.log",
                file=sys.stderr,
            )
        return True

    def _note_finished(self, now: float) -> None:
        ended = [process.rank for report in self.seen.reports for process in report.ended]
        left = set(self.losses.left)
        there = left & {*self.seen.statuses, *(rank for rank in ended if rank is not None)}
        self._finished = {rank: self._finished.get(rank, now) for rank in sorted(there)}
        if self._is_patient and there and now - min(self._finished.values()) > PATIENCE_SECONDS:
            self._is_patient = False
            _mention_stragglers(list(self._finished), sorted(left - there))

    def _look_closer(self, now: float) -> None:
        """Do the more expensive work: update the status line, check for hangs, and prepare the next attempt."""
        seen, losses = self.seen, self.losses
        num_ended = len(self._finished) + len(losses.ranks)
        self._screen.say(seen.ranks, num_ended)
        stopped = [rank for report in seen.reports for rank in report.stopped]
        self._name_those_that_never_began(now)
        # Lost ranks are left out, because their records keep what they were last doing.
        if self._hangs.look([seen.ranks[rank] for rank in losses.left], bool(stopped)):
            stacks = {rank: text for host in self._hosts for rank, text in host.stacks().items()}
            self.hang = describe_hang(
                seen.ranks, sorted(self._finished), stacks, stopped,
                lost=losses.ranks, log_dir=self._log_dir, timeout=self._hangs.timeout,
            )  # fmt: skip
        if not self._has_prepared and self._may_start_again and all(rank.has_joined for rank in seen.ranks):
            self._has_prepared = True
            for host in self._hosts:
                host.prepare_restart()
        may_ask = not self._has_asked and losses.failure is None and seen.update > 0
        if may_ask and (self._is_to_end or self._members.could_grow(len(losses.left))):
            self._has_asked = True
            self._members.local.ask_for_checkpoint(1)

    @property
    def _is_to_end(self) -> bool:
        """Return whether the job, or one of its hosts, was asked to end."""
        return self._termination.asked is not None or any(host.terminates for host in self._hosts)

    @property
    def _may_start_again(self) -> bool:
        return self._members.is_elastic or self._options.max_restarts > self._restarts.count

    def _name_those_that_never_began(self, now: float) -> None:
        """Report ranks that have not started: mpirun or its daemons may hang, for example on a name server."""
        missing = [number for number, rank in enumerate(self.seen.ranks) if not rank.pid]
        if missing and now - self._began > START_SECONDS:
            said = (
                f"ranks {missing} have not begun {START_SECONDS:.0f} s after the job was started; "
                f"see {self._log_dir}/launcher.log"
            )
            self.hang = Failure(missing[0], EXIT_CODE, "never began", said)

    def _is_deserted(self, now: float) -> bool:
        """Return whether all ranks have exited but mpirun, or their other parent, has not; statuses then decide."""
        left = self.losses.left
        if not {rank for report in self.seen.reports for rank in report.gone}.issuperset(left):
            self._deserted = 0.0
            return False
        self._deserted = self._deserted or now
        if now - self._deserted <= _LEAVE_SECONDS:
            return False
        silent = [rank for rank in left if rank not in self.seen.statuses]
        if silent:
            self.hang = Failure(silent[0], 1, "was killed, or left past the end of the script,")
        return True

    def _has_ended(self, now: float) -> bool:
        seen, losses = self.seen, self.losses
        if self._is_deserted(now):
            return True
        if losses.ranks and len(self._finished) == len(losses.left):
            # mpirun may still wait for the lost ranks.
            gone = {rank for report in seen.reports for rank in report.gone}
            return gone.issuperset(losses.left) or now - max(self._finished.values()) > _LEAVE_SECONDS
        ended = all(report.all_ended for report in seen.reports)
        if ended and len(self._hosts) > 1 and len(seen.statuses) < self._try.num_ranks:
            # Statuses of ranks on other hosts may still be on their way.
            self._over = self._over or now
            return now - self._over > _LAST_WORD_SECONDS
        return ended


def _mention_stragglers(finished: Sequence[int], running: Sequence[int]) -> None:
    """Print which ranks are done and which are not: the latter may be writing files, or waiting forever."""
    if running:
        print(
            f"ranks {finished} finished {PATIENCE_SECONDS:.0f} s ago, ranks {running} have not. If they wait for the "
            "others they wait for ever: every rank must make the same collective calls. Ctrl-C ends the job",
            file=sys.stderr,
        )
