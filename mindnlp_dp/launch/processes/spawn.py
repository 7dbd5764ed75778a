"""Start the processes of a job on this host, by mpirun or as MindSpore's cluster, and end them.

:class:`~mindnlp_dp.launch.processes.local_host.LocalHost` calls it, and monitors the processes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Optional

from mindnlp_dp.launch.errors import LaunchError
from mindnlp_dp.launch.event_loop import EventLoop
from mindnlp_dp.launch.log_dir import open_log
from mindnlp_dp.launch.processes.attempt import Attempt
from mindnlp_dp.launch.processes.environment import clean_environment, cluster_environment, find_mpirun
from mindnlp_dp.launch.processes.run_module import PYTHON_VARIABLE
from mindnlp_dp.launch.processes.run_module import command as module_command
from mindnlp_dp.runtime.devices import default_device

GRACE_SECONDS = 3.0

# HCCL and NCCL close their links to other cards at exit; a killed rank may leave its card unusable for a while.
DEVICE_GRACE_SECONDS = 20.0


@dataclass(frozen=True)
class Process:
    """A process that was started; one that only ``serves`` others, such as a scheduler, does not end the job."""

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
) -> list[Process]:
    """Start mpirun on the first host, for the ranks of all hosts.

    Args:
        counts: number of ranks on each host, by its address; for a single host the address does not matter.
        scratch: folder of this host for the files that MPI keeps while it runs.
        remote_shell: with several hosts: command that mpirun calls like ssh.
    """
    mpirun = find_mpirun()
    if mpirun is None:
        raise LaunchError('mpirun was not found; pip install "mindnlp-dp[mpi]", or use --backend mindspore')
    # Ranks bind themselves to their cores, the same way under every backend.
    options = ["-n", str(sum(counts.values())), "--bind-to", "none"]
    if os.geteuid() == 0:
        options.append("--allow-run-as-root")
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
    # Otherwise OpenMPI 5 searches for other transports, and sleeps a second in MPI_Init meanwhile. Ranks of one host do
    # not listen on a network, because MPI does not authenticate its connections (docs/clusters.md).
    environment.setdefault("OMPI_MCA_btl", "self,sm,tcp" if len(counts) > 1 else "self,sm")
    # OpenMPI's own handlers of SIGSEGV and the like replace faulthandler's, and print C frames of the interpreter only.
    environment.setdefault("OMPI_MCA_opal_signal", "")
    return [Process(_popen([mpirun, *options, *worker], environment, log), None)]


def start_cluster(attempt: Attempt, worker: list[str], environ: dict[str, str], log: BinaryIO) -> list[Process]:
    """Start this host's workers of MindSpore's dynamic cluster and, on the first host, the scheduler of the cluster."""
    scheduler = attempt.addresses[0] if attempt.addresses else "127.0.0.1", attempt.port
    processes = []
    if not attempt.index:
        # It comes first, because a rank that does not find it sleeps.
        module = "mindnlp_dp.communication.transports.mindspore.scheduler"
        command = module_command(module, environ.get(PYTHON_VARIABLE) or sys.executable)
        environment = cluster_environment(environ, "MS_SCHED", attempt.num_ranks, scheduler)
        with open_log(Path(attempt.log_dir, "scheduler.log")) as scheduler_log:
            processes.append(Process(_popen(command, environment, scheduler_log), None, serves=True))
    for local_rank, rank in enumerate(attempt.ranks):
        environment = cluster_environment(environ, "MS_WORKER", attempt.num_ranks, scheduler, (rank, local_rank))
        processes.append(Process(_popen(worker, environment, log), rank))
    return processes


def start_daemon(command: str, environ: dict[str, str], log: BinaryIO) -> Process:
    """Start the daemon of the first host's mpirun on this host; ``command`` is a line for a shell."""
    return Process(_popen(["/bin/sh", "-c", command], clean_environment(environ), log), None, serves=True)


def _popen(command: list[str], environment: dict[str, str], log: BinaryIO) -> subprocess.Popen[bytes]:
    # In a new session, so that Ctrl-C reaches only the launcher, which then ends every rank.
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
    )


def grace_seconds(environ: Mapping[str, str]) -> float:
    """Return how many seconds ranks may take to end when they are asked to."""
    return GRACE_SECONDS if default_device(environ) == "CPU" else DEVICE_GRACE_SECONDS


def terminate(processes: Sequence[Process], grace: float, loop: EventLoop) -> None:
    """End the processes that still run, by SIGTERM and, after a grace period, by SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            # The group may have no process of this user any more.
            if process.popen.poll() is None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.popen.pid, number)
        loop.run_until(lambda: all(process.popen.poll() is not None for process in processes), grace)
