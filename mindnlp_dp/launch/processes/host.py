"""Start, monitor and end the ranks of one host.

Each launcher of a job has a :class:`LocalHost`, which starts its ranks of an attempt and, when polled, reports their
progress and how they ended (:mod:`mindnlp_dp.launch.processes.attempt`). The first host's launcher also has a proxy for
each other host, with the same methods (:class:`~mindnlp_dp.launch.rendezvous.remote_host.RemoteHost`).
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO, Optional, Union

from mindnlp_dp.launch.errors import TemporaryError
from mindnlp_dp.launch.event_loop import EventLoop
from mindnlp_dp.launch.log_dir import (
    archive_attempt_logs,
    archive_earlier_job,
    claim,
    progress_file,
)
from mindnlp_dp.launch.processes.attempt import Attempt, HostReport
from mindnlp_dp.launch.processes.environment import COMMAND_VARIABLE, this_host_name
from mindnlp_dp.launch.processes.exit_status import ExitedProcess, tail
from mindnlp_dp.launch.processes.fork_client import VARIABLE
from mindnlp_dp.launch.processes.fork_server import ForkServer
from mindnlp_dp.launch.processes.oom_kills import OomKills
from mindnlp_dp.launch.processes.run_module import command as module_command
from mindnlp_dp.launch.processes.spawn import (
    GRACE_SECONDS,
    Cluster,
    Process,
    grace_seconds,
    kill_process_group,
    start_cluster,
    start_daemon,
    start_mpi,
    start_scheduler,
    terminate,
    terminate_ranks,
)
from mindnlp_dp.launch.processes.stack_dumps import stacks_of
from mindnlp_dp.runtime import heartbeat
from mindnlp_dp.runtime.devices import default_device
from mindnlp_dp.runtime.heartbeat import RankHeartbeat, Status
from mindnlp_dp.runtime.job_context import host_environment
from mindnlp_dp.runtime.scratch_dir import ScratchDir

_LOOK_SECONDS = 0.5

_COMMAND_FILE = "command.json"


class LocalHost:
    """The host of this process, used by its launcher.

    Args:
        loop: event loop of this launcher, which runs while ranks are ended.
        remote_shell: on the first of several hosts: function that takes a folder that only this user can read, and
            returns the command by which mpirun starts a process on another host, as it would by ssh.

    Attributes:
        name: host name.
        slots: maximum number of ranks.
    """

    lost = ""
    terminates = False

    def __init__(
        self,
        environ: Mapping[str, str],
        slots: int,
        loop: EventLoop,
        *,
        remote_shell: Optional[Callable[[Path], list[str]]] = None,
    ) -> None:
        self._loop, self._remote_shell = loop, remote_shell
        self.name, self.slots = this_host_name(), slots
        self._environ = dict(environ)
        self._processes: list[Process] = []
        self._daemons: list[Process] = []
        self._attempt: Optional[Attempt] = None
        self._log: Optional[BinaryIO] = None
        self._fork_server: Optional[ForkServer] = None
        self._scratch: Optional[ScratchDir] = None
        self._oom_kills = OomKills()
        # The heartbeats of the attempt's ranks.
        self._memory: Optional[mmap.mmap] = None
        self._looked, self._statuses = 0.0, dict[int, Status]()
        self._so_far, self._states = dict[int, RankHeartbeat](), dict[int, str]()
        self._has_ended = True

    @property
    def number(self) -> int:
        """Return the number of the attempt whose ranks run here; -1 without ranks."""
        return -1 if self._attempt is None or self._has_ended else self._attempt.number

    def clear(self, log_dir: str, number: int) -> None:
        """Archive what the previous attempt has written or, before the first attempt, what an earlier job has.

        All hosts do this before any host starts its ranks, because hosts may share the folder.

        Raises:
            LaunchError: the folder holds other programs' files that have the names of logs.
            TemporaryError: the folder cannot be written to before the first attempt.
        """
        folder = Path(log_dir)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if number:
                if self._attempt is None:
                    # This host has joined a job that had already started.
                    claim(folder)
                archive_attempt_logs(folder, number)
            else:
                archive_earlier_job(folder)
        except OSError as error:
            if number:
                # The disk may be full, and a job can continue without logs.
                print(f"the logs of attempt {number} in {log_dir} cannot be archived: {error}", file=sys.stderr)
                return
            raise self._cannot_be_written(log_dir, error) from None

    def _cannot_be_written(self, log_dir: Union[str, Path], error: OSError) -> TemporaryError:
        return TemporaryError(
            f"the log folder {log_dir} of {self.name} cannot be written to ({error}); --log-dir names another"
        )

    def start(self, attempt: Attempt) -> None:
        """Start this host's ranks of an attempt.

        Raises:
            LaunchError: the engine is not installed.
            TemporaryError: the log folder cannot be written to, or the engine cannot be started now.
        """
        self._attempt, self._processes, self._daemons = attempt, [], []
        log_dir = Path(attempt.log_dir)
        self._memory, self._looked, self._statuses, self._has_ended = None, 0.0, {}, False
        self._oom_kills = OomKills()
        self._so_far, self._states = {}, {}
        try:
            self._scratch = self._scratch or ScratchDir("job")
            # Not as arguments, because mpirun would read some of the script's words as its own.
            (self._scratch.path / _COMMAND_FILE).write_text(json.dumps(attempt.command))
        except OSError as error:
            raise TemporaryError(f"the ranks of {self.name} cannot be started: {error}") from None
        try:
            self._memory = heartbeat.create(log_dir / progress_file(attempt.index), attempt.num_ranks)
            if attempt.backend == "mpi" and attempt.index:
                # The first host's mpirun has its daemon started here: :meth:`run_daemon`.
                return
            name = f"launcher_{attempt.index}.log" if attempt.index else "launcher.log"
            self._log = open(log_dir / name, "wb")  # noqa: SIM115 -- closed by end()
        except OSError as error:
            raise self._cannot_be_written(log_dir, error) from None
        try:
            self._start_processes(attempt, log_dir)
        except OSError as error:
            raise TemporaryError(f"the ranks of {self.name} cannot be started: {error}") from None

    def _start_processes(self, attempt: Attempt, log_dir: Path) -> None:
        assert self._log is not None
        assert self._scratch is not None
        scratch = self._scratch.path
        worker = [
            *module_command(sys.executable, "mindnlp_dp.launch.processes.worker"),
            attempt.log_dir, str(attempt.num_ranks),
        ]  # fmt: skip
        environ = self._environment(attempt)
        if attempt.backend == "mpi":
            counts = dict(zip(attempt.addresses or ["localhost"], attempt.counts))
            remote_shell = self._remote_shell(scratch) if self._remote_shell is not None else []
            self._processes = start_mpi(
                counts, worker, environ, self._log,
                scratch=scratch, remote_shell=remote_shell, in_place=attempt.in_place,
            )  # fmt: skip
            return
        cluster = Cluster(attempt.num_ranks, (attempt.addresses[0] if attempt.addresses else "127.0.0.1", attempt.port))
        if not attempt.index:
            # The scheduler comes first, because a rank that does not find it sleeps.
            self._processes.append(start_scheduler(cluster, environ, log_dir / "scheduler.log"))
        self._processes += start_cluster(cluster, attempt.ranks, worker, environ, self._log)

    def _environment(self, attempt: Attempt) -> dict[str, str]:
        assert self._scratch is not None
        home = os.path.expanduser("~")
        return {
            # OpenMPI does not start without it: in services of systemd, env -i, and for users without an entry.
            "HOME": home if os.path.isabs(home) else str(self._scratch.path),
            **self._environ,
            **attempt.variables,
            **host_environment(attempt.ranks),
            heartbeat.VARIABLE: progress_file(attempt.index),
            COMMAND_VARIABLE: str(self._scratch.path / _COMMAND_FILE),
            **(self._fork_server.environment if self._fork_server is not None else {}),
        }

    def run_daemon(self, command: str) -> None:
        """Start the daemon that the first host's mpirun needs here; the daemon starts this host's ranks."""
        if self._attempt is None or self._has_ended:
            # The order has come too late.
            return
        if self._log is None or self._log.closed:
            path = Path(self._attempt.log_dir, f"launcher_{self._attempt.index}.log")
            try:
                self._log = open(path, "ab")  # noqa: SIM115 -- closed by end()
            except OSError as error:
                print(f"what mpirun's daemon says is not in {path}: {error}", file=sys.stderr)
                self._log = open(os.devnull, "ab")  # noqa: SIM115 -- closed by end()
        self._daemons.append(start_daemon(command, self._environment(self._attempt), self._log))

    def prepare_restart(self) -> None:
        """Start a fork server, which imports what the next attempt needs while the ranks work."""
        attempt = self._attempt
        if (
            self._fork_server is None
            and VARIABLE not in self._environ
            and attempt is not None
            and default_device(self._environ) == "CPU"
        ):
            try:
                self._fork_server = ForkServer(self._environ, Path(attempt.log_dir))
            except OSError as error:
                print(f"the next attempt has no fork server, and imports as usual: {error}", file=sys.stderr)

    def poll(self) -> HostReport:
        """Return a report on this host's ranks. It is cheap enough for many calls a second."""
        attempt = self._attempt
        if attempt is None:
            return HostReport()
        now, num_known = time.monotonic(), len(self._statuses)
        # Before the statuses: a process that has ended has recorded its status by now, if it ever does.
        working = [process for process in self._processes if not process.serves]
        ended = [ExitedProcess(p.rank, p.popen.returncode) for p in working if p.popen.poll() is not None]
        self._statuses = self._read_statuses()
        # Reading all of a rank's record and its process's state costs more than reading its status.
        if len(self._statuses) != num_known or now - self._looked >= _LOOK_SECONDS or not self._looked:
            self._looked = now
            self._so_far = self._ranks()
            self._states = {n: rank.state for n, rank in self._so_far.items() if rank.pid}
            self._statuses = self._read_statuses()
        stopped, gone = ([n for n, state in self._states.items() if state == which] for which in ("T", ""))
        return HostReport(
            self._so_far, self._statuses, ended, len(ended) == len(working), stopped, gone, self._oom_kills.number
        )

    def _ranks(self) -> dict[int, RankHeartbeat]:
        if self._memory is None or self._attempt is None:
            return {}
        found = heartbeat.parse(self._memory[:])
        return {number: found[number] for number in self._attempt.ranks}

    def _read_statuses(self) -> dict[int, Status]:
        if self._memory is None or self._attempt is None:
            return {}
        return heartbeat.read_statuses(self._memory, self._attempt.ranks)

    def stacks(self) -> dict[int, str]:
        """Return the stacks of those of this host's ranks that answer."""
        return {} if self._attempt is None else stacks_of(self._ranks(), Path(self._attempt.log_dir))

    def tail(self, rank: int) -> str:
        """Return the end of the log of one of this host's ranks."""
        return "" if self._attempt is None else tail(Path(self._attempt.log_dir) / f"worker_{rank}.log")

    def ask_for_checkpoint(self, number: int) -> None:
        """Ask this host's first rank for a checkpoint as soon as possible; requests are numbered from 1."""
        assert self._memory is not None
        heartbeat.ask_for_checkpoint(self._memory, number)

    def end(self) -> None:
        """End this host's ranks; on return none is left, and each has had time to write its status."""
        if self._has_ended:
            return
        grace = grace_seconds(self._environ)
        terminate([*self._processes, *self._daemons], grace, self._loop)
        ranks = {number: rank for number, rank in self._ranks().items() if rank.pid}
        terminate_ranks(list(ranks.values()), GRACE_SECONDS, self._loop)
        statuses = self._read_statuses()
        for number, rank in ranks.items():
            if number not in statuses or statuses[number].exit_code:
                kill_process_group(rank.pid)
        if self._log is not None:
            self._log.close()
        if self._scratch is not None:
            self._scratch.remove()
            self._scratch = None
        self._looked, self._has_ended = 0.0, True

    def leave(self) -> None:
        """End the ranks and the fork server, because the job is over."""
        self.end()
        if self._fork_server is not None:
            self._fork_server.end()
            self._fork_server = None
