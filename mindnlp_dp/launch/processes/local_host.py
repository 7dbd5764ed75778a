"""Start, monitor and end the ranks of one host.

Each launcher of a job has a :class:`LocalHost`, which starts its ranks of an attempt and, when polled, reports their
progress and how they ended (:mod:`mindnlp_dp.launch.processes.attempt`). The first host's launcher also has a proxy for
each other host, with the same methods (:class:`~mindnlp_dp.launch.rendezvous.remote_host.RemoteHost`).

What the launcher and its ranks share is in a folder in memory that only their user can open: the script's command, the
ranks' heartbeats, and the files of MPI.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO, Optional

from mindnlp_dp.launch.errors import TemporaryError
from mindnlp_dp.launch.event_loop import EventLoop
from mindnlp_dp.launch.log_dir import cannot_be_written, join_attempt, open_log
from mindnlp_dp.launch.processes import reaper
from mindnlp_dp.launch.processes.attempt import Attempt, HostReport
from mindnlp_dp.launch.processes.exit_status import ExitedProcess, tail
from mindnlp_dp.launch.processes.oom_kills import OomKills
from mindnlp_dp.launch.processes.run_module import PYTHON_VARIABLE
from mindnlp_dp.launch.processes.run_module import command as module_command
from mindnlp_dp.launch.processes.spawn import (
    GRACE_SECONDS,
    Process,
    grace_seconds,
    start_cluster,
    start_daemon,
    start_mpi,
    terminate,
)
from mindnlp_dp.launch.processes.stack_dumps import stacks_of
from mindnlp_dp.launch.processes.worker import COMMAND_FILE, HEARTBEATS_FILE
from mindnlp_dp.runtime import heartbeat
from mindnlp_dp.runtime.heartbeat import RankHeartbeat
from mindnlp_dp.runtime.job_context import host_environment
from mindnlp_dp.runtime.scratch_dir import ScratchDir

# How often the states of the ranks' processes are read.
_STATE_SECONDS = 0.5

# How long processes that a script has started may take to end by themselves after it, as those of Python's pools do.
_LEFT_SECONDS = 0.5


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

    lost = address = ""
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
        self.name, self.slots = os.uname().nodename, slots
        self._environ = dict(environ)
        self._processes: list[Process] = []
        self._daemons: list[Process] = []
        self._attempt: Optional[Attempt] = None
        self._log: Optional[BinaryIO] = None
        self._scratch: Optional[ScratchDir] = None
        self._watchdog: Optional[reaper.Watchdog] = None
        # What this process has started for other purposes.
        self._others = reaper.children_of_this_process()
        self._oom_kills = OomKills()
        # The heartbeats of the attempt's ranks.
        self._memory: Optional[mmap.mmap] = None
        self._states, self._read_states = dict[int, str](), 0.0
        self._has_ended = True

    @property
    def number(self) -> int:
        """Return the number of the attempt whose ranks run here; -1 without ranks."""
        return -1 if self._attempt is None or self._has_ended else self._attempt.number

    def start(self, attempt: Attempt) -> None:
        """Start this host's ranks of an attempt.

        Raises:
            LaunchError: the engine is not installed, or the log folder is another user's.
            TemporaryError: the log folder cannot be written to, or the engine cannot be started now.
        """
        log_dir = Path(attempt.log_dir)
        if attempt.index:
            join_attempt(log_dir)
        self._attempt, self._processes, self._daemons, self._has_ended = attempt, [], [], False
        self._memory, self._oom_kills, self._states, self._read_states = None, OomKills(), {}, 0.0
        try:
            # For what mpirun, or its daemon, prints.
            self._log = open_log(log_dir / (f"launcher_{attempt.index}.log" if attempt.index else "launcher.log"))
        except OSError as error:
            raise cannot_be_written(log_dir, error) from None
        try:
            scratch = self._share(attempt)
            if attempt.backend != "mpi" or not attempt.index:
                # On other hosts, the first one's mpirun has its daemon started: :meth:`run_daemon`.
                self._start_processes(attempt, scratch)
        except OSError as error:
            raise TemporaryError(f"the ranks of {self.name} cannot be started: {error}") from None

    def _share(self, attempt: Attempt) -> Path:
        """Write what the ranks read to this launcher's own folder, and return the folder."""
        self._scratch = ScratchDir("job")
        folder = self._scratch.path
        self._watchdog = reaper.Watchdog(str(folder), grace_seconds(self._environ))
        # Not as arguments, because mpirun would read some of the script's words as its own.
        (folder / COMMAND_FILE).write_text(json.dumps(attempt.command))
        self._memory = heartbeat.create(folder / HEARTBEATS_FILE, attempt.num_ranks)
        return folder

    def _start_processes(self, attempt: Attempt, scratch: Path) -> None:
        assert self._log is not None
        environ = self._environment(attempt, scratch)
        worker = [
            *module_command("mindnlp_dp.launch.processes.worker", environ.get(PYTHON_VARIABLE) or sys.executable),
            attempt.log_dir, str(attempt.num_ranks),
        ]  # fmt: skip
        if attempt.backend == "mpi":
            counts = dict(zip(attempt.addresses or ["localhost"], attempt.counts))
            remote_shell = self._remote_shell(scratch) if self._remote_shell is not None else []
            self._processes = start_mpi(counts, worker, environ, self._log, scratch=scratch, remote_shell=remote_shell)
        else:
            self._processes = start_cluster(attempt, worker, environ, self._log)

    def _environment(self, attempt: Attempt, scratch: Path) -> dict[str, str]:
        home = os.path.expanduser("~")
        return {
            # OpenMPI does not start without it: in services of systemd, env -i, and for users without an entry.
            "HOME": home if os.path.isabs(home) else str(scratch),
            **self._environ,
            **attempt.variables,
            **host_environment(attempt.ranks),
            reaper.VARIABLE: str(scratch),
        }

    def run_daemon(self, command: str) -> None:
        """Start the daemon that the first host's mpirun needs here; the daemon starts this host's ranks."""
        if self._attempt is None or self._has_ended or self._scratch is None or self._log is None:
            # The order has come too late.
            return
        environ = self._environment(self._attempt, self._scratch.path)
        self._daemons.append(start_daemon(command, environ, self._log))

    def poll(self) -> HostReport:
        """Return a report on this host's ranks. It is cheap enough for many calls per second."""
        if self._attempt is None:
            return HostReport()
        # Before the heartbeats: a process that has ended has recorded its end by now, if it ever does.
        working = [process for process in self._processes if not process.serves]
        ended = [ExitedProcess(p.rank, p.popen.returncode) for p in working if p.popen.poll() is not None]
        ranks = self._ranks()
        if time.monotonic() - self._read_states >= _STATE_SECONDS:
            self._read_states = time.monotonic()
            self._states = {n: rank.state for n, rank in ranks.items() if rank.pid}
            ranks = self._ranks()
        stopped, gone = ([n for n, state in self._states.items() if state == which] for which in ("T", ""))
        return HostReport(ranks, ended, len(ended) == len(working), stopped, gone, self._oom_kills.number)

    def _ranks(self) -> dict[int, RankHeartbeat]:
        if self._memory is None or self._attempt is None:
            return {}
        found = heartbeat.read(self._memory)
        return {number: found[number] for number in self._attempt.ranks}

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
        """End this host's ranks and all that they have started; each rank has had time to record its end."""
        if self._has_ended:
            return
        terminate([*self._processes, *self._daemons], grace_seconds(self._environ), self._loop)
        # Ranks are children of mpirun, which may have been killed.
        self._loop.run_until(lambda: not self._left(), _LEFT_SECONDS)
        if left := self._left():
            names = ", ".join(f"{name} ({pid})" for pid, name in sorted(left.items()))
            if all(rank.exit_code == 0 for rank in self._ranks().values()):
                print(f"processes that the script has started still run, and are ended: {names}", file=sys.stderr)
            for number in (signal.SIGTERM, signal.SIGKILL):
                reaper.send(number, self._left())
                self._loop.run_until(lambda: not self._left(), GRACE_SECONDS)
        if self._log is not None:
            self._log.close()
        self._read_states, self._has_ended = 0.0, True
        # A second signal may interrupt this; then the watchdog removes the folder.
        watchdog, scratch, self._watchdog, self._scratch = self._watchdog, self._scratch, None, None
        if watchdog is not None:
            watchdog.dismiss()
        if scratch is not None:
            scratch.remove()

    def _left(self) -> dict[int, str]:
        """Return the processes of the job that still run on this host."""
        if self._scratch is None:
            return {}
        others = {*self._others, *([self._watchdog.pid] if self._watchdog is not None else [])}
        ranks = {rank.pid: f"rank {number}" for number, rank in self._ranks().items() if rank.state}
        return {**reaper.processes_of(str(self._scratch.path), reaper.launcher(), others), **ranks}
