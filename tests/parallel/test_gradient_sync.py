"""Test gradient synchronizers: weighted means over ranks and micro-steps, no_sync, unused parameters and errors."""

from __future__ import annotations

import mindspore
import numpy as np
import pytest

import mindnlp_dp as dp
from mindnlp_dp.communication.replicas import ReplicaMismatchError
from mindnlp_dp.data_parallel.buckets.bucket_factory import _hint_at_mpi

pytestmark = pytest.mark.core

SHAPES = [(4, 3), (5,), (2, 2, 2), (1,), (7, 2)]
SYNCHRONIZERS = {
    "naive": dp.NaiveGradientSynchronizer,
    "one bucket": dp.GradientSynchronizer,
    "many buckets": lambda parameters: dp.GradientSynchronizer(parameters, bucket_cap_mb=64 / 2**20),
}


def parameters(dtype="float32"):
    return [(f"p{i}", mindspore.Tensor(np.zeros(shape, dtype))) for i, shape in enumerate(SHAPES)]


def gradients(rank, micro_step=0, dtype="float32"):
    rng = np.random.default_rng([rank, micro_step])
    return [mindspore.Tensor(rng.standard_normal(shape).astype(dtype)) for shape in SHAPES]


def weighted_mean(parts):
    """Return the weighted mean of ``parts``: (weight, gradients) pairs of all ranks and micro steps."""
    total = sum(weight for weight, _ in parts)
    return [
        sum(weight * part[i].asnumpy().astype(np.float64) for weight, part in parts) / total for i in range(len(SHAPES))
    ]


@pytest.fixture(params=SYNCHRONIZERS)
def make(request):
    return SYNCHRONIZERS[request.param]


def test_unweighted_gradients_are_averaged_over_ranks(group, make):
    for result, shape in zip(make(parameters())([mindspore.ops.ones(s) * group.rank for s in SHAPES]), SHAPES):
        np.testing.assert_array_equal(result.asnumpy(), np.full(shape, (group.world_size - 1) / 2, np.float32))


def test_gradients_are_weighted_over_ranks_and_micro_steps(group, make):
    sync = make(parameters())
    for micro_step, weight in enumerate([3.0, 0.5 + group.rank]):
        sync.accumulate(gradients(group.rank, micro_step), weight)
    result = sync.reduce()
    parts = [(w, gradients(r, m)) for r in range(group.world_size) for m, w in enumerate([3.0, 0.5 + r])]
    assert sync.total_loss_weight == sum(weight for weight, _ in parts)
    for mine, expected in zip(result, weighted_mean(parts)):
        np.testing.assert_allclose(mine.asnumpy(), expected, rtol=1e-5, atol=1e-6)


def test_a_rank_without_samples_gets_the_averaged_gradients(group, make):
    sync = make(parameters())
    if group.is_main:
        sync.accumulate(gradients(0), 2.0)
    for mine, expected in zip(sync.reduce(), gradients(0)):
        np.testing.assert_allclose(mine.asnumpy(), expected.asnumpy(), rtol=1e-6)


def test_loss_weight_zero_leaves_nan_gradients_out(group, make):
    sync = make(parameters())
    sync.accumulate([mindspore.ops.ones(shape) * float("nan") for shape in SHAPES], loss_weight=0)
    for gradient in sync([mindspore.ops.ones(shape) for shape in SHAPES]):
        np.testing.assert_array_equal(gradient.asnumpy(), 1)


def test_updates_do_not_share_accumulated_gradients(group, make):
    sync = make(parameters())
    first = [g.asnumpy().copy() for g in sync(gradients(group.rank))]
    sync(gradients(group.rank, 1))
    for mine, expected in zip(sync(gradients(group.rank)), first):
        np.testing.assert_array_equal(mine.asnumpy(), expected)


def test_averaged_gradients_do_not_share_memory_with_later_updates_or_ranks(group, make):
    """Clipping writes in place; this must not affect a later update or another rank."""
    sync = make(parameters())
    kept = sync(gradients(group.rank))
    before = [g.asnumpy().copy() for g in kept]
    for gradient in sync(gradients(group.rank, 1)):
        mindspore.ops.assign(gradient, gradient * 100 * (group.rank + 1))
    group.barrier()
    for mine, expected in zip(kept, before):
        np.testing.assert_array_equal(mine.asnumpy(), expected)


def test_unused_parameters_have_no_gradient_and_partly_used_ones_are_averaged(group, make):
    sync = make(parameters())
    mine = gradients(group.rank)
    mine[1] = None
    if not group.is_main:
        mine[2] = None
    result = sync(mine)
    assert result[1] is None
    np.testing.assert_allclose(result[2].asnumpy(), gradients(0)[2].asnumpy() / group.world_size, rtol=1e-6)


def test_naive_and_bucketed_synchronizers_give_the_same_gradients(group):
    results = [
        [g.asnumpy() for g in make_one(parameters())(gradients(group.rank), loss_weight=3.0 + group.rank)]
        for make_one in SYNCHRONIZERS.values()
    ]
    for other in results[1:]:
        for mine, expected in zip(other, results[0]):
            np.testing.assert_allclose(mine, expected, rtol=1e-6, atol=1e-7)


def test_half_precision_gradients_are_weighted_without_overflow(group, make):
    """Every weighted sum is far above float16's maximum of 65,504, but the mean is not."""
    sync = make(parameters("float16"))
    ones = [mindspore.Tensor(np.full(shape, 100.0, np.float16)) for shape in SHAPES]
    for gradient in sync(ones, loss_weight=4096):
        assert gradient.dtype == mindspore.float16
        np.testing.assert_array_equal(gradient.asnumpy(), np.float16(100))


def test_invalid_gradients_and_weights_are_refused(group, make):
    sync = make(parameters())
    with pytest.raises(ValueError, match="expected 5 gradients, one for each parameter, got 1"):
        sync.accumulate(gradients(0)[:1])
    with pytest.raises(ValueError, match=r"the gradient of 'p0' has shape \(5,\), expected \(4, 3\)"):
        sync.accumulate(gradients(0)[1:2] + gradients(0)[1:])
    with pytest.raises(ValueError, match="a weight must be finite and not negative, got nan"):
        sync.accumulate(gradients(0), float("nan"))
    with pytest.raises(ValueError, match="no rank had a sample in this update"):
        make(parameters()).reduce()


def test_synchronizers_with_different_parameters_are_refused(group, make):
    if group.world_size == 1:
        pytest.skip("one rank agrees with itself")
    with pytest.raises(ReplicaMismatchError, match="rank 0 has 'p4' .* which rank 1 does not have"):
        make(parameters() if group.is_main else parameters()[:-1])


def test_gradient_sync_counts_bytes_and_seconds(group, make):
    sync = make(parameters())
    sync(gradients(group.rank))
    assert sync.num_bytes == 4 * sum(int(np.prod(shape)) for shape in SHAPES)
    assert sync.seconds > 0


@pytest.mark.parametrize("kind", [dp.NaiveGradientSynchronizer, dp.GradientSynchronizer])
def test_no_sync_accumulates_until_the_next_call(group, kind):
    import mindspore

    parameter = mindspore.Tensor(np.zeros(5, np.float32))
    sync = kind([parameter], group)
    with sync.no_sync():
        (kept,) = sync([parameter + group.rank], loss_weight=2)
        assert (kept.asnumpy() == group.rank).all()
        with sync.no_sync():
            sync([parameter + 10 * group.rank], loss_weight=1)
        sync([parameter], loss_weight=1)  # the inner block does not end the outer one
    (mean,) = sync([parameter + 1], loss_weight=4)
    expected = np.mean([(2 * rank + 10 * rank + 4) / 8 for rank in range(group.world_size)])
    np.testing.assert_allclose(mean.asnumpy(), np.float32(expected), rtol=1e-6)


@pytest.mark.parametrize("kind", [dp.NaiveGradientSynchronizer, dp.GradientSynchronizer])
def test_an_exception_in_no_sync_drops_the_accumulated_gradients(group, kind):
    import mindspore

    parameter = mindspore.Tensor(np.zeros(5, np.float32))
    sync = kind([parameter], group)
    with pytest.raises(KeyError, match="a bad batch"), sync.no_sync():
        sync([parameter + 100], loss_weight=7)
        raise KeyError("a bad batch")
    (mean,) = sync([parameter + group.rank])
    np.testing.assert_allclose(mean.asnumpy(), (group.world_size - 1) / 2)


def test_mccl_prints_one_hint_to_use_mpi(group, capsys):
    _hint_at_mpi.cache_clear()
    for _ in range(2):
        dp.GradientSynchronizer(parameters())
    said = capsys.readouterr().out
    expected = group.backend == "mccl" and group.is_main and group.world_size > 1
    assert said.count("hint: ") == expected
    assert (f"mindnlp-dp run --nproc {group.world_size} SCRIPT" in said) == expected
