"""Read the environment variables of launchers: which one started this process and how many others, its rank and card.

No other module reads these variables. The process group, the patches and the launcher call it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Optional

# Launchers whose processes join through MPI.
MPI_LAUNCHERS = ("mpirun", "srun --mpi", "PMIx")

# MindSpore's older way to start a job on Ascend: a script starts each process, and a file lists their cards.
RANK_TABLE = "a rank table's script"
RANK_TABLE_FILES = ("RANK_TABLE_FILE", "MINDSPORE_HCCL_CONFIG_PATH")


@dataclass(frozen=True)
class Launch:
    """The launcher that started this process, and the number of processes that it started.

    Attributes:
        by: name of the launcher; ``"none"`` if this process was started alone.
        world_size: number of processes as the launcher gives it; None if it does not.
        rank: this process's rank, if the launcher does not give the number of processes; 0 otherwise.
    """

    by: str
    world_size: Optional[int]
    rank: int = 0

    @property
    def num_known(self) -> int:
        """Return how many processes there are at least."""
        return self.rank + 1 if self.world_size is None else self.world_size


def detect_launch(environ: Mapping[str, str]) -> Launch:
    """Return the launcher that the environment variables describe.

    OpenMPI's ``mpirun`` is checked first: it sets its variables for each process, whereas
    ``MS_*`` may be left over in a shell. ``msrun``, and ``mindnlp-dp run --backend mindspore``,
    start MindSpore's dynamic cluster, which needs ``MS_ROLE``; its processes may themselves be
    started by one of the launchers that are checked later. A rank table counts only for a process
    with a RANK_ID, and with a RANK_SIZE above 1 or the table's file; each of them alone may be left over.
    """
    if "OMPI_COMM_WORLD_SIZE" in environ:
        return Launch("mpirun", int(environ["OMPI_COMM_WORLD_SIZE"]))
    if "MS_ROLE" in environ and "MS_WORKER_NUM" in environ:
        return Launch("msrun", int(environ["MS_WORKER_NUM"]))
    # The shell of sbatch has Slurm's variables as well, but no step: it is a single process.
    if environ.get("SLURM_STEP_ID"):
        num_tasks = int(environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", "1")))
        if num_tasks > 1:
            return Launch("srun --mpi" if "PMIX_RANK" in environ or "PMI_SIZE" in environ else "srun", num_tasks)
        # In the shell of a step of one task (srun --pty bash), only a launcher without MPI can have started others.
        return _launch_without_mpi(environ)
    for name in ("PMI_SIZE", "MV2_COMM_WORLD_SIZE"):
        if name in environ:
            return Launch("mpirun", int(environ[name]))
    for name in ("PMIX_RANK", "PMI_RANK"):
        if name in environ:
            return Launch("PMIx", None, int(environ[name]))
    return _launch_without_mpi(environ)


def _launch_without_mpi(environ: Mapping[str, str]) -> Launch:
    """Return the launch by torchrun (also of accelerate and deepspeed, which set its variables) or by a rank table."""
    if environ.get("RANK") and environ.get("WORLD_SIZE") not in (None, "", "1"):
        return Launch("torchrun", int(environ["WORLD_SIZE"]))
    rank, size = environ.get("RANK_ID", ""), environ.get("RANK_SIZE", "")
    if rank.isdecimal() and size.isdecimal() and int(size) > 1:
        return Launch(RANK_TABLE, int(size))
    if rank.isdecimal() and not size and any(environ.get(name) for name in RANK_TABLE_FILES):
        return Launch(RANK_TABLE, None, int(rank))
    return Launch("none", 1)


def card_of_this_process(environ: Mapping[str, str]) -> Optional[int]:
    """Return the card, counted from 0 on this host, that the launcher chose for this process; None if it chose none.

    DEVICE_ID alone may be left over in a shell, so it counts only with MS_ROLE.
    """
    if "OMPI_COMM_WORLD_LOCAL_RANK" in environ:
        return int(environ["OMPI_COMM_WORLD_LOCAL_RANK"])
    return int(environ["DEVICE_ID"]) if "MS_ROLE" in environ and "DEVICE_ID" in environ else None


# The names that Kubernetes' Indexed Job, Volcano, the Ascend operator and Slurm use for a host's number.
_NODE_RANKS = ("JOB_COMPLETION_INDEX", "VC_TASK_INDEX", "MS_NODE_RANK", "SLURM_NODEID")


def node_rank_of(environ: Mapping[str, str]) -> Optional[int]:
    """Return the number, from 0, of this host in its job; None if no variable has it."""
    for name in _NODE_RANKS:
        if environ.get(name, "").isdecimal():
            return int(environ[name])
    return None


def launched_rank(environ: Mapping[str, str], default: Optional[int] = None) -> int:
    """Return the rank that the launcher gave to this process, or ``default`` if there is none and it is given."""
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "MS_NODE_ID"):
        if environ.get(name, "").isdecimal():
            return int(environ[name])
    if default is not None:
        return default
    raise KeyError("this process has no rank; it is started by `mindnlp-dp run`")
