"""How an engine starts a job's processes on this host, and how they are ended.

Goes in: a command, a number, an environment. Comes out: processes to watch.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Optional

from mindnlp_dp.runtime.progress import Progress

from .environment import clean_environment, cluster_environment, find_mpirun
from .run_module import command as module_command

POLL_SECONDS = 0.05
GRACE_SECONDS = 3.0
# HCCL and NCCL close their links to other cards; one that is killed may leave its card unusable for a while.
DEVICE_GRACE_SECONDS = 20.0
# Loaded here, for little is safe between fork and exec. The number is Linux's (prctl(2)).
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


class LaunchError(Exception):
    """The job cannot be started as asked: the command line is wrong, or something has to be installed."""

    exit_code = 2


class TemporaryError(LaunchError):
    """The job cannot be started now; the same command may work another time: a disk is full, a port is taken."""

    # EX_TEMPFAIL of sysexits.h. Who starts jobs would not try again after 2.
    exit_code = 75


class NotMetError(TemporaryError):
    """The job's hosts have not met."""


@dataclass(frozen=True)
class Process:
    """One that was started; those that only serve the others, such as a scheduler, do not end the job."""

    popen: subprocess.Popen[bytes]
    rank: Optional[int]
    serves: bool = False


def start_mpi(
    counts: Mapping[str, int],
    worker: list[str],
    environ: dict[str, str],
    log: BinaryIO,
    *,
    scratch: Path,
    remote_shell: Sequence[str],
    in_place: bool = False,
) -> list[Process]:
    """mpirun on the first host, for all of them.

    Args:
        counts: ranks on each host by its address; of one host the address does not matter.
        scratch: a folder of this host for what MPI keeps while it runs.
        remote_shell: with several hosts, a command that is called as ssh is.
        in_place: a rank that is lost is not the end of the others, which are told of it.
    """
    mpirun = find_mpirun()
    if mpirun is None:
        raise LaunchError('mpirun was not found; pip install "mindnlp-dp[mpi]", or use --backend mindspore')
    # Ranks bind themselves to their cores, the same way under every backend.
    options = ["-n", str(sum(counts.values())), "--bind-to", "none"]
    if os.geteuid() == 0:
        options.append("--allow-run-as-root")
    if in_place:
        options += ["--with-ft", "ulfm"]
    environment = clean_environment(environ)
    environment.setdefault("PRTE_MCA_prte_local_tmpdir_base", str(scratch))
    if len(counts) > 1:
        if ipv6 := [address for address in counts if ":" in address]:
            raise LaunchError(
                f"mpirun does not take IPv6 addresses ({', '.join(ipv6)}): give the endpoint by an IPv4 address, or by "
                "a name that has one, or use --backend mindspore"
            )
        hosts = ",".join(f"{address}:{count}" for address, count in counts.items())
        options += ["--host", hosts, "--prtemca", "plm_ssh_agent", " ".join(remote_shell), "--map-by", "slot"]
        environment.setdefault("OMPI_MCA_pml", "ob1")
    else:
        options.append("--oversubscribe")
        environment.setdefault("OMPI_MCA_btl_sm_backing_directory", str(scratch))
    # OpenMPI 5 else looks for other ways to reach a neighbour, and sleeps a second in MPI_Init meanwhile. Ranks of one
    # host listen on no network: MPI's connections check nobody (docs/launching.md).
    environment.setdefault("OMPI_MCA_btl", "self,sm,tcp" if len(counts) > 1 else "self,sm")
    return [Process(_popen([mpirun, *options, *worker], environment, log), None)]


@dataclass(frozen=True)
class Cluster:
    """MindSpore's, of so many workers, which meet at an address and port."""

    num_workers: int
    scheduler: tuple[str, int]


def start_cluster(
    cluster: Cluster, ranks: range, worker: list[str], environ: dict[str, str], log: BinaryIO
) -> list[Process]:
    """Its workers of these ranks, which are this host's."""
    processes = []
    for local_rank, rank in enumerate(ranks):
        environment = cluster_environment(
            environ, "MS_WORKER", cluster.num_workers, cluster.scheduler, (rank, local_rank)
        )
        processes.append(Process(_popen(worker, environment, log), rank))
    return processes


def start_scheduler(cluster: Cluster, environ: dict[str, str], log_file: Path) -> Process:
    """Where its workers meet, on this host."""
    scheduler = "mindnlp_dp.communication.transports.mindspore_scheduler"
    command = [*module_command(sys.executable, "mindnlp_dp.launch.fork_client"), scheduler]
    environment = cluster_environment(environ, "MS_SCHED", cluster.num_workers, cluster.scheduler)
    with open(log_file, "wb") as log:
        return Process(_popen(command, environment, log), None, serves=True)


def start_daemon(command: str, environ: dict[str, str], log: BinaryIO) -> Process:
    """What the first host's mpirun wants to have on this one: its own daemon, by a line for a shell."""
    return Process(_popen(["/bin/sh", "-c", command], clean_environment(environ), log), None, serves=True)


def _popen(command: list[str], environment: dict[str, str], log: BinaryIO) -> subprocess.Popen[bytes]:
    launcher = os.getpid()

    def begin() -> None:
        # What a shell script has in its background ignores SIGINT; ranks do not, whoever starts them.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        end_with_the_parent(launcher)

    # A session of its own: Ctrl-C reaches the launcher alone, which then ends every rank.
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        preexec_fn=begin,  # noqa: PLW1509 -- the launcher has no threads
    )


def end_with_the_parent(parent: int, number: int = signal.SIGTERM) -> None:
    """Ask Linux to end this process when its parent does, which may be killed without a chance to do it."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        # It was killed before it was asked.
        os._exit(1)


def grace_seconds(environ: Mapping[str, str]) -> float:
    """How long ranks may take to end when they are asked to."""
    return GRACE_SECONDS if environ.get("DEVICE_TARGET", "CPU") == "CPU" else DEVICE_GRACE_SECONDS


def end(processes: list[Process], grace: float, sleep: Callable[[float], None] = time.sleep) -> None:
    """End what still runs: politely, then, after a grace period, for good."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            if process.popen.poll() is None:
                _signal_session(process.popen.pid, number)
        deadline = time.monotonic() + grace
        while any(p.popen.poll() is None for p in processes) and time.monotonic() < deadline:
            sleep(POLL_SECONDS)
    for process in processes:
        if process.popen.returncode:
            end_what_is_left_of(process.popen.pid)


def end_what_is_left_of(pid: int) -> None:
    """What a process that failed has started, and that has survived it: its group, where it had one of its own."""
    # A process of that number would be somebody else's.
    if not os.path.exists(f"/proc/{pid}"):
        _signal_session(pid, signal.SIGKILL)


def end_ranks(ranks: Sequence[Progress], grace: float, sleep: Callable[[float], None] = time.sleep) -> None:
    """See to it that ranks, which may be another launcher's children, have ended when this returns."""
    deadline = time.monotonic() + grace
    while (left := [rank for rank in ranks if rank.state]) and time.monotonic() < deadline:
        sleep(POLL_SECONDS / 5)
    for rank in left:
        try:
            os.kill(rank.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def _signal_session(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        # There is none of ours any more.
        pass
