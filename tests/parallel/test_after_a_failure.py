"""A training that failed leaves nothing behind: the next one in the same process trains as the first did."""

from __future__ import annotations

import mindspore
import numpy as np
import pytest

import mindnlp_dp as dp
from models import NUM_LABELS, Rows, tiny_roberta, train, weights


@pytest.fixture
def bad_rows():
    rows = Rows(16)
    # On every rank: all of them fail in their first backward pass.
    rows.labels[:] = NUM_LABELS + 70
    return rows


def train_once(folder, rows):
    trainer = train(tiny_roberta(dropout=0.1), rows, folder, per_device_train_batch_size=2)
    return trainer.training_loop.grad_norm, weights(trainer.model)


def test_the_trainer_after_a_label_out_of_range(tmp_path, bad_rows):
    before_norm, before = train_once(tmp_path / "before", Rows(16))
    with pytest.raises(RuntimeError):
        train_once(tmp_path / "bad", bad_rows)
    norm, after = train_once(tmp_path / "after", Rows(16))
    assert norm == before_norm > 0
    for name, weight in before.items():
        np.testing.assert_array_equal(after[name], weight, err_msg=name)


def test_the_trainer_after_a_forward_pass_that_raised(tmp_path):
    class Raises(dp.DataParallelTrainer):
        def compute_loss(self, model, inputs, return_outputs=False):
            super().compute_loss(model, inputs, return_outputs)
            raise KeyError("no such column")

    before_norm, before = train_once(tmp_path / "before", Rows(16))
    with pytest.raises(KeyError):
        train(tiny_roberta(), Rows(16), tmp_path / "bad", trainer_class=Raises)
    norm, after = train_once(tmp_path / "after", Rows(16))
    assert norm == before_norm > 0
    for name, weight in before.items():
        np.testing.assert_array_equal(after[name], weight, err_msg=name)


def functional_losses(network, optimizer, label):
    def forward(x, y):
        return mindspore.ops.nll_loss(mindspore.ops.log_softmax(network(x), -1), y)

    step = dp.make_train_step(forward, optimizer, list(network.trainable_params()))
    x = np.random.default_rng(1).standard_normal((4, 8)).astype(np.float32)
    labels = np.full(4, label, np.int32)
    return [step((mindspore.Tensor(x), mindspore.Tensor(labels))) for _ in range(3)]


def new_network():
    mindspore.set_seed(3)
    network = mindspore.nn.Dense(8, 3)
    network.weight.set_data(mindspore.Tensor(np.linspace(-1, 1, 24, dtype=np.float32).reshape(3, 8)))
    return network, mindspore.nn.SGD(network.trainable_params(), 0.5)


def test_a_loop_of_ones_own_after_a_label_out_of_range():
    before = functional_losses(*new_network(), label=1)
    with pytest.raises((RuntimeError, ValueError, IndexError)):
        functional_losses(*new_network(), label=77)
    after = functional_losses(*new_network(), label=1)
    assert after == before
    assert after[2] < after[0]
