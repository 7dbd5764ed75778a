"""Set up one pytest job per world size: every rank runs the same tests and writes its own JUnit file.

    mindnlp-dp run --nproc 2 -m pytest tests/parallel --rank-junit DIR
    msrun --worker_num=2 --local_worker_num=2 pytest tests/parallel --rank-junit DIR

Plain pytest, without a launcher, runs them at world size 1.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import mindnlp_dp as dp
from mindnlp_dp.data_parallel.overlap import OverlapState


def pytest_addoption(parser):
    parser.addoption("--rank-junit", default=None, help="folder for rank_R.xml")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    # msrun starts one more pytest process as its scheduler; that process stays in this call until the job ends.
    group = dp.init_process_group()
    folder = config.getoption("--rank-junit")
    if folder is not None:
        config.option.xmlpath = str(Path(folder) / f"rank_{group.rank}.xml")


@pytest.fixture(scope="session")
def group():
    return dp.get_process_group()


@pytest.fixture
def shared_tmp_path(group, tmp_path):
    """Return one temporary folder, with the same path on every rank."""
    return Path(group.broadcast_object(str(tmp_path)))


# Fixtures for the tests of overlap.


@pytest.fixture
def several(group):
    if group.world_size == 1:
        pytest.skip("one rank exchanges nothing")


@pytest.fixture
def micro():
    from known_gradients import KnownGradients

    return KnownGradients()


@pytest.fixture
def sync(several, group, micro):
    """Return a synchronizer that has learnt its bucket order in a first update, so that overlap is on."""
    from known_gradients import run_update

    sync = dp.GradientSynchronizer(micro.trainable, group, overlap=True, bucket_cap_mb=1e-3)
    run_update(sync, micro, group.rank, 0)
    assert sync.overlap.state is OverlapState.ON
    return sync


@pytest.fixture
def plain(group, micro):
    return dp.GradientSynchronizer(micro.trainable, group, overlap=False)
