"""One pytest job for a world size: every rank runs the same tests, and writes a JUnit file of its own.

    mindnlp-dp run --nproc 2 -m pytest tests/parallel --rank-junit DIR
    msrun --worker_num=2 --local_worker_num=2 pytest tests/parallel --rank-junit DIR

It runs alone, too, as world size 1.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import mindnlp_dp as dp


def pytest_addoption(parser):
    parser.addoption("--rank-junit", default=None, help="folder for rank_R.xml")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    # msrun starts pytest once more, as the scheduler, which stays in this call until the job ends.
    group = dp.init_process_group()
    folder = config.getoption("--rank-junit")
    if folder is not None:
        config.option.xmlpath = str(Path(folder) / f"rank_{group.rank}.xml")


@pytest.fixture(scope="session")
def group():
    return dp.get_process_group()


@pytest.fixture
def shared_tmp_path(group, tmp_path):
    """A folder that is the same on every rank."""
    return Path(group.broadcast_object(str(tmp_path)))


# For the tests of overlap.


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
    """One that has learnt."""
    from known_gradients import window

    sync = dp.GradientSynchronizer(micro.trainable, group, overlap=True, bucket_cap_mb=1e-3)
    window(sync, micro, group.rank, 0)
    assert sync.overlap.state == "on"
    return sync


@pytest.fixture
def plain(group, micro):
    return dp.GradientSynchronizer(micro.trainable, group, overlap=False)
