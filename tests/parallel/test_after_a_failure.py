"""Test that a failed training leaves no state in the process: the next one gives the same result."""

from __future__ import annotations

import mindspore
import numpy as np
import pytest

import mindnlp_dp as dp
from models import NUM_LABELS, Rows, tiny_roberta, train, weights


@pytest.fixture
def bad_rows():
    rows = Rows(16)
    # The labels are bad on every rank, so all of them fail in their first micro-batch.
    rows.labels[:] = NUM_LABELS + 70
    return rows


def train_once(folder, rows):
    trainer = train(tiny_roberta(dropout=0.1), rows, folder, per_device_train_batch_size=2)
    return trainer.training_loop.grad_norm, weights(trainer.model)


@pytest.mark.core
def test_trainer_gives_the_same_weights_after_a_label_out_of_range(tmp_path, bad_rows):
    before_norm, before = train_once(tmp_path / "before", Rows(16))
    with pytest.raises(ValueError, match="column 'labels' has 73 in sample"):
        train_once(tmp_path / "bad", bad_rows)
    norm, after = train_once(tmp_path / "after", Rows(16))
    assert norm == before_norm > 0
    for name, weight in before.items():
        np.testing.assert_array_equal(after[name], weight, err_msg=name)


def test_trainer_gives_the_same_weights_after_an_error_in_the_forward_pass(tmp_path):
    class Raises(dp.DataParallelTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            super().compute_loss(model, inputs, return_outputs)
            raise KeyError("no such column")

    before_norm, before = train_once(tmp_path / "before", Rows(16))
    with pytest.raises(KeyError, match="no such column"):
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


def test_custom_loop_gives_the_same_losses_after_a_label_out_of_range():
    before = functional_losses(*new_network(), label=1)
    with pytest.raises((RuntimeError, ValueError, IndexError)):
        functional_losses(*new_network(), label=77)
    after = functional_losses(*new_network(), label=1)
    assert after == before
    assert after[2] < after[0]


class FailsOnce(dp.DataParallelTrainer):
    """A trainer that raises once on every rank, in the second micro step of an update."""

    error = ValueError("not this one")
    calls = 0
    is_bad = True

    def training_step(self, model, inputs):
        self.calls += 1
        if self.is_bad and self.calls == 2:
            raise self.error
        return super().training_step(model, inputs)


@pytest.mark.parametrize("error", [ValueError("not this one"), KeyboardInterrupt()])
def test_gradients_of_an_interrupted_accumulation_are_dropped(tmp_path, error):
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}

    class Fails(FailsOnce):
        pass

    Fails.error = error
    expected = weights(train(tiny_roberta(), Rows(24), tmp_path / "whole", **settings).model)
    model = tiny_roberta()
    args = dp.DataParallelArguments(
        str(tmp_path / "bad"), num_train_epochs=1, learning_rate=1e-2, save_strategy="no", disable_tqdm=True, **settings
    )
    trainer = Fails(model, args, train_dataset=Rows(24))
    with pytest.raises(type(error)):
        trainer.train()
    trainer.is_bad = False
    trainer.train()
    for name, weight in expected.items():
        np.testing.assert_array_equal(weights(model)[name], weight, err_msg=name)


@pytest.mark.core
def test_custom_loop_drops_gradients_and_loss_of_an_interrupted_accumulation():
    network, optimizer = new_network()
    has_failed = []

    def forward(x, y):
        if len(has_failed) == 1:
            has_failed.append(True)
            raise ZeroDivisionError("a bad batch")
        has_failed.append(True)
        return mindspore.ops.nll_loss(mindspore.ops.log_softmax(network(x), -1), y)

    # With a known weight, the loss is not computed to compare it.
    step = dp.make_train_step(
        forward, optimizer, list(network.trainable_params()), accumulation_steps=3, loss_weight_of=lambda batch: 4
    )
    x = np.random.default_rng(1).standard_normal((4, 8)).astype(np.float32)
    batch = (mindspore.Tensor(x), mindspore.Tensor(np.zeros(4, np.int32)))
    other = (mindspore.Tensor(-x), mindspore.Tensor(np.ones(4, np.int32)))
    with pytest.raises(ZeroDivisionError, match="a bad batch"):
        # It fails in the second of three micro steps; the last one has its own guard for gradients in transit.
        step([other, other, other])
    step([batch, batch, batch])
    mine, mean = network.weight.asnumpy().copy(), step.mean_loss()

    network, optimizer = new_network()
    step = dp.make_train_step(
        lambda x, y: mindspore.ops.nll_loss(mindspore.ops.log_softmax(network(x), -1), y),
        optimizer, list(network.trainable_params()), accumulation_steps=3,
    )  # fmt: skip
    step([batch, batch, batch])
    np.testing.assert_array_equal(mine, network.weight.asnumpy())
    assert mean == step.mean_loss()


@pytest.mark.core
@pytest.mark.parametrize("again", [True, False])
def test_training_runs_again_after_all_ranks_failed_during_overlapped_gradient_sync(group, tmp_path, again):
    """The next training gets its own channel: with the same trainer or another one, with or without overlap."""

    class Fails(dp.DataParallelTrainer):
        is_bad = True

        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            loss = super().compute_loss(model, inputs, return_outputs)
            if self.is_bad and self.state.global_step == 3:
                raise ValueError("on every rank")
            return loss

    settings = {"per_device_train_batch_size": 2, "learning_rate": 0.0}
    model = tiny_roberta()
    args = dp.DataParallelArguments(
        str(tmp_path / "bad"), overlap=True, num_train_epochs=1, save_strategy="no", disable_tqdm=True, **settings
    )
    trainer = Fails(model, args, train_dataset=Rows(16 * group.world_size))
    with pytest.raises(ValueError, match="on every rank"):
        trainer.train()
    if again:
        trainer.is_bad = False
        assert trainer.train().global_step == 8
    else:
        for overlap in (True, False):
            rows = Rows(16 * group.world_size)
            other = train(tiny_roberta(), rows, tmp_path / str(overlap), overlap=overlap, **settings)
            assert other.state.global_step == 8
    dp.assert_replicas_in_sync(model)


def test_interrupted_synchronizer_is_refused_and_a_new_one_works(group):
    if group.world_size == 1:
        pytest.skip("one rank exchanges nothing")
    from mindnlp.core import nn
    from mindnlp.core.autograd import value_and_grad

    parameter = nn.Parameter(mindspore.Tensor(np.ones((3, 2), np.float32)))

    def fails():
        loss = (parameter * parameter).sum()
        if is_bad:
            raise ValueError
        return loss

    is_bad = False
    sync = dp.GradientSynchronizer([parameter], group, overlap=True)
    run = value_and_grad(fails, (parameter,), attach_grads=False)
    for number in range(3):
        is_bad = number == 2
        try:
            with sync.backward(1.0):
                _, gradients = run()
        except ValueError:
            break
        sync.accumulate(gradients)
        sync.reduce()
    with pytest.raises(RuntimeError, match="left the exchange of an update before its end .*ValueError"):
        sync.reduce()
    fresh = dp.GradientSynchronizer([parameter], group, overlap=False)
    np.testing.assert_array_equal(fresh(gradients)[0].asnumpy(), gradients[0].asnumpy())
    with pytest.raises(RuntimeError, match="make a new synchronizer or train step, on all of them"):
        sync.accumulate(gradients)
