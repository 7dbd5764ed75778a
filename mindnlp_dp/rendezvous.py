"""Who launched us, and by which library the processes will talk.

Goes in: the environment that a launcher left, and the device. Comes out: a
backend. This is the one module outside ``launch/`` that asks who launched us.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Optional

from .backends.base import Backend, SingleProcessBackend

BACKENDS = ("auto", "single", "mpi", "mindspore")
# Launchers whose processes meet by MPI.
_MPI_LAUNCHERS = ("mpirun", "srun --mpi", "PMIx")
# Launchers whose processes have nothing to meet by, and what to type instead.
_CANNOT_MEET = {
    "srun": "srun --mpi=pmix python script.py, or, in the script of sbatch, mpirun -n {n} python script.py",
    "torchrun": "mindnlp-dp run --nproc {n} script.py",
}


@dataclass(frozen=True)
class Launch:
    """Who started this process, with how many.

    Attributes:
        by: the launcher; ``"none"`` where this process was started alone.
        world_size: how many processes the launcher says that it started; None where it does not say.
        rank: what a launcher that does not say how many calls this process; 0 otherwise.
    """

    by: str
    world_size: Optional[int]
    rank: int = 0

    @property
    def num_known(self) -> int:
        """How many processes there are at least."""
        return self.rank + 1 if self.world_size is None else self.world_size


def detect_launch(environ: Mapping[str, str]) -> Launch:
    """Read the launcher's variables.

    OpenMPI's ``mpirun`` comes first: it sets its variables for each process, whereas ``MS_*``
    may be left over in a shell. ``msrun``, and ``mindnlp-dp run --backend mindspore``,
    start MindSpore's dynamic cluster, which wants ``MS_ROLE``; its processes may themselves be
    started by one of those that follow.
    """
    if "OMPI_COMM_WORLD_SIZE" in environ:
        return Launch("mpirun", int(environ["OMPI_COMM_WORLD_SIZE"]))
    if "MS_ROLE" in environ and "MS_WORKER_NUM" in environ:
        return Launch("msrun", int(environ["MS_WORKER_NUM"]))
    # The shell of sbatch has these as well, but no step: it is one process.
    if environ.get("SLURM_STEP_ID"):
        num_tasks = int(environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", "1")))
        if num_tasks > 1:
            return Launch("srun --mpi" if "PMIX_RANK" in environ or "PMI_SIZE" in environ else "srun", num_tasks)
        return Launch("none", 1)
    for name in ("PMI_SIZE", "MV2_COMM_WORLD_SIZE"):
        if name in environ:
            return Launch("mpirun", int(environ[name]))
    for name in ("PMIX_RANK", "PMI_RANK"):
        if name in environ:
            return Launch("PMIx", None, int(environ[name]))
    if environ.get("RANK") and environ.get("WORLD_SIZE") not in (None, "", "1"):
        return Launch("torchrun", int(environ["WORLD_SIZE"]))
    return Launch("none", 1)


def card_of_this_process(environ: Mapping[str, str]) -> Optional[int]:
    """The card, counted from 0 on this host, that the launcher meant for this process; None where it did not say.

    DEVICE_ID may be left over where no process was given a role.
    """
    if "OMPI_COMM_WORLD_LOCAL_RANK" in environ:
        return int(environ["OMPI_COMM_WORLD_LOCAL_RANK"])
    return int(environ["DEVICE_ID"]) if "MS_ROLE" in environ and "DEVICE_ID" in environ else None


def choose_backend(requested: str, launch: Launch, device: str) -> str:
    """Resolve ``"auto"``: MPI under mpirun on CPU, MindSpore under msrun or on a device, single when alone.

    Raises:
        ValueError: ``requested`` contradicts the launcher, or the processes that it started cannot meet.
    """
    if requested not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {requested!r}")
    if requested == "single" and launch.num_known > 1:
        raise ValueError(
            f"backend='single', but {launch.by} started {launch.num_known} processes; they would train "
            f"{launch.num_known} separate models. Use backend='auto', or start one process"
        )
    if launch.by in _CANNOT_MEET:
        raise ValueError(
            f"{launch.by} started {launch.num_known} processes, which cannot meet and would train {launch.num_known} "
            f"separate models; type {_CANNOT_MEET[launch.by].format(n=launch.num_known)}"
        )
    if requested not in ("auto", "single") and launch.by == "none":
        raise ValueError(
            f"backend={requested!r} needs a launcher, and this process was started alone; "
            f"mindnlp-dp run --nproc 2 --backend {requested} script.py"
        )
    if requested == "auto":
        if launch.by == "none":
            return "single"
        requested = "mpi" if launch.by in _MPI_LAUNCHERS and device == "CPU" else "mindspore"
    if requested == "mindspore" and launch.by in _MPI_LAUNCHERS and launch.by != "mpirun":
        raise ValueError(
            f"{launch.by} started this process, and MindSpore's own libraries do not meet that way; type, on each "
            f"host, MASTER_ADDR=... NNODES=... NODE_RANK=... DEVICE={device} "
            "bash scripts/launch_msrun_multi_node.sh script.py"
        )
    return requested


def make_backend(kind: str, launch: Launch) -> Backend:
    """Meet the other processes by the library that :func:`choose_backend` chose.

    Raises:
        RuntimeError: the library sees another number of processes than the launcher started.
    """
    if kind == "single":
        return SingleProcessBackend()
    backend = _meet(kind)
    check_world_size(launch, backend.world_size, backend.name)
    return backend


def check_world_size(launch: Launch, world_size: int, library: str) -> None:
    """Raise RuntimeError unless ``library`` sees the processes that the launcher started."""
    if launch.rank < world_size and launch.world_size in (None, world_size):
        return
    started = f"{launch.num_known} processes" if launch.world_size else f"at least {launch.num_known} processes"
    raise RuntimeError(
        f"{launch.by} started {started}, but {library} sees {world_size}, so that they would train separate models: "
        "the launcher and mpi4py belong to different MPI libraries, or do not know each other; type "
        f"mindnlp-dp run --nproc {launch.num_known} script.py, or, under Slurm, srun --mpi=pmix python script.py"
    )


def _meet(kind: str) -> Backend:
    if kind == "mpi":
        from .backends.mpi import MPIBackend

        return MPIBackend()
    from .backends.mindspore import MindSporeBackend

    return MindSporeBackend()
