"""Run a job from its first attempt to its last: start it on its hosts, monitor it, end it, and restart it if wanted.

:mod:`mindnlp_dp.launch.run` creates the :class:`Job`. Each rank writes ``worker_R.log``; rank 0's is shown as it grows.
A rank records its progress, and how its script ended, in memory (:mod:`mindnlp_dp.runtime.heartbeat`), because the exit
codes of libraries are not reliable: processes of MindSpore's cluster may exit with 1 after a successful job, mpirun
with 0 after one that lost a host. A rank that has ended without such a record has failed.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Optional

from mindnlp_dp.launch.errors import TemporaryError
from mindnlp_dp.launch.event_loop import EventLoop
from mindnlp_dp.launch.log_dir import VARIABLE as LOG_MB
from mindnlp_dp.launch.log_dir import LogDir
from mindnlp_dp.launch.membership import Host, Membership
from mindnlp_dp.launch.monitor.attempt_monitor import AttemptMonitor, AttemptResult
from mindnlp_dp.launch.monitor.failure_attribution import Failure, report_failure
from mindnlp_dp.launch.monitor.restarts import RestartPolicy
from mindnlp_dp.launch.monitor.snapshot import take_snapshot
from mindnlp_dp.launch.monitor.status import StatusFile
from mindnlp_dp.launch.options import JobOptions
from mindnlp_dp.launch.processes.attempt import Attempt
from mindnlp_dp.launch.processes.environment import free_port
from mindnlp_dp.launch.rendezvous.remote_host import RemoteHost
from mindnlp_dp.launch.termination import Termination
from mindnlp_dp.runtime.job_context import attempt_env


class Job:
    """A command that the hosts of ``membership`` run together, with restarts."""

    def __init__(
        self,
        command: Sequence[str],
        backend: str,
        membership: Membership,
        loop: EventLoop,
        *,
        log_dir: LogDir,
        options: JobOptions,
        termination: Termination,
    ) -> None:
        self._command, self._backend, self._membership, self._loop = list(command), backend, membership, loop
        self._log_dir, self._options, self._termination = log_dir, options, termination
        self._restart_policy = RestartPolicy(options.max_restarts, log_dir)
        self._status_file = StatusFile(self._restart_policy.failures)
        self._name = secrets.token_hex(8)
        self._number = 0

    def run(self) -> int:
        """Run the job to its end, and return its exit code.

        Raises:
            Interrupted: the job was asked to end.
            LaunchError: the job cannot be started as asked.
        """
        while True:
            hosts = self._membership.gather()
            attempt = self._next_attempt(hosts)
            began = time.monotonic()
            result = self._run_attempt(hosts, attempt)
            seconds = time.monotonic() - began
            self._number += 1
            failure = result.failure
            if result.grows:
                self._termination.end(is_saved=True)
                self._restart_policy.made_progress()
                continue
            if failure is None:
                return 0
            self._report(failure, hosts, attempt, seconds)
            # A job that was asked to end is not restarted.
            self._termination.end(is_saved=True)
            wait = self._restart_policy.after(failure, update=result.update, seconds=seconds)
            if wait is None:
                if self._restart_policy.why_not:
                    print(f"the job is over: {self._restart_policy.why_not}", file=sys.stderr)
                return failure.exit_code
            host = _host_of(failure.rank, hosts, attempt)
            if host is not None and not host.lost:
                self._membership.note_lost_rank(host)
            print(
                f"restart {self._restart_policy.count} of {self._options.max_restarts}"
                + (f" in {wait:.0f} s" if wait else "")
                + ", from the newest checkpoint",
                file=sys.stderr,
            )
            self._loop.sleep(wait)

    def note_end(self, exit_code: int) -> None:
        """Write to the log folder that the job is over."""
        self._status_file.end(exit_code)

    def _next_attempt(self, hosts: Sequence[Host]) -> Attempt:
        membership = self._membership
        others = [host for host in hosts if isinstance(host, RemoteHost)]
        # The first host's address as the others see it: the endpoint's may belong to a service in front of it.
        addresses = [others[0].address_of_server, *(host.address for host in others)] if others else []
        attempt = Attempt(
            self._number, self._backend, self._command, str(self._log_dir.new_attempt()), membership.counts(hosts),
            addresses, port=free_port(),
            variables={
                LOG_MB: str(self._options.log_mb),
                **attempt_env(
                    self._number, self._name, membership.max_world_size if membership.is_elastic else None,
                    scale_batch=self._options.scale_batch,
                ),
            },
        )  # fmt: skip
        if membership.is_elastic and self._number:
            on = f" on {len(hosts)} hosts" if len(hosts) > 1 else ""
            print(
                f"the job continues with {attempt.num_ranks} of {membership.max_world_size} ranks{on}", file=sys.stderr
            )
        return attempt

    def _run_attempt(self, hosts: Sequence[Host], attempt: Attempt) -> AttemptResult:
        """Run an attempt; start mpirun a second time if it ends before any rank has started."""
        try:
            result = self._start_and_monitor(hosts, attempt)
            # On a busy machine OpenMPI's own server may start too late ("The PMIx server's listener thread failed to
            # start").
            if result.failed_before_start and attempt.backend == "mpi" and len(hosts) == 1:
                print("mpirun exited before any rank had started; it is started again", file=sys.stderr)
                result = self._start_and_monitor(hosts, attempt)
            return result
        except TemporaryError as error:
            if not self._number:
                raise
            # The job was started before, so the next attempt may work again.
            return AttemptResult(Failure(None, error.exit_code, str(error)))

    def _start_and_monitor(self, hosts: Sequence[Host], attempt: Attempt) -> AttemptResult:
        """Start the ranks, monitor them, and end all that are left."""
        monitor = AttemptMonitor(
            hosts, attempt, self._membership, self._status_file,
            loop=self._loop, options=self._options, termination=self._termination,
        )  # fmt: skip
        try:
            # The first host starts last: its mpirun asks the others for daemons, so they must know the attempt.
            for index, host in reversed(list(enumerate(hosts))):
                host.start(replace(attempt, index=index))
            monitor.wait()
        finally:
            for host in hosts:
                host.end()
            self._status_file.write(Path(attempt.log_dir), take_snapshot(hosts, attempt))
        return monitor.result()

    def _report(self, failure: Failure, hosts: Sequence[Host], attempt: Attempt, seconds: float) -> None:
        host = _host_of(failure.rank, hosts, attempt)
        where = f" on {host.name}" if host is not None and len(hosts) > 1 else ""
        # Rank 0's output is shown as it is written.
        is_shown = failure.rank == 0 and self._options.tee != "none"
        log_tail = host.tail(failure.rank) if host is not None and failure.rank is not None and not is_shown else ""
        report_failure(failure, attempt, seconds, where=where, log_tail=log_tail)


def _host_of(rank: Optional[int], hosts: Sequence[Host], attempt: Attempt) -> Optional[Host]:
    for index, host in enumerate(hosts):
        if rank is not None and rank in replace(attempt, index=index).ranks:
            return host
    return None
