"""Test moving tensors from the ranks of one mesh to those of another, for every world size."""

from __future__ import annotations

import numpy as np
import pytest

import mindnlp_dp as dp
from mindnlp_dp.communication.operations import Operation
from mindnlp_dp.parallel.resharding import MeshLayout, Resharding

needs_messages = pytest.mark.skipif(
    bool(dp.get_process_group().library_without(Operation.MESSAGES)),
    reason="MindSpore's CPU library has messages between two ranks from 2.8 on",
)
SPECS = ("RR", "S0R", "RS0", "S1R", "RS1", "S01R", "RS01", "S0S1", "S1S0", "S10R")


def random_layout(rng, world_size):
    hosts = int(rng.integers(1, world_size + 1))
    mesh = (hosts, int(rng.integers(1, world_size // hosts + 1)))
    ranks = [int(rank) for rank in rng.permutation(world_size)[: mesh[0] * mesh[1]]]
    return MeshLayout(ranks, mesh, str(rng.choice(SPECS)))


def tile(array, layout, rank):
    box = layout.box(rank, array.shape)
    return None if box is None else array[tuple(slice(begin, end) for begin, end in box)]


@pytest.mark.core
@needs_messages
@pytest.mark.parametrize("algorithm", ["naive", "greedy", "search"])
def test_random_reshardings_are_exact(group, algorithm):
    rng = np.random.default_rng(7)
    for number in range(200 if algorithm == "greedy" else 40):
        shape = tuple(int(n) for n in rng.integers(0 if number % 10 == 0 else 1, 9, 2))
        source, destination = (random_layout(rng, group.world_size) for _ in range(2))
        whole = rng.standard_normal(shape).astype(np.float32)
        # NaN checks that bits are moved, not numbers.
        whole[whole > 1.5] = np.nan
        moved = Resharding(shape, source, destination, group, algorithm).run(tile(whole, source, group.rank))
        expected = tile(whole, destination, group.rank)
        assert (moved is None) == (expected is None)
        if expected is not None:
            assert moved.shape == expected.shape
            assert moved.tobytes() == np.ascontiguousarray(expected).tobytes()


@needs_messages
def test_a_resharding_is_reused_for_several_tensors(group):
    everyone = list(range(group.world_size))
    layouts = [MeshLayout(everyone, (group.world_size, 1), spec) for spec in ("S0R", "RS0")]
    resharding = Resharding((6, 10), *layouts, group)
    for number in range(3):
        whole = (np.arange(60).reshape(6, 10) + number).astype(np.int64)
        moved = resharding.run(tile(whole, layouts[0], group.rank), np.int64)
        np.testing.assert_array_equal(moved, tile(whole, layouts[1], group.rank))


@needs_messages
def test_a_tile_of_wrong_shape_is_refused_on_all_ranks(group):
    everyone = list(range(group.world_size))
    layouts = [MeshLayout(everyone, (group.world_size, 1), spec) for spec in ("S0R", "RR")]
    resharding = Resharding((2 * group.world_size, 3), *layouts, group)
    rows = 3 if group.rank == group.world_size - 1 else 2
    with pytest.raises(ValueError, match="a tile of float32 and shape \\(2, 3\\), got float32 of shape \\(3, 3\\)"):
        resharding.run(np.zeros((rows, 3), np.float32))
    moved = resharding.run(np.full((2, 3), group.rank, np.float32))
    np.testing.assert_array_equal(moved[:, 0], np.repeat(everyone, 2))


@needs_messages
def test_invalid_meshes_of_a_resharding_are_refused(group):
    good = MeshLayout([0], (1, 1), "RR")
    with pytest.raises(ValueError, match="destination: a mesh of \\(1, 2\\) has other ranks"):
        Resharding((2, 2), good, MeshLayout([0], (1, 2), "RR"), group)
    with pytest.raises(ValueError, match="source: ranks are 0 to"):
        Resharding((2, 2), MeshLayout([group.world_size], (1, 1), "RR"), good, group)


def test_resharding_without_messages_is_refused(group):
    if not group.library_without(Operation.MESSAGES):
        pytest.skip("this backend has messages")
    with pytest.raises(ValueError, match="no messages between two ranks"):
        Resharding((2, 2), MeshLayout([0], (1, 1), "RR"), MeshLayout([0], (1, 1), "RR"), group)
