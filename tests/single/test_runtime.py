"""Test the cores and threads of a rank, and the seeds of its steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindnlp_dp.runtime.random_state import seeded, step_seed
from mindnlp_dp.runtime.threads import cores_granted, num_operator_threads, own_cores, split_cores


def test_split_cores_gives_each_process_a_block_of_cores():
    assert split_cores([0, 1], 2, 1) == (1,)
    assert [split_cores([0, 1, 2, 3, 4], 2, i) for i in range(2)] == [(0, 1, 2), (3, 4)]
    assert [split_cores([3, 5], 3, i) for i in range(3)] == [(3,), (5,), (3,)]


@given(num_cores=st.integers(1, 40), num_processes=st.integers(1, 12))
def test_split_cores_uses_every_core_once_when_there_are_enough(num_cores, num_processes):
    blocks = [split_cores(range(num_cores), num_processes, i) for i in range(num_processes)]
    assert all(blocks)
    if num_processes <= num_cores:
        assert sum(blocks, ()) == tuple(range(num_cores))


@pytest.mark.parametrize(
    ("sets", "mine"),
    [
        ([(0, 1), (0, 1)], [(0,), (1,)]),  # not bound to different cores, on all cores of the machine
        ([(4, 5, 6), (4, 5, 6)], [(4, 5), (6,)]),  # or in a container
        ([(0, 1), (2, 3)], [(0, 1), (2, 3)]),
        ([(0,), (0,)], [(0,), (0,)]),
        ([(0, 1), (0, 1), (2, 3), (2, 3)], [(0,), (1,), (2,), (3,)]),
        ([(0, 1), (1, 2)], [(0, 1), (1, 2)]),
    ],
)
def test_processes_with_the_same_cores_split_them(sets, mine):
    assert [own_cores(sets, index) for index in range(len(sets))] == mine


V2 = {"/proc/self/cgroup": "0::/job/rank\n"}
V1 = {"/proc/self/cgroup": "5:memory:/job\n2:cpu,cpuacct:/job\n0::/\n"}
V1_FOLDER, V2_FOLDER = "/sys/fs/cgroup/cpu,cpuacct", "/sys/fs/cgroup"


@pytest.mark.parametrize(
    ("files", "granted"),
    [
        ({}, None),
        (V2, None),
        ({**V2, f"{V2_FOLDER}/job/rank/cpu.max": "max 100000\n"}, None),
        ({**V2, f"{V2_FOLDER}/job/rank/cpu.max": "150000 100000\n"}, 1.5),
        ({**V2, f"{V2_FOLDER}/job/rank/cpu.max": "max 100000\n", f"{V2_FOLDER}/job/cpu.max": "200000 50000\n"}, 4.0),
        ({"/proc/self/cgroup": "0::/\n", f"{V2_FOLDER}/cpu.max": "200000 100000\n"}, 2.0),  # inside a container
        ({**V1, f"{V1_FOLDER}/job/cpu.cfs_quota_us": "-1\n", f"{V1_FOLDER}/job/cpu.cfs_period_us": "100000\n"}, None),
        ({**V1, f"{V1_FOLDER}/job/cpu.cfs_quota_us": "3000\n", f"{V1_FOLDER}/job/cpu.cfs_period_us": "1000\n"}, 3.0),
        ({**V1, f"{V1_FOLDER}/cpu.cfs_quota_us": "50000\n", f"{V1_FOLDER}/cpu.cfs_period_us": "100000\n"}, 0.5),
    ],
)  # fmt: skip
def test_the_cpu_quota_is_read_from_cgroups(files, granted):
    assert cores_granted(lambda file: files.get(file, "")) == granted


@pytest.mark.parametrize(
    ("num_cores", "granted", "num_processes", "threads"),
    [(4, None, 2, 4), (4, 4.0, 2, 2), (4, 16.0, 2, 4), (4, 3.0, 2, 1), (1, 0.5, 2, 1)],
)
def test_the_number_of_operator_threads_fits_the_cpu_quota(num_cores, granted, num_processes, threads):
    assert num_operator_threads(num_cores, granted, num_processes) == threads


def test_step_seeds_differ_and_are_fixed():
    seeds = {step_seed(42, r, s, m) for r in range(4) for s in range(50) for m in range(4)}
    assert len(seeds) == 800
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert step_seed(42, 1, 2, 3) == 583234721  # a resumed run replays it, also with a later version


def test_seeded_replays_dropout_and_keeps_numpys_state():
    from mindspore import Tensor, ops

    x = Tensor(np.ones(1000, np.float32))

    def draw(seed):
        with seeded(seed):
            return ops.dropout(x, 0.5).asnumpy()

    np.random.seed(7)
    expected = np.random.rand(3)
    np.random.seed(7)
    first, other, again = draw(1), draw(2), draw(1)
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    np.testing.assert_array_equal(np.random.rand(3), expected)


CONFIGURE = """
import json, os, sys
from mindnlp_dp.runtime.threads import configure_runtime, usable_cores
import mindspore
from threadpoolctl import threadpool_info
if "own" in sys.argv:
    mindspore.device_context.cpu.op_tuning.threads_num(3)
rank, num_ranks = int(sys.argv[2]), int(sys.argv[3])
settings = configure_runtime(sys.argv[1], rank, num_ranks, [usable_cores()] * num_ranks)
print(json.dumps([list(settings.cores), settings.operator_threads, settings.synchronous_dispatch,
                  sorted(os.sched_getaffinity(0))]))
of_blas = {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}
assert of_blas == {settings.num_threads} or sys.argv[1] != "CPU", of_blas
"""


def configure(*arguments, cores=None):
    """Return the effect of configure_runtime in a new process, where nothing has been set yet."""
    bind = (lambda: os.sched_setaffinity(0, cores)) if cores else None
    done = subprocess.run(
        [sys.executable, "-c", CONFIGURE, *arguments], capture_output=True, text=True, preexec_fn=bind, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_a_rank_gets_its_own_cores_and_one_thread_per_core():
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) != os.cpu_count() or len(cores) < 2:
        pytest.skip("needs two cores that this process may use")
    mine = list(split_cores(cores, 2, 1))
    assert configure("CPU", "1", "2") == [mine, len(mine), True, mine]


def test_a_bound_process_stays_bound_with_one_thread():
    core = min(os.sched_getaffinity(0))
    assert configure("CPU", "1", "2", cores=[core]) == [[core], 1, True, [core]]


def test_the_users_number_of_threads_is_kept():
    assert configure("CPU", "0", "1", "own")[1] is None


def test_cores_and_threads_are_not_set_on_devices():
    cores = sorted(os.sched_getaffinity(0))
    assert configure("Ascend", "0", "2") == [cores, None, False, cores]
