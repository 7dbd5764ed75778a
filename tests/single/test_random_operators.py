"""Tests that the random numbers of a forward pass depend only on the step's seed, for every random operator."""

from __future__ import annotations

import mindspore
import mindspore.nn as cells
import numpy as np
import pytest
from mindnlp.core import nn, ops

import mindnlp_dp as dp
from mindnlp_dp.runtime.random_state import seeded

F = nn.functional


@pytest.fixture(autouse=True)
def group():
    return dp.init_process_group()


def ones(*shape):
    return mindspore.Tensor(np.ones(shape, np.float32))


def halves():
    return mindspore.Tensor(np.full((8, 16), 0.5, np.float32))


DRAWS = {
    "nn.Dropout": lambda: nn.Dropout(0.5).train()(ones(8, 16)),
    "nn.Dropout2d": lambda: nn.Dropout2d(0.5).train()(ones(4, 16, 3, 3)),
    "F.dropout": lambda: F.dropout(ones(8, 16), 0.5, training=True),
    "F.dropout2d": lambda: F.dropout2d(ones(4, 16, 3, 3), 0.5, training=True),
    "F.gumbel_softmax": lambda: F.gumbel_softmax(ones(8, 16)),
    "ops.bernoulli": lambda: ops.bernoulli(halves()),
    "ops.multinomial": lambda: ops.multinomial(halves(), 8),
    "ops.rand": lambda: ops.rand(8, 16),
    "ops.randn": lambda: ops.randn(8, 16),
    "ops.randint": lambda: ops.randint(0, 1000, (8, 16)),
    "mindspore.ops.bernoulli": lambda: mindspore.ops.bernoulli(halves()),
    "mindspore.ops.dropout": lambda: mindspore.ops.dropout(ones(8, 16), p=0.5),
    "mindspore.ops.dropout1d": lambda: mindspore.ops.dropout1d(ones(4, 16, 3)),
    "mindspore.ops.dropout2d": lambda: mindspore.ops.dropout2d(ones(4, 16, 3, 3)),
    "mindspore.ops.dropout3d": lambda: mindspore.ops.dropout3d(ones(4, 16, 3, 3, 3)),
    "mindspore.ops.gumbel_softmax": lambda: mindspore.ops.gumbel_softmax(ones(8, 16)),
    "mindspore.ops.random_categorical": lambda: mindspore.ops.random_categorical(ones(8, 16), 10),
    "mindspore.ops.standard_normal": lambda: mindspore.ops.standard_normal((8, 16)),
    "mindspore.nn.Dropout1d": lambda: cells.Dropout1d(p=0.5).set_train()(ones(4, 16, 3)),
    "mindspore.nn.Dropout2d": lambda: cells.Dropout2d(p=0.5).set_train()(ones(4, 16, 3, 3)),
    "mindspore.nn.Dropout3d": lambda: cells.Dropout3d(p=0.5).set_train()(ones(4, 16, 3, 3, 3)),
    "UniformInt": lambda: mindspore.ops.UniformInt()(
        (8, 16), mindspore.Tensor(0, mindspore.int32), mindspore.Tensor(1000, mindspore.int32)
    ),
    "StandardLaplace": lambda: mindspore.ops.StandardLaplace()((8, 16)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_random_operators_repeat_with_the_seed_and_differ_between_calls(name):
    draw = DRAWS[name]

    def two(seed):
        with seeded(seed):
            return draw().asnumpy(), draw().asnumpy()

    first, again, other = two(11), two(11), two(12)
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first[0], first[1])
    assert not np.array_equal(first[0], other[0])


@pytest.mark.parametrize("name", ["F.dropout2d", "mindspore.nn.Dropout2d", "mindspore.ops.dropout3d"])
def test_channel_dropout_drops_entire_channels_and_scales_the_rest(name):
    with seeded(3):
        out = DRAWS[name]().asnumpy().reshape(4 * 16, -1)
    assert set(np.unique(out)) == {0.0, 2.0}
    assert (out == out[:, :1]).all()
    assert 16 < (out[:, 0] == 0).sum() < 48


def test_the_gradient_of_dropped_channels_is_zero():
    def loss(x):
        return (F.dropout2d(x, 0.5, training=True) * 3).sum()

    with seeded(5):
        gradient = mindspore.grad(loss)(ones(4, 16, 3, 3)).asnumpy()
    with seeded(5):
        out = F.dropout2d(ones(4, 16, 3, 3), 0.5, training=True).asnumpy()
    np.testing.assert_array_equal(gradient, 3 * out)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_channel_dropout_drops_none_with_p_0_and_all_with_p_1(p):
    with seeded(1):
        out = F.dropout2d(ones(2, 3, 2, 2), p, training=True).asnumpy()
    np.testing.assert_array_equal(out, np.full((2, 3, 2, 2), 1 - p))


def test_an_operator_that_ignores_the_seed_gives_a_warning():
    with seeded(1), pytest.warns(RuntimeWarning, match="UniformCandidateSampler draws numbers that do not follow"):
        mindspore.ops.uniform_candidate_sampler(mindspore.Tensor([[1, 2]]), 2, 5, True, 100)
