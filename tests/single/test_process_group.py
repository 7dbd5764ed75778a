from __future__ import annotations

import pytest

import mindnlp_dp as dp
from mindnlp_dp import process_group
from mindnlp_dp.rendezvous import Launch, choose_backend, detect_launch

ALONE, MPIRUN, MSRUN = Launch("none", 1), Launch("mpirun", 2), Launch("msrun", 2)
STALE = {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "4"}


@pytest.fixture
def no_group(monkeypatch):
    monkeypatch.setattr(process_group, "_group", None)


def test_detect_launch():
    assert detect_launch({}) == ALONE
    assert detect_launch({"OMPI_COMM_WORLD_SIZE": "2"}) == MPIRUN
    assert detect_launch({"PMI_SIZE": "2"}) == MPIRUN
    assert detect_launch({"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "2"}) == MSRUN
    assert detect_launch({"MS_WORKER_NUM": "2"}) == ALONE  # left over: no process was given a role
    assert detect_launch({"OMPI_COMM_WORLD_SIZE": "2", **STALE}) == MPIRUN


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
    ],
)
def test_auto(launch, device, backend):
    assert choose_backend("auto", launch, device) == backend


def test_contradictions():
    with pytest.raises(ValueError, match="backend must be one of auto, single, mpi, mindspore, got 'gloo'"):
        choose_backend("gloo", ALONE, "CPU")
    with pytest.raises(ValueError, match="msrun started 2 processes; they would train 2 separate models"):
        choose_backend("single", MSRUN, "CPU")
    with pytest.raises(ValueError, match="started alone; mindnlp-dp run --nproc 2 --backend mpi script.py"):
        choose_backend("mpi", ALONE, "CPU")


def test_init_is_idempotent_and_destroy_ends_it(no_group):
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


def test_without_init_under_a_launcher_the_error_names_it(no_group, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="no process group, though mpirun started 2 processes"):
        dp.get_process_group()
