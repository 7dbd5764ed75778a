"""Monitor one attempt of a job: show its output, and find out why it ended.

launch_job.py creates an :class:`AttemptMonitor` for each attempt. It polls the reports of the hosts until all ranks
have exited or the attempt is to be ended: a rank has failed, the job hangs, a host is lost, or a checkpoint was written
so that the job can restart with more ranks.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Optional

from mindnlp_dp.launch.event_loop import POLL_SECONDS, EventLoop
from mindnlp_dp.launch.membership import Host, Membership
from mindnlp_dp.launch.monitor.console import Console
from mindnlp_dp.launch.monitor.failure_attribution import Failure, find_failure
from mindnlp_dp.launch.monitor.hangs import EXIT_CODE, START_SECONDS, HangDetector, describe_hang
from mindnlp_dp.launch.monitor.snapshot import JobSnapshot, first_lost, take_snapshot
from mindnlp_dp.launch.monitor.status import StatusFile
from mindnlp_dp.launch.options import JobOptions
from mindnlp_dp.launch.processes.attempt import Attempt
from mindnlp_dp.launch.processes.stack_dumps import describe_exit
from mindnlp_dp.launch.termination import Termination

# Seconds after the first rank has finished before a message names the ranks that have not.
PATIENCE_SECONDS = 30.0

# How much later than its consequences the cause of a failure may become visible.
_CAUSE_SECONDS = 0.5

# How often the progress of the ranks is checked.
_LOOK_SECONDS = 0.5

# How long the record of a rank on another host may take to arrive after the job's processes have ended.
_LAST_WORD_SECONDS = 5.0

# How long mpirun may take to exit after all ranks have exited and, less than that, to end the job after one is gone
# without a record.
_LEAVE_SECONDS, _PARENT_SECONDS = 10.0, 5.0


@dataclass(frozen=True)
class AttemptResult:
    """How an attempt ended.

    Attributes:
        failure: how it failed; None if it succeeded or was ended in order to grow.
        grows: whether it was ended only to restart with more ranks.
        failed_before_start: whether it failed before any rank had started, and did not hang.
        update: the last update that a rank had finished.
    """

    failure: Optional[Failure] = None
    grows: bool = False
    failed_before_start: bool = False
    update: int = 0


class AttemptMonitor:
    """Monitors one attempt until it is over or is to be ended; used by :class:`~mindnlp_dp.launch.launch_job.Job`."""

    def __init__(
        self,
        hosts: Sequence[Host],
        attempt: Attempt,
        membership: Membership,
        status_file: StatusFile,
        *,
        loop: EventLoop,
        options: JobOptions,
        termination: Termination,
    ) -> None:
        self._loop, self._termination = loop, termination
        self._hosts, self._attempt, self._membership = hosts, attempt, membership
        self._status_file, self._log_dir, self._options = status_file, Path(attempt.log_dir), options
        self._began = time.monotonic()
        self._console = Console(self._log_dir, attempt.num_ranks, options.tee, loop)
        self._hangs = HangDetector(options.hang_timeout)
        self._looked = 0.0
        # Since when something has been so without interruption.
        self._since: dict[str, float] = {}
        self._has_named_stragglers = self._has_named_late = self._has_asked = False
        self._snapshot, self._was_saved = JobSnapshot([]), False
        # A failure that is found here, because no rank and no process reports it.
        self._failure: Optional[Failure] = None

    def wait(self) -> None:
        """Show logs until the attempt is over or is to be ended.

        Raises:
            Interrupted: the job was asked to end, and has written a checkpoint or used up its grace period.
        """
        with self._termination.awaited():
            while not self._is_over():
                self._loop.run_once(POLL_SECONDS)
            if self._snapshot.has_failed:
                self._poll_other_hosts()
            elif self._snapshot.has_succeeded:
                self._console.show_all(lambda: self._termination.asked is not None)
            self._console.close()

    def result(self) -> AttemptResult:
        """Return how the attempt ended; to be called after :meth:`wait`, once all ranks were ended."""
        # Ranks that had to be ended may have recorded their end meanwhile. Their processes count as they were before,
        # because ranks that the launcher has ended would look like failures.
        snapshot = replace(self._snapshot, ranks=take_snapshot(self._hosts, self._attempt).ranks)
        grows, failure = self._was_saved and not snapshot.has_succeeded, None
        if not grows:
            failure = self._failure or find_failure(snapshot, self._hosts, self._attempt)
        has_begun = snapshot.has_begun or any(self._log_dir.glob("worker_*.log"))
        return AttemptResult(
            failure, grows,
            failed_before_start=failure is not None and self._failure is None and not has_begun,
            update=snapshot.update,
        )  # fmt: skip

    def _is_over(self) -> bool:
        """Poll the ranks, show their output, and return whether the attempt is over or is to be ended."""
        self._snapshot = snapshot = take_snapshot(self._hosts, self._attempt)
        now = time.monotonic()
        if not snapshot.has_failed and now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            self._inspect(now)
        self._console.show()
        # Before the first update there is nothing to save.
        may_end = self._has_saved or snapshot.update == 0
        if snapshot.has_failed:
            return True
        self._termination.end(may_end)
        for host in self._hosts:
            if host.terminates and may_end:
                host.lost = host.lost or "its launcher was asked to end"
        if self._failure or first_lost(self._hosts) is not None:
            return True
        self._was_saved = self._has_saved
        return self._was_saved or self._has_ended(now)

    @property
    def _has_saved(self) -> bool:
        """Return whether the checkpoint is written for which rank 0 was asked."""
        return self._has_asked and bool(self._snapshot.ranks[0].saved)

    def _seconds(self, what: str, is_true: bool, now: float) -> float:
        """Return for how many seconds something has been true without interruption; 0 if it is false."""
        if not is_true:
            self._since.pop(what, None)
            return 0.0
        return now - self._since.setdefault(what, now)

    def _done(self) -> set[int]:
        """Return the ranks that have recorded their end, or whose own process has ended."""
        return {*self._snapshot.ends, *(p.rank for p in self._snapshot.exited if p.rank is not None)}

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

    def _inspect(self, now: float) -> None:
        """Do the more expensive work: report what the job does, check for hangs, and ask for a checkpoint."""
        snapshot, done = self._snapshot, sorted(self._done())
        self._status_file.write(self._log_dir, snapshot)
        self._mention_stragglers(done, now)
        missing = [number for number, rank in enumerate(snapshot.ranks) if not rank.pid]
        if missing and now - self._began > START_SECONDS:
            # mpirun or its daemons may hang, for example on a name server.
            said = (
                f"ranks {missing} have not started {START_SECONDS:.0f} s after the job was started; "
                f"see {self._log_dir}/launcher.log"
            )
            self._failure = Failure(missing[0], EXIT_CODE, "never began", said)
        elif self._hangs.poll(snapshot.ranks, bool(snapshot.stopped)):
            self._failure = describe_hang(
                snapshot.ranks, done, self._stacks(), snapshot.stopped,
                log_dir=self._log_dir, timeout=self._options.hang_timeout,
            )  # fmt: skip
        can_ask = snapshot.update > 0 and not self._has_asked
        if can_ask and (self._is_to_end or self._membership.could_grow(len(snapshot.ranks))):
            self._has_asked = True
            self._membership.local.ask_for_checkpoint(1)

    @property
    def _is_to_end(self) -> bool:
        """Return whether the job, or one of its hosts, was asked to end."""
        return self._termination.asked is not None or any(host.terminates for host in self._hosts)

    def _has_ended(self, now: float) -> bool:
        """Return whether no process of the attempt has to be waited for."""
        snapshot, silent = self._snapshot, self._snapshot.exited_silently
        if self._seconds("some are silent", bool(silent), now) > _PARENT_SECONDS:
            # mpirun does not know how it ended, or has not said so.
            self._failure = Failure(silent[0], 1, "was killed, or exited before the end of the script,")
            return True
        have_exited = len(snapshot.gone) == len(snapshot.ranks)
        if self._seconds("all are gone", have_exited, now) > _LEAVE_SECONDS or self._is_late(now):
            return True
        passed = self._seconds("processes are over", snapshot.are_processes_over, now)
        # Records of ranks on other hosts may still be on their way.
        is_complete = len(self._hosts) == 1 or (snapshot.has_succeeded and not snapshot.with_threads)
        return snapshot.are_processes_over and (is_complete or passed > _LAST_WORD_SECONDS)

    def _is_late(self, now: float) -> bool:
        """Name the processes that do not end although all ranks have finished; return whether to end them now.

        A thread of the script may still work, or the clean-up of a library or a driver hangs.
        """
        late = [rank for rank in range(len(self._snapshot.ranks)) if rank not in self._snapshot.gone]
        passed = self._seconds("all are done", bool(late) and self._snapshot.has_succeeded, now)
        timeout = self._options.hang_timeout
        if passed > PATIENCE_SECONDS and not self._has_named_late:
            self._has_named_late = True
            _mention_late(late, self._snapshot, self._stacks(), timeout)
        return bool(timeout) and passed > max(timeout, PATIENCE_SECONDS)

    def _stacks(self) -> dict[int, str]:
        return {rank: text for host in self._hosts for rank, text in host.stacks().items()}

    def _mention_stragglers(self, done: Sequence[int], now: float) -> None:
        """Print which ranks are done and which are not: the latter may be writing files, or waiting forever."""
        passed = self._seconds("some are done", bool(done), now)
        running = [rank for rank in range(len(self._snapshot.ranks)) if rank not in done]
        if passed > PATIENCE_SECONDS and running and not self._has_named_stragglers:
            self._has_named_stragglers = True
            print(
                f"ranks {done} finished {PATIENCE_SECONDS:.0f} s ago, ranks {running} have not. If they wait for the "
                "others, they wait forever: every rank must make the same collective calls. Ctrl-C ends the job",
                file=sys.stderr,
            )


def _mention_late(late: Sequence[int], snapshot: JobSnapshot, stacks: Mapping[int, str], timeout: float) -> None:
    """Print which processes have not ended although all ranks have finished, and where they are."""
    print(f"all ranks have finished, the last one {PATIENCE_SECONDS:.0f} s ago:", file=sys.stderr)
    # Those with a stack first, because the others may wait for them.
    for rank in sorted(late, key=lambda rank: not stacks.get(rank)):
        where = describe_exit(snapshot.ranks[rank], stacks.get(rank, ""))
        print(f"the process of rank {rank} ({snapshot.ranks[rank].pid}) has not ended: {where}", file=sys.stderr)
    end = f"It is ended after {timeout:.0f} s (--hang-timeout)" if timeout else "Ctrl-C ends it"
    print(f"{end}; the job has succeeded", file=sys.stderr)
