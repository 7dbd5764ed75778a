"""Test PowerSGD against a written-out version of its algorithm, and its error feedback."""

from __future__ import annotations

import mindspore
import numpy as np
import pytest

import mindnlp_dp as dp
from mindnlp_dp.data_parallel.powersgd import _SEED, PowerSGD

SHAPES = [(60, 40), (7,), (30, 5, 10), (8, 8), (1,)]
MATRICES = [0, 2]
RANK = 2


def parameters():
    return [(f"p{index}", mindspore.Tensor(np.zeros(shape, np.float32))) for index, shape in enumerate(SHAPES)]


def gradients(rank, step):
    rng = np.random.default_rng([rank, step])
    return [rng.standard_normal(shape).astype(np.float32) for shape in SHAPES]


def tensors(arrays):
    return [None if array is None else mindspore.Tensor(array) for array in arrays]


@pytest.fixture
def sync(group):
    return dp.GradientSynchronizer(parameters(), group, compression="powersgd", powersgd_rank=RANK)


def written_out(world_size, steps):
    """Yield each step's results of the paper's Algorithms 1 and 2, with all ranks in one process, in float64."""
    flat = {index: (SHAPES[index][0], int(np.prod(SHAPES[index][1:]))) for index in MATRICES}
    q = {
        index: np.random.default_rng([_SEED, index]).standard_normal((columns, RANK)).astype(np.float32)
        for index, (_, columns) in flat.items()
    }
    error = {(rank, index): np.zeros(flat[index]) for rank in range(world_size) for index in MATRICES}
    for step in range(steps):
        result = [np.mean([gradients(rank, step)[i] for rank in range(world_size)], axis=0) for i in range(len(SHAPES))]
        for index in MATRICES:
            delta = [
                gradients(rank, step)[index].reshape(flat[index]) + error[rank, index] for rank in range(world_size)
            ]
            p = np.linalg.qr(np.mean([d @ q[index] for d in delta], axis=0))[0]
            mine = [d.T @ p for d in delta]
            q[index] = np.mean(mine, axis=0)
            for rank in range(world_size):
                error[rank, index] = delta[rank] - p @ mine[rank].T
            result[index] = (p @ q[index].T).reshape(SHAPES[index])
        yield result


@pytest.mark.core
def test_powersgd_matches_the_algorithm_of_the_paper(group, sync):
    for step, expected in enumerate(written_out(group.world_size, 5)):
        for mine, result in zip(sync(tensors(gradients(group.rank, step))), expected):
            np.testing.assert_allclose(mine.asnumpy(), result, rtol=1e-3, atol=1e-4)


def test_powersgd_gives_the_same_bits_on_all_ranks(group, sync):
    for step in range(3):
        result = sync(tensors(gradients(group.rank, step)), loss_weight=1.0 + group.rank)
        everyone = group.all_gather_object([gradient.asnumpy().tobytes() for gradient in result])
        assert all(other == everyone[0] for other in everyone)


def test_powersgd_is_exact_for_a_gradient_of_low_rank(group, sync):
    """The gradient of every rank is a multiple of one matrix of rank two."""
    rng = np.random.default_rng(0)
    low = (rng.standard_normal((60, 2)) @ rng.standard_normal((2, 40))).astype(np.float32)
    mine = [low * (group.rank + 1), *gradients(group.rank, 0)[1:]]
    result = sync(tensors(mine))
    np.testing.assert_allclose(result[0].asnumpy(), low * (group.world_size + 1) / 2, rtol=1e-4, atol=1e-4)


@pytest.mark.core
def test_error_feedback_adds_the_compression_error_to_later_updates(group, sync):
    """The results of all steps plus the ranks' final errors add up to the sum of all gradients."""
    results, sums = 0, 0
    for step in range(6):
        weights = [2.0 + rank for rank in range(group.world_size)]
        results = results + sync(tensors(gradients(group.rank, step)), weights[group.rank])[0].asnumpy()
        everyone = [gradients(rank, step)[0] for rank in range(group.world_size)]
        sums = sums + np.average(everyone, axis=0, weights=weights)
    error = group.all_reduce(sync._powersgd._errors[0], "mean")
    assert abs(results - sums).max() > 0.1
    np.testing.assert_allclose(results + error, sums, rtol=1e-4, atol=1e-4)


def test_powersgd_is_exact_for_vectors_and_small_matrices(group, sync):
    result = sync(tensors(gradients(group.rank, 0)))
    for index in (1, 3, 4):
        expected = np.mean([gradients(rank, 0)[index] for rank in range(group.world_size)], axis=0)
        np.testing.assert_allclose(result[index].asnumpy(), expected, rtol=1e-5, atol=1e-6)


def test_powersgd_counts_the_bytes_of_the_factors(group, sync):
    sync(tensors(gradients(group.rank, 0)))
    factors = RANK * (60 + 40) + RANK * (30 + 50)
    assert sync.num_bytes == 4 * (factors + 7 + 64 + 1)
    assert sync.overlap.off_reason


def test_powersgd_accumulates_micro_steps_and_allows_ranks_without_samples(group):
    whole = dp.GradientSynchronizer(parameters(), group, compression="powersgd", powersgd_rank=RANK)
    parts = dp.GradientSynchronizer(parameters(), group, compression="powersgd", powersgd_rank=RANK)
    mine = gradients(0, 0)
    if group.is_main:
        whole.accumulate(tensors(mine), 3.0)
        parts.accumulate(tensors(mine), 1.0)
        parts.accumulate(tensors(mine), 2.0)
    for one, other in zip(whole.reduce(), parts.reduce()):
        np.testing.assert_allclose(one.asnumpy(), other.asnumpy(), rtol=1e-5, atol=1e-6)


def test_powersgd_returns_no_gradient_for_an_unused_matrix(group, sync):
    mine = gradients(group.rank, 0)
    mine[0] = None
    result = sync(tensors(mine))
    assert result[0] is None
    # The other gradients are what they are with it.
    fresh = dp.GradientSynchronizer(parameters(), group, compression="powersgd", powersgd_rank=RANK)
    for mine, expected in zip(result[1:], fresh(tensors(gradients(group.rank, 0)))[1:]):
        np.testing.assert_array_equal(mine.asnumpy(), expected.asnumpy())
    assert 0 not in sync._powersgd._errors


def test_reset_error_feedback_restores_the_initial_state(group, sync):
    first = [gradient.asnumpy().copy() for gradient in sync(tensors(gradients(group.rank, 0)))]
    sync(tensors(gradients(group.rank, 1)))
    sync.reset_error_feedback()
    for mine, expected in zip(sync(tensors(gradients(group.rank, 0))), first):
        np.testing.assert_array_equal(mine.asnumpy(), expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_infinity_are_not_kept_in_error_feedback(group, sync, bad):
    """NaN or infinity reaches every rank, where the norm shows it; the next step is not affected."""
    mine = gradients(group.rank, 0)
    if group.rank == group.world_size - 1:
        mine[0][3, 3] = bad
    assert not np.isfinite(sync(tensors(mine))[0].asnumpy()).all()
    fresh = dp.GradientSynchronizer(parameters(), group, compression="powersgd", powersgd_rank=RANK)
    expected = fresh(tensors(gradients(group.rank, 1)))
    result = sync(tensors(gradients(group.rank, 1)))
    np.testing.assert_array_equal(result[0].asnumpy(), expected[0].asnumpy())


def test_a_skipped_update_does_not_change_error_feedback(group, sync):
    sync(tensors(gradients(group.rank, 0)))
    before = sync._powersgd._errors[0].copy()
    sync.skip()
    assert sync.reduce() == [None] * len(SHAPES)
    np.testing.assert_array_equal(sync._powersgd._errors[0], before)


def test_powersgd_averages_a_model_without_matrices(group):
    sync = dp.GradientSynchronizer([mindspore.Tensor(np.zeros(5, np.float32))], group, compression="powersgd")
    (mean,) = sync([mindspore.Tensor(np.full(5, group.rank, np.float32))])
    np.testing.assert_array_equal(mean.asnumpy(), (group.world_size - 1) / 2)


def test_powersgd_averages_a_model_with_matrices_only(group):
    sync = dp.GradientSynchronizer([mindspore.Tensor(np.zeros((90, 80), np.float32))], group, compression="powersgd")
    assert isinstance(sync._powersgd, PowerSGD)
    (mean,) = sync([mindspore.Tensor(np.full((90, 80), group.rank, np.float32))])
    np.testing.assert_allclose(mean.asnumpy(), (group.world_size - 1) / 2, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rank", [0, -1])
def test_an_invalid_powersgd_rank_is_refused(group, rank):
    with pytest.raises(ValueError, match=f"powersgd_rank must be at least 1, got {rank}"):
        dp.GradientSynchronizer(parameters(), group, compression="powersgd", powersgd_rank=rank)
