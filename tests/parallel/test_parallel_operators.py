"""Test the forward and backward passes of operators that communicate, with shards of any length."""

from __future__ import annotations

import mindspore
import numpy as np
import pytest

from mindnlp_dp.communication import autograd_ops
from mindnlp_dp.parallel.tensor_parallel.layers import vocabulary_parallel_cross_entropy
from mindnlp_dp.runtime.shard_bounds import shard_bounds

ROWS, WIDTH = 3, 7


def of_rank(rank, shape=(ROWS, WIDTH)):
    return np.random.default_rng(rank).standard_normal(shape).astype(np.float32)


def both_ways(function, x, weight):
    """Return the function's output, and the gradient of the sum of its product with ``weight``."""
    found = []

    def loss(x):
        y = function(x)
        found.append(y.asnumpy())
        return (y * mindspore.Tensor(weight)).sum()

    gradient = mindspore.grad(loss)(mindspore.Tensor(x))
    return found[0], gradient.asnumpy()


def part(array, group, dim):
    bounds = shard_bounds(array.shape[dim], group.world_size)
    return np.take(array, range(bounds[group.rank], bounds[group.rank + 1]), axis=dim)


def test_copy_to_is_the_identity_and_all_reduces_gradients(group):
    y, gradient = both_ways(lambda x: autograd_ops.copy_to(x, group), of_rank(0), of_rank(group.rank))
    np.testing.assert_array_equal(y, of_rank(0))
    np.testing.assert_allclose(gradient, sum(map(of_rank, range(group.world_size))), atol=1e-6)


def test_reduce_from_sums_outputs_and_passes_gradients_unchanged(group):
    y, gradient = both_ways(lambda x: autograd_ops.reduce_from(x, group), of_rank(group.rank), of_rank(9))
    np.testing.assert_allclose(y, sum(map(of_rank, range(group.world_size))), atol=1e-6)
    np.testing.assert_array_equal(gradient, of_rank(9))


@pytest.mark.core
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gather_from_and_scatter_to_are_each_others_transpose(group, dim):
    if group.world_size > ROWS and dim == 0:
        pytest.skip("no row for each rank")
    whole, weight = of_rank(8), of_rank(9)
    y, gradient = both_ways(lambda x: autograd_ops.gather_from(x, group, dim), part(whole, group, dim), weight)
    np.testing.assert_array_equal(y, whole)
    np.testing.assert_array_equal(gradient, part(weight, group, dim))
    y, gradient = both_ways(lambda x: autograd_ops.scatter_to(x, group, dim), whole, part(weight, group, dim))
    np.testing.assert_array_equal(y, part(whole, group, dim))
    np.testing.assert_array_equal(gradient, weight)


@pytest.mark.parametrize("dim", [0, 1])
def test_all_gather_and_reduce_scatter_are_each_others_transpose(group, dim):
    if group.world_size > ROWS and dim == 0:
        pytest.skip("no row for each rank")
    whole = of_rank(8)
    total = sum(map(of_rank, range(group.world_size)))
    y, gradient = both_ways(
        lambda x: autograd_ops.all_gather(x, group, dim), part(whole, group, dim), of_rank(group.rank)
    )
    np.testing.assert_array_equal(y, whole)
    np.testing.assert_allclose(gradient, part(total, group, dim), atol=1e-6)
    y, gradient = both_ways(
        lambda x: autograd_ops.reduce_scatter(x, group, dim), of_rank(group.rank), part(whole, group, dim)
    )
    np.testing.assert_allclose(y, part(total, group, dim), atol=1e-6)
    np.testing.assert_array_equal(gradient, whole)


def counts_of(rank, world_size):
    """Return the number of rows that a rank sends to each rank, including 0 and rows to itself."""
    return [(rank + 2 * other) % 3 for other in range(world_size)]


@pytest.mark.core
def test_all_to_all_exchanges_rows_and_returns_them_in_the_backward_pass(group):
    if group.backend == "mccl" and group.world_size > 1:
        with pytest.raises(NotImplementedError, match="has no all-to-all"):
            group.all_to_all(np.zeros((group.world_size, 2), np.float32), [1] * group.world_size)
        return
    n, rank = group.world_size, group.rank
    mine = counts_of(rank, n)
    x = of_rank(rank, (sum(mine), 4))
    rows, theirs = group.all_to_all(x, mine)
    assert theirs == [counts_of(other, n)[rank] for other in range(n)]
    expected = []
    for other in range(n):
        begin = sum(counts_of(other, n)[:rank])
        expected.append(of_rank(other, (sum(counts_of(other, n)), 4))[begin : begin + theirs[other]])
    np.testing.assert_array_equal(rows, np.concatenate(expected))
    # The backward pass sends the rows back.
    if sum(mine) and sum(theirs):
        y, gradient = both_ways(lambda t: autograd_ops.all_to_all(t, group, mine, theirs), x, rows)
        np.testing.assert_array_equal(y, rows)
        np.testing.assert_array_equal(gradient, x)


def test_all_to_all_refuses_counts_that_do_not_add_up(group):
    if group.backend == "mccl" and group.world_size > 1:
        pytest.skip("has none")
    with pytest.raises(ValueError, match="all_to_all on rank .*expected .* counts, one for each rank, that add up"):
        group.all_to_all(np.zeros((5, 2), np.float32), [1] * group.world_size if group.world_size != 5 else [2] * 5)


def test_collectives_work_in_subgroups_of_ranks(group):
    """Every collective works in subgroups, and its errors use the given names of ranks."""
    if group.world_size < 2:
        pytest.skip("no parts exist")
    half = group.world_size // 2
    ranks = range(half) if group.rank < half else range(half, group.world_size)
    some = group.split(list(ranks), [f"{rank} (here)" for rank in ranks])
    assert (some.world_size, some.rank) == (len(ranks), list(ranks).index(group.rank))
    for dtype in (np.float32, np.float64, np.int64, np.float16, np.uint8):
        x = (10 * np.arange(6).reshape(2, 3) + group.rank).astype(dtype)
        everyone = [(10 * np.arange(6).reshape(2, 3) + rank).astype(dtype) for rank in ranks]
        np.testing.assert_array_equal(some.all_reduce(x), sum(everyone).astype(dtype))
        np.testing.assert_array_equal(some.broadcast(x, len(ranks) - 1), everyone[-1])
        np.testing.assert_array_equal(some.all_gather(x), everyone)
    assert some.all_gather_object({"rank": group.rank}) == [{"rank": rank} for rank in ranks]
    with pytest.raises(TypeError, match=rf"on rank {group.rank} \(here\)"):
        some.all_reduce("nothing")
    some.barrier()


@pytest.mark.core
@pytest.mark.parametrize("num_classes", [7, 50])
def test_vocabulary_parallel_cross_entropy_matches_the_loss_of_one_process(group, num_classes):
    from mindnlp.core.nn import functional

    if num_classes < group.world_size:
        pytest.skip("no word for each rank")
    logits = 4 * of_rank(8, (6, num_classes))
    labels = np.array([0, num_classes - 1, -100, 3, 3, -100])
    bounds = shard_bounds(num_classes, group.world_size)
    mine = slice(bounds[group.rank], bounds[group.rank + 1])
    tensor = mindspore.Tensor(labels)

    def cut(x):
        return vocabulary_parallel_cross_entropy(x, tensor, group, num_classes)

    def whole(x):
        return functional.cross_entropy(x, tensor, ignore_index=-100)

    loss, gradient = mindspore.value_and_grad(cut)(mindspore.Tensor(logits[:, mine].copy()))
    expected, expected_gradient = mindspore.value_and_grad(whole)(mindspore.Tensor(logits))
    np.testing.assert_allclose(loss.asnumpy(), expected.asnumpy(), rtol=2e-6)
    np.testing.assert_allclose(gradient.asnumpy(), expected_gradient.asnumpy()[:, mine], atol=2e-7)
    with pytest.raises(ValueError, match=f"a class is from 0 to {num_classes - 1}, or -100 where it is ignored; got"):
        vocabulary_parallel_cross_entropy(
            mindspore.Tensor(logits[:, mine].copy()), tensor + num_classes, group, num_classes
        )
    nothing = vocabulary_parallel_cross_entropy(
        mindspore.Tensor(logits[:, mine].copy()), mindspore.Tensor(np.full(6, -100)), group, num_classes
    )
    assert np.isnan(nothing.asnumpy())
