"""Who launched us, and by which library the processes will talk.

Goes in: the environment that a launcher left, and the device. Comes out: a
backend. This is the one module outside ``launch/`` that asks who launched us.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .backends.base import Backend, SingleProcessBackend

BACKENDS = ("auto", "single", "mpi", "mindspore")


@dataclass(frozen=True)
class Launch:
    """Who started this process: ``"mpirun"``, ``"msrun"`` or ``"none"``, with how many."""

    by: str
    world_size: int


def detect_launch(environ: Mapping[str, str]) -> Launch:
    """Read the launcher's variables.

    ``mpirun`` comes first: it sets its variables for each process, whereas ``MS_*``
    may be left over in a shell. ``msrun``, and ``mindnlp-dp run --backend mindspore``,
    start MindSpore's dynamic cluster, which wants ``MS_ROLE``.
    """
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if name in environ:
            return Launch("mpirun", int(environ[name]))
    if "MS_ROLE" in environ and "MS_WORKER_NUM" in environ:
        return Launch("msrun", int(environ["MS_WORKER_NUM"]))
    return Launch("none", 1)


def choose_backend(requested: str, launch: Launch, device: str) -> str:
    """Resolve ``"auto"``: MPI under mpirun on CPU, MindSpore under msrun or on a device, single when alone."""
    if requested not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {requested!r}")
    if requested == "auto":
        if launch.by == "none":
            return "single"
        return "mpi" if launch.by == "mpirun" and device == "CPU" else "mindspore"
    if requested == "single" and launch.world_size > 1:
        raise ValueError(
            f"backend='single', but {launch.by} started {launch.world_size} processes; they would train "
            f"{launch.world_size} separate models. Use backend='auto', or start one process"
        )
    if requested != "single" and launch.by == "none":
        raise ValueError(
            f"backend={requested!r} needs a launcher, and this process was started alone; "
            f"mindnlp-dp run --nproc 2 --backend {requested} script.py"
        )
    return requested


def make_backend(kind: str) -> Backend:
    """Meet the other processes by the library that :func:`choose_backend` chose."""
    if kind == "single":
        return SingleProcessBackend()
    if kind == "mpi":
        from .backends.mpi import MPIBackend

        return MPIBackend()
    from .backends.mindspore import MindSporeBackend

    return MindSporeBackend()
