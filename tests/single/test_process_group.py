"""Test how the launcher and the backend are detected, and which combinations are refused."""

from __future__ import annotations

import pytest

import mindnlp_dp as dp
from mindnlp_dp.communication import default_group
from mindnlp_dp.communication.backend_selection import check_world_size, choose_backend
from mindnlp_dp.communication.transports.mindspore.collective_calls import CollectiveTimeoutError, TimeoutReportingCalls
from mindnlp_dp.runtime.launch_env import RANK_TABLE, Launch, detect_launch

ALONE, MPIRUN, MSRUN = Launch("none", 1), Launch("mpirun", 2), Launch("msrun", 2)
STALE = {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "4"}


@pytest.fixture
def no_group(monkeypatch):
    monkeypatch.setattr(default_group, "_group", None)


STEP = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_PROCID": "1"}
SRUN, SRUN_MPI, PMIX = Launch("srun", 2), Launch("srun --mpi", 2), Launch("PMIx", None, 1)
TORCHRUN = Launch("torchrun", 2)
ONE_TASK = {**STEP, "SLURM_NTASKS": "1"}
TABLE, BY_TABLE = {"RANK_TABLE_FILE": "/x", "RANK_ID": "3", "DEVICE_ID": "3"}, Launch(RANK_TABLE, 8)


@pytest.mark.parametrize(
    ("environ", "launch"),
    [
        ({}, ALONE),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, MPIRUN),
        ({"PMI_SIZE": "2"}, MPIRUN),
        ({"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "2"}, MSRUN),
        ({"MS_WORKER_NUM": "2"}, ALONE),  # stale: no process was given a role
        ({"OMPI_COMM_WORLD_SIZE": "2", **STALE}, MPIRUN),
        (STEP, SRUN),
        ({**STEP, "SLURM_STEP_ID": ""}, ALONE),  # the shell of sbatch
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, ALONE),
        ({**STEP, "SLURM_NTASKS": "1"}, ALONE),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "1"}, ALONE),  # the shell of salloc: a step of one task in a larger job
        ({**STEP, "PMIX_RANK": "1"}, SRUN_MPI),
        ({**STEP, "PMI_SIZE": "2"}, SRUN_MPI),
        ({**STEP, "PMIX_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, MPIRUN),
        ({**STEP, "PMI_SIZE": "2", "MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "2"}, MSRUN),
        ({"PMIX_RANK": "1"}, PMIX),
        ({"RANK": "1", "WORLD_SIZE": "2"}, TORCHRUN),
        ({"PMI_RANK": "1"}, PMIX),
        ({"MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_RANK": "1"}, MPIRUN),
        ({"RANK": "0", "WORLD_SIZE": "1"}, ALONE),
        ({"RANK": "0", "WORLD_SIZE": ""}, ALONE),
        ({"RANK": "", "WORLD_SIZE": "2"}, ALONE),
        ({"RANK": "1", "WORLD_SIZE": "4", "OMPI_COMM_WORLD_SIZE": "2"}, MPIRUN),
        ({**TABLE, "RANK_SIZE": "8"}, BY_TABLE),
        ({"RANK_ID": "0", "RANK_SIZE": "8"}, BY_TABLE),  # the file's name is removed by MindNLP 0.4's import
        (TABLE, Launch(RANK_TABLE, None, 3)),  # many scripts do not export RANK_SIZE
        ({"MINDSPORE_HCCL_CONFIG_PATH": "/x", "RANK_ID": "0"}, Launch(RANK_TABLE, None, 0)),
        ({**TABLE, "RANK_SIZE": "1"}, ALONE),
        # Each of these alone may be stale.
        ({"RANK_TABLE_FILE": "/x"}, ALONE),
        ({"RANK_TABLE_FILE": "/x", "RANK_SIZE": "8"}, ALONE),
        ({"RANK_ID": "3", "DEVICE_ID": "3"}, ALONE),
        ({"RANK_SIZE": "8"}, ALONE),
        # MindSpore's cluster and our launcher set RANK_ID, too, and so does MindSpore under mpirun.
        ({**TABLE, "RANK_SIZE": "2", "MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "2"}, MSRUN),
        ({**TABLE, "RANK_SIZE": "2", "OMPI_COMM_WORLD_SIZE": "2"}, MPIRUN),
        # In the shell of salloc.
        ({**ONE_TASK, **TABLE, "RANK_SIZE": "8"}, BY_TABLE),
        ({**ONE_TASK, "RANK": "1", "WORLD_SIZE": "2"}, TORCHRUN),
        ({**ONE_TASK, "PMIX_RANK": "0", "PMI_SIZE": "1"}, ALONE),
        # What accelerate launch and deepspeed set beside torchrun's variables.
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "ACCELERATE_USE_DEEPSPEED": "true"}, TORCHRUN),
    ],
)
def test_the_launcher_is_detected_from_environment_variables(environ, launch):
    assert detect_launch(environ) == launch


@pytest.mark.parametrize(
    ("launch", "device", "backend"),
    [
        (ALONE, "CPU", "single"),
        (ALONE, "Ascend", "single"),
        (MPIRUN, "CPU", "mpi"),
        (MPIRUN, "Ascend", "mindspore"),
        (MPIRUN, "GPU", "mindspore"),
        (MSRUN, "CPU", "mindspore"),
        (MSRUN, "Ascend", "mindspore"),
        (SRUN_MPI, "CPU", "mpi"),
        (PMIX, "CPU", "mpi"),
    ],
)
def test_backend_auto_follows_the_launcher_and_the_device(launch, device, backend):
    assert choose_backend("auto", launch, device) == backend


def test_backends_that_contradict_the_launcher_are_refused():
    with pytest.raises(ValueError, match="backend must be one of auto, single, mpi, mindspore, got 'gloo'"):
        choose_backend("gloo", ALONE, "CPU")
    with pytest.raises(ValueError, match="msrun started 2 processes; they would train 2 separate models"):
        choose_backend("single", MSRUN, "CPU")
    with pytest.raises(ValueError, match="started alone; mindnlp-dp run --nproc 2 --backend mpi script.py"):
        choose_backend("mpi", ALONE, "CPU")


@pytest.mark.parametrize("requested", ["auto", "mpi", "mindspore"])
@pytest.mark.parametrize(
    ("launch", "instead"),
    [(SRUN, "srun --mpi=pmix python script.py"), (TORCHRUN, "mindnlp-dp run --nproc 2 script.py")],
)
def test_srun_without_mpi_and_torchrun_are_refused_with_the_command_to_use(requested, launch, instead):
    with pytest.raises(
        ValueError, match=f"{launch.by} started 2 processes, which cannot connect to each other.*; type {instead}"
    ):
        choose_backend(requested, launch, "CPU")


@pytest.mark.parametrize("requested", ["auto", "single", "mpi", "mindspore"])
@pytest.mark.parametrize(("number", "several", "n"), [(8, "8", "8"), (None, "several", "N")])
def test_a_rank_table_is_refused(requested, number, several, n):
    said = (
        f"{RANK_TABLE} started {several} processes, which cannot connect to each other and would train {several} "
        f"separate models; type mindnlp-dp run --nproc {n} script.py, or msrun --worker_num={n} "
        f"--local_worker_num={n} script.py; if this is a single process, and an earlier job left "
        "the variables: unset RANK_ID RANK_SIZE RANK_TABLE_FILE"
    )
    with pytest.raises(ValueError, match=f"^{said} MINDSPORE_HCCL_CONFIG_PATH$"):
        choose_backend(requested, Launch(RANK_TABLE, number), "Ascend")


LOST = """
from mpi4py import MPI
from mindnlp_dp.communication.transports.mpi import faults
from mindnlp_dp.launch.processes.worker import _blames_another_rank
def chained(code):
    try:
        raise MPI.Exception(code)
    except MPI.Exception as error:
        try:
            raise RuntimeError("the update failed") from error
        except RuntimeError as outer:
            return outer
print(*map(_blames_another_rank, (MPI.Exception(MPI.ERR_PROC_FAILED), chained(MPI.ERR_PROC_FAILED_PENDING),
    chained(MPI.ERR_RANK), ValueError("MPI_ERR_PROC_FAILED"), None)))
"""


def test_srun_with_mpi_is_refused_on_devices():
    with pytest.raises(
        ValueError,
        match="own libraries cannot connect processes that are started like this.*launch_msrun_multi_node.sh",
    ):
        choose_backend("auto", SRUN_MPI, "Ascend")


@pytest.mark.parametrize(
    ("launch", "world_size"), [(ALONE, 1), (MPIRUN, 2), (SRUN_MPI, 2), (PMIX, 2), (PMIX, 7), (Launch("PMIx", None), 1)]
)
def test_a_matching_world_size_is_accepted(launch, world_size):
    """This raises nothing; the next test has sizes for which the same call raises."""
    check_world_size(launch, world_size, "mpi")


@pytest.mark.parametrize(("launch", "world_size"), [(MPIRUN, 1), (SRUN_MPI, 1), (PMIX, 1), (SRUN_MPI, 4)])
def test_a_world_size_other_than_that_of_the_launcher_is_refused(launch, world_size):
    with pytest.raises(RuntimeError, match=f"{launch.by} started .*2 processes, but mpi sees {world_size}.*; type "):
        check_world_size(launch, world_size, "mpi")


def test_init_process_group_is_idempotent_until_the_group_is_destroyed(no_group):
    group = dp.init_process_group()
    assert (group.rank, group.world_size, group.local_rank, group.backend, group.is_main) == (0, 1, 0, "single", True)
    assert dp.init_process_group() is group
    assert dp.init_process_group("single") is group
    with pytest.raises(ValueError, match=r"init_process_group\('mpi'\), but the group was started with 'single'"):
        dp.init_process_group("mpi")
    assert dp.get_process_group() is group
    dp.destroy_process_group()
    with pytest.raises(RuntimeError, match=r"no process group; call mindnlp_dp.init_process_group\(\) first"):
        dp.get_process_group()


def test_the_error_for_a_missing_process_group_names_the_launcher(no_group, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="no process group, though mpirun started 2 processes"):
        dp.get_process_group()


@pytest.mark.parametrize(
    ("said", "kind", "message"),
    [
        (
            "AllGather failed.\n\n---- C++ Call Stack",
            CollectiveTimeoutError,
            "rank 1 lost the connection to another rank, 0 s after",
        ),
        ("Allocate memory failed", RuntimeError, "Allocate memory failed"),
    ],
)
def test_a_collective_that_lost_a_rank_raises_a_timeout_error(said, kind, message):
    class Collectives:
        def all_gather(self, x):
            raise RuntimeError(said)

    with pytest.raises(kind, match=message) as caught:
        TimeoutReportingCalls(Collectives(), 1).all_gather(0)
    assert isinstance(caught.value, CollectiveTimeoutError) == (kind is CollectiveTimeoutError)
