"""A job from its first try to its last: started on its hosts, watched, ended, and started again where that is wanted.

Goes in: hosts, a command. Comes out: an exit code. Each rank writes ``worker_R.log``; rank 0's is shown as it grows. A
rank says how it ended in ``worker_R.status`` (:mod:`mindnlp_dp.launch.worker`), for the libraries' own exit codes are
not always true: processes of MindSpore's cluster may end with 1 after a job that went well, mpirun with 0 after one
that lost a host. How far it is stands in a file in memory (:mod:`mindnlp_dp.runtime.progress`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Optional

from mindnlp_dp.runtime.progress import Progress

from .engines import POLL_SECONDS
from .environment import free_port, try_environment
from .hangs import HangWatch, name_hang
from .head import RemoteHost
from .log_file import DEFAULT_MB
from .log_file import VARIABLE as LOG_MB
from .restarts import Restarts
from .screen import Screen
from .sizes import Host, Members
from .tries import Report, Try
from .verdict import Failure, Status, find_failure, report_failure

# How long some ranks may have finished before the others' silence is worth a word.
PATIENCE_SECONDS = 30.0
# How often it is looked whether ranks get any further.
_LOOK_SECONDS = 0.5
# How long the word of a rank on another host may be under way when its job has ended.
_LAST_WORD_SECONDS = 5.0


@dataclass(frozen=True)
class JobOptions:
    """How a job is watched.

    Attributes:
        hang_timeout: seconds without progress of any rank after which the job is ended; 0: never.
        max_restarts: how many times it is started again after a failure.
        tee: whose output is shown: "0", "all" or "none".
        grow_after: seconds after which an elastic job takes the place of a rank that was lost again.
        log_mb: MiB at which a rank's log begins anew; 0: never.
    """

    hang_timeout: float = 1800.0
    max_restarts: int = 0
    tee: str = "0"
    grow_after: float = 60.0
    log_mb: int = DEFAULT_MB


@dataclass
class _Seen:
    """What all hosts report."""

    ranks: list[Progress]
    statuses: dict[int, Status] = field(default_factory=dict)
    reports: list[Report] = field(default_factory=list)

    @property
    def update(self) -> int:
        return max((rank.update for rank in self.ranks), default=0)


class Job:
    """A command that ``members`` run together."""

    def __init__(
        self,
        command: Sequence[str],
        backend: str,
        members: Members,
        *,
        log_dir: Path,
        options: JobOptions,
        remote_shell: Sequence[str] = (),
    ) -> None:
        self._command, self._backend, self._members = list(command), backend, members
        self._log_dir, self._options = log_dir, options
        self._sleep = members.local.sleep
        self._remote_shell = list(remote_shell)
        self._restarts = Restarts(options.max_restarts, log_dir)
        self._began = time.time()
        self._number = 0
        self._seen = _Seen([])

    def run(self) -> int:
        """Its exit code.

        Raises:
            LaunchError: it cannot be started as asked.
        """
        while True:
            hosts = self._members.gather()
            this = self._next_try(hosts)
            began = time.monotonic()
            failure, grows = self._run_once(hosts, this)
            seconds = time.monotonic() - began
            self._number += 1
            if grows:
                self._restarts.got_on()
                continue
            if failure is None:
                return 0
            self._report(failure, hosts, this, seconds)
            wait = self._restarts.after(failure, update=self._seen.update, seconds=seconds)
            if wait is None:
                if self._restarts.why_not:
                    print(f"the job is over: {self._restarts.why_not}", file=sys.stderr)
                return failure.exit_code
            host = _host_of(failure.rank, hosts, this)
            if host is not None and not host.lost:
                self._members.lose_a_rank(host)
            print(
                f"restart {self._restarts.count} of {self._options.max_restarts}"
                + (f" in {wait:.0f} s" if wait else "")
                + f", from the newest checkpoint; logs of this try: {self._log_dir}/try_{self._number}",
                file=sys.stderr,
            )
            deadline = time.monotonic() + wait
            while (left := deadline - time.monotonic()) > 0:
                self._sleep(min(left, POLL_SECONDS))

    def _next_try(self, hosts: Sequence[Host]) -> Try:
        members = self._members
        others = [host for host in hosts if isinstance(host, RemoteHost)]
        # The first host's as the others see it; the endpoint's may be that of a service in front of it.
        addresses = [others[0].address_of_head, *(host.address for host in others)] if others else []
        this = Try(
            self._number, self._backend, self._command, str(self._log_dir.absolute()), members.counts(hosts), addresses,
            port=free_port(), remote_shell=self._remote_shell,
            variables={
                LOG_MB: str(self._options.log_mb),
                **try_environment(self._number, self._began, members.full_size if members.is_elastic else None),
            },
        )  # fmt: skip
        if members.is_elastic and self._number:
            on = f" on {len(hosts)} hosts" if len(hosts) > 1 else ""
            print(f"the job goes on with {this.num_ranks} of {members.full_size} ranks{on}", file=sys.stderr)
        return this

    def _run_once(self, hosts: Sequence[Host], this: Try) -> tuple[Optional[Failure], bool]:
        """How a try failed, None where it did not; and whether it was ended in order to grow."""
        for host in hosts:
            host.clear(this.log_dir, this.number)
        for attempt in range(2):
            try:
                # The first host's mpirun asks the others for its daemons: they have to know the try by then.
                for index, host in reversed(list(enumerate(hosts))):
                    host.start(replace(this, index=index))
                hang, grows = self._watch(hosts, this)
            finally:
                for host in hosts:
                    host.end()
            # Those that had to be ended may have had their say by then.
            after = self._look(hosts, this)
            statuses, self._seen.ranks = after.statuses, after.ranks
            if grows and [status.exit_code for status in statuses.values()] != [0] * this.num_ranks:
                return None, True
            failure = hang or self._verdict(hosts, this, replace(self._seen, statuses=statuses))
            # On a busy machine OpenMPI's own server may come too late for it ("The PMIx server's listener thread failed
            # to start").
            began = any(self._log_dir.glob("worker_*.log"))
            if failure is None or attempt or began or this.backend != "mpi" or len(hosts) > 1:
                break
            print("mpirun ended before any rank had begun; it is started once more", file=sys.stderr)
        return failure, False

    def _watch(self, hosts: Sequence[Host], this: Try) -> tuple[Optional[Failure], bool]:
        """Show logs until all have ended, or one has failed, or the job hangs (how), or is to grow."""
        screen = Screen(self._log_dir, this.num_ranks, self._options.tee, self._restarts.count)
        hangs = HangWatch(self._options.hang_timeout)
        finished, patient, looked, over = dict[int, float](), True, 0.0, 0.0
        asked, prepared = False, False
        while True:
            seen = self._seen = self._look(hosts, this)
            now = time.monotonic()
            for rank in [*seen.statuses, *(e.rank for r in seen.reports for e in r.ended if e.rank is not None)]:
                finished.setdefault(rank, now)
            if patient and finished and now - min(finished.values()) > PATIENCE_SECONDS:
                patient = False
                _mention_stragglers(sorted(finished), this.num_ranks)
            failed, ended, lost = _has_failed(seen), all(r.all_ended for r in seen.reports), _first_lost(hosts)
            hang = None
            if not failed and now - looked >= _LOOK_SECONDS:
                looked = now
                screen.say(seen.ranks, len(finished))
                stopped = [rank for report in seen.reports for rank in report.stopped]
                if hangs.look(seen.ranks, bool(stopped)):
                    stacks = {rank: text for host in hosts for rank, text in host.stacks().items()}
                    hang = name_hang(
                        seen.ranks, sorted(finished), stacks, stopped, log_dir=self._log_dir, timeout=hangs.timeout
                    )
                if not prepared and self._may_start_again and all(rank.has_met for rank in seen.ranks):
                    prepared = True
                    for host in hosts:
                        host.prepare_restart()
                if not asked and seen.update and self._members.could_grow(this.counts):
                    asked = True
                    self._members.local.ask_for_checkpoint(1)
            screen.show()
            grows = asked and seen.ranks[0].saved > 0
            if ended and len(hosts) > 1 and len(seen.statuses) < this.num_ranks and not (failed or lost):
                # What ranks on other hosts have said is under way.
                over = over or now
                ended = now - over > _LAST_WORD_SECONDS
            if not (hang or failed or lost or ended or grows):
                self._sleep(POLL_SECONDS)
                continue
            if failed:
                # Ranks that fail together all get to say so, and one that is leaving is seen to have left.
                for _ in range(2):
                    self._sleep(POLL_SECONDS)
                self._seen = self._look(hosts, this)
            screen.close()
            return hang, grows and not (failed or hang or lost)

    @property
    def _may_start_again(self) -> bool:
        return self._members.is_elastic or self._options.max_restarts > self._restarts.count

    def _look(self, hosts: Sequence[Host], this: Try) -> _Seen:
        seen = _Seen([Progress()] * this.num_ranks)
        for host in hosts:
            report = host.look()
            seen.reports.append(report)
            seen.statuses.update(report.statuses)
            for rank, so_far in report.ranks.items():
                if rank < this.num_ranks:
                    seen.ranks[rank] = so_far
        return seen

    def _verdict(self, hosts: Sequence[Host], this: Try, seen: _Seen) -> Optional[Failure]:
        ended = [process for report in seen.reports for process in report.ended]
        lost = _first_lost(hosts)
        if lost is not None and not any(status.exit_code and not status.waited for status in seen.statuses.values()):
            rank = replace(this, index=hosts.index(lost)).ranks.start
            return Failure(rank, 1, "was lost with its host", f"host {lost.name} is lost: {lost.lost}")
        failure = find_failure(ended, seen.statuses, self._log_dir, this.num_ranks)
        missing = [rank for rank in range(this.num_ranks) if rank not in seen.statuses]
        if failure is None and missing and len(hosts) > 1:
            return Failure(missing[0], 1, "ended without a word")
        return failure

    def _report(self, failure: Failure, hosts: Sequence[Host], this: Try, seconds: float) -> None:
        host = _host_of(failure.rank, hosts, this)
        where = host.name if host is not None and len(hosts) > 1 else ""
        log_tail = host.tail(failure.rank) if host is not None and failure.rank is not None else ""
        report_failure(
            failure, self._log_dir, this.num_ranks, seconds, where=where, log_tail=log_tail, shown=self._options.tee
        )


def _has_failed(seen: _Seen) -> bool:
    # A status tells better than the exit code of a process, which a library may have changed.
    return any(status.exit_code != 0 for status in seen.statuses.values()) or any(
        process.rank is not None and process.rank not in seen.statuses and process.returncode != 0
        for report in seen.reports
        for process in report.ended
    )


def _first_lost(hosts: Sequence[Host]) -> Optional[Host]:
    return next((host for host in hosts if host.lost), None)


def _host_of(rank: Optional[int], hosts: Sequence[Host], this: Try) -> Optional[Host]:
    for index, host in enumerate(hosts):
        if rank is not None and rank in replace(this, index=index).ranks:
            return host
    return None


def _mention_stragglers(finished: list[int], nproc: int) -> None:
    """Some ranks are done and others are not: they may be writing files, or waiting for ever."""
    running = [rank for rank in range(nproc) if rank not in finished]
    if running:
        print(
            f"ranks {finished} finished {PATIENCE_SECONDS:.0f} s ago, ranks {running} have not. If they wait for the "
            "others they wait for ever: every rank must make the same collective calls. Ctrl-C ends the job",
            file=sys.stderr,
        )
