"""This module chooses the library by which the processes of a job connect, and creates its transport.

:func:`~mindnlp_dp.init_process_group` calls it with the launcher (:mod:`mindnlp_dp.runtime.launch_env`) and the device.
"""

from __future__ import annotations

from mindnlp_dp.communication.transports.single import SingleProcessTransport
from mindnlp_dp.communication.transports.transport import Transport
from mindnlp_dp.runtime.launch_env import MPI_LAUNCHERS, RANK_TABLE, RANK_TABLE_FILES, Launch

BACKENDS = ("auto", "single", "mpi", "mindspore")

# Launchers whose processes have no way to connect, and the command to type instead.
_CANNOT_MEET = {
    "srun": "srun --mpi=pmix python script.py, or, in the script of sbatch, mpirun -n {n} python script.py",
    "torchrun": "mindnlp-dp run --nproc {n} script.py",
    RANK_TABLE: "mindnlp-dp run --nproc {n} script.py, or msrun --worker_num={n} --local_worker_num={n} script.py; if "
    "this is a single process, and an earlier job left the variables: unset RANK_ID RANK_SIZE "
    f"{' '.join(RANK_TABLE_FILES)}",
}


def choose_backend(requested: str, launch: Launch, device: str) -> str:
    """Resolve ``"auto"``: MPI under mpirun on CPU, MindSpore under msrun or on a device, single without a launcher.

    Raises:
        ValueError: ``requested`` contradicts the launcher, or the processes that it started cannot connect.
    """
    if requested not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {requested!r}")
    if launch.by in _CANNOT_MEET:
        several = "several" if launch.world_size is None else str(launch.world_size)
        instead = _CANNOT_MEET[launch.by].format(n="N" if launch.world_size is None else launch.world_size)
        raise ValueError(
            f"{launch.by} started {several} processes, which cannot connect to each other and would "
            f"train {several} separate models; "
            f"type {instead}"
        )
    if requested == "single" and launch.num_known > 1:
        raise ValueError(
            f"backend='single', but {launch.by} started {launch.num_known} processes; they would train "
            f"{launch.num_known} separate models. Use backend='auto', or start one process"
        )
    if requested not in ("auto", "single") and launch.by == "none":
        raise ValueError(
            f"backend={requested!r} needs a launcher, and this process was started alone; "
            f"mindnlp-dp run --nproc 2 --backend {requested} script.py"
        )
    if requested == "auto":
        if launch.by == "none":
            return "single"
        requested = "mpi" if launch.by in MPI_LAUNCHERS and device == "CPU" else "mindspore"
    if requested == "mindspore" and launch.by in MPI_LAUNCHERS and launch.by != "mpirun":
        raise ValueError(
            f"{launch.by} started this process, and MindSpore's own libraries cannot connect "
            "processes that are started like this; type, on each "
            f"host, MASTER_ADDR=... NNODES=... NODE_RANK=... DEVICE={device} "
            "bash scripts/launch_msrun_multi_node.sh script.py"
        )
    return requested


def connect(kind: str, launch: Launch) -> Transport:
    """Join the other processes by the library that :func:`choose_backend` chose, and return the transport.

    Raises:
        RuntimeError: the library sees a different number of processes than the launcher started.
    """
    if kind == "single":
        return SingleProcessTransport()
    transport = _transport(kind)
    check_world_size(launch, transport.world_size, transport.name)
    return transport


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


def _transport(kind: str) -> Transport:
    if kind == "mpi":
        from mindnlp_dp.communication.transports.mpi.mpi_transport import MPITransport

        return MPITransport()
    from mindnlp_dp.communication.transports.mindspore.mindspore_transport import MindSporeTransport

    return MindSporeTransport()
