"""Compare the course's all-reduce algorithms, run over MPI, with the group's own all-reduce."""

from __future__ import annotations

import numpy as np
import pytest

from theory.all_reduce import ALGORITHMS
from theory.costs import traffic
from theory.endpoint import MPIEndpoint

pytestmark = pytest.mark.core


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("length", [0, 1, 3, 1001, 300_000])
def test_all_reduce_algorithms_give_the_sum_and_the_traffic_of_the_formula(group, algorithm, length):
    if group.backend != "mpi":
        pytest.skip("they go over MPI")
    from mpi4py import MPI

    endpoint = MPIEndpoint(MPI.COMM_WORLD)
    x = np.random.default_rng([group.rank, length]).integers(-99, 99, length).astype(np.float32)
    np.testing.assert_array_equal(ALGORITHMS[algorithm](endpoint, x), group.all_reduce(x))
    expected = traffic(algorithm, group.rank, group.world_size, length)
    if group.world_size > 1:
        assert (endpoint.bytes_sent, endpoint.messages_sent) == (expected.num_bytes, expected.num_messages)
