"""One try of a job, watched: what is shown of it, and why it is over.

Goes in: what its hosts report, again and again. Comes out: that all ranks have ended, that one has failed, or was lost
with its host, that the job hangs, or that it is to begin anew with more ranks.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

from mindnlp_dp.runtime.progress import Progress

from .engines import POLL_SECONDS
from .hangs import EXIT_CODE, START_SECONDS, HangWatch, name_hang
from .log_file import DEFAULT_MB
from .losses import Losses
from .restarts import Restarts
from .screen import Screen
from .sizes import Host, Members
from .termination import GRACE_PERIOD_SECONDS, Termination
from .tries import Report, Try
from .verdict import Failure, Status

# How long some ranks may have finished before the others' silence is worth a word.
PATIENCE_SECONDS = 30.0
# How long the cause of a failure may take to show behind its consequences.
_CAUSE_SECONDS = 0.5
# How often it is looked whether ranks get any further.
_LOOK_SECONDS = 0.5
# How long the word of a rank on another host may be under way when its job has ended.
_LAST_WORD_SECONDS = 5.0
# How long ranks that have come to their end without others may take to leave, and mpirun when all have left.
_LEAVE_SECONDS = 10.0


@dataclass(frozen=True)
class JobOptions:
    """How a job is watched.

    Attributes:
        hang_timeout: seconds without progress of any rank after which the job is ended; 0: never.
        max_restarts: how many times it is started again after a failure.
        tee: whose output is shown: "0", "all" or "none".
        grow_after: seconds after which an elastic job takes the place of a rank that was lost again.
        grace_period: seconds that the job gets for a checkpoint when it is asked to end (SIGTERM).
        log_mb: MiB at which a rank's log begins anew; 0: never.
        in_place: whether ranks go on without one that is lost (MPI, on one host).
        scale_batch: whether global batches of an elastic job are in proportion to its ranks.
    """

    hang_timeout: float = 1800.0
    max_restarts: int = 0
    tee: str = "0"
    grow_after: float = 60.0
    grace_period: float = GRACE_PERIOD_SECONDS
    log_mb: int = DEFAULT_MB
    in_place: bool = False
    scale_batch: bool = False


@dataclass
class Seen:
    """What all hosts report of a try's ranks."""

    ranks: list[Progress]
    statuses: dict[int, Status] = field(default_factory=dict)
    reports: list[Report] = field(default_factory=list)

    @property
    def update(self) -> int:
        return max((rank.update for rank in self.ranks), default=0)

    @property
    def has_only_echoes(self) -> bool:
        """Whether all that failed did so for want of another rank, of which nothing is known."""
        failed = [status for status in self.statuses.values() if status.exit_code != 0]
        silent = any(
            process.rank is not None and process.rank not in self.statuses
            for report in self.reports
            for process in report.ended
        )
        return bool(failed) and all(status.waited for status in failed) and not silent

    @property
    def has_failed(self) -> bool:
        # A status tells better than the exit code of a process, which a library may have changed.
        return any(status.exit_code != 0 for status in self.statuses.values()) or any(
            process.rank is not None and process.rank not in self.statuses and process.returncode != 0
            for report in self.reports
            for process in report.ended
        )


def look(hosts: Sequence[Host], this: Try) -> Seen:
    """How the ranks of a try are now."""
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
    """Of one try.

    Attributes:
        seen: how its ranks were when it was looked last.
        losses: ranks that the others went on without.
        hang: how the job hangs, or that its ranks never began, or left without a word; else None.
        grows: whether it was ended for no other reason than to begin anew with more ranks.
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
        self._hangs = HangWatch(options.hang_timeout)
        self._is_patient, self._over, self._deserted = True, 0.0, 0.0
        # When ranks were first seen to have ended.
        self._finished: dict[int, float] = {}
        self._has_asked = self._has_prepared = False
        self.seen = Seen([])
        self.losses = Losses(this.num_ranks, members.nproc.least)
        self.hang: Optional[Failure] = None
        self.grows = False

    def until_it_is_over(self, sleep: Callable[[float], None]) -> None:
        """Show logs until all ranks have ended, or one has failed, or the job hangs, or is to grow.

        Raises:
            Interrupted: it was asked to end, and has written a checkpoint, or had its time to.
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
            # Before the first update there is nothing to save, and behind the first rank's end nobody who does; the
            # others may come to theirs.
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
        """Ranks that fail together all get to say so, and one that is leaving is seen to have left.

        Where all there is are ranks that have lost another, that one gets longer to say why.
        """
        began = time.monotonic()
        while True:
            sleep(POLL_SECONDS)
            self.seen = look(self._hosts, self._try)
            passed = time.monotonic() - began
            if passed >= (_CAUSE_SECONDS if self.seen.has_only_echoes else 2 * POLL_SECONDS):
                break

    def _goes_wrong(self, now: float) -> bool:
        """Whether a rank has failed, and the others do not go on without it."""
        seen = self.seen
        if not self._try.in_place:
            return seen.has_failed
        gone = [rank for report in seen.reports for rank in report.gone]
        news = self.losses.look(seen.ranks, seen.statuses, gone, now)
        return news == "failed" or (news == "went on" and not self._note_those_left(now))

    def _note_those_left(self, now: float) -> bool:
        """They have gone on; False where the job is to be started again instead, or has been too often."""
        losses, seconds = self.losses, now - self._began
        if not self._restarts.go_on_in_place(losses.new, update=self.seen.update, seconds=seconds):
            losses.end()
            return False
        self._screen.stay_with(losses.left)
        for failure in losses.new:
            self._members.lose_a_rank(self._hosts[0])
            print(
                f"rank {failure.rank} of {self._try.num_ranks} {failure.what} after {seconds:.1f} s; the job goes on "
                f"in place with {len(losses.left)} of {self._members.full_size} ranks; its log: "
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
        """What costs more: how far ranks are; what is done meanwhile for another try."""
        seen, losses = self.seen, self.losses
        num_ended = len(self._finished) + len(losses.ranks)
        self._screen.say(seen.ranks, num_ended)
        stopped = [rank for report in seen.reports for rank in report.stopped]
        self._name_those_that_never_began(now)
        # What those that were lost were doing stays in their records.
        if self._hangs.look([seen.ranks[rank] for rank in losses.left], bool(stopped)):
            stacks = {rank: text for host in self._hosts for rank, text in host.stacks().items()}
            self.hang = name_hang(
                seen.ranks, sorted(self._finished), stacks, stopped,
                lost=losses.ranks, log_dir=self._log_dir, timeout=self._hangs.timeout,
            )  # fmt: skip
        if not self._has_prepared and self._may_start_again and all(rank.has_met for rank in seen.ranks):
            self._has_prepared = True
            for host in self._hosts:
                host.prepare_restart()
        may_ask = not self._has_asked and losses.failure is None and seen.update > 0
        if may_ask and (self._is_to_end or self._members.could_grow(len(losses.left))):
            self._has_asked = True
            self._members.local.ask_for_checkpoint(1)

    @property
    def _is_to_end(self) -> bool:
        """Whether the job, or a host of it, was asked to end."""
        return self._termination.asked is not None or any(host.terminates for host in self._hosts)

    @property
    def _may_start_again(self) -> bool:
        return self._members.is_elastic or self._options.max_restarts > self._restarts.count

    def _name_those_that_never_began(self, now: float) -> None:
        """mpirun, or a daemon of it, may wait for ever for what it needs: a name server, a firewall."""
        missing = [number for number, rank in enumerate(self.seen.ranks) if not rank.pid]
        if missing and now - self._began > START_SECONDS:
            said = (
                f"ranks {missing} have not begun {START_SECONDS:.0f} s after the job was started; "
                f"see {self._log_dir}/launcher.log"
            )
            self.hang = Failure(missing[0], EXIT_CODE, "never began", said)

    def _is_deserted(self, now: float) -> bool:
        """Whether all ranks have left, and who started them does not end; what ranks have said is the verdict then."""
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
            # mpirun may wait for those that were lost.
            gone = {rank for report in seen.reports for rank in report.gone}
            return gone.issuperset(losses.left) or now - max(self._finished.values()) > _LEAVE_SECONDS
        ended = all(report.all_ended for report in seen.reports)
        if ended and len(self._hosts) > 1 and len(seen.statuses) < self._try.num_ranks:
            # What ranks on other hosts have said is under way.
            self._over = self._over or now
            return now - self._over > _LAST_WORD_SECONDS
        return ended


def _mention_stragglers(finished: Sequence[int], running: Sequence[int]) -> None:
    """Some ranks are done and others are not: they may be writing files, or waiting for ever."""
    if running:
        print(
            f"ranks {finished} finished {PATIENCE_SECONDS:.0f} s ago, ranks {running} have not. If they wait for the "
            "others they wait for ever: every rank must make the same collective calls. Ctrl-C ends the job",
            file=sys.stderr,
        )
