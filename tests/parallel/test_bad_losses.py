"""Test a NaN loss on one rank: it is reported, and all ranks either leave it out or stop together."""

from __future__ import annotations

import json
import warnings

import mindspore
import numpy as np
import pytest
from library import TrainerCallback, settings_here

import mindnlp_dp as dp
from models import Rows, alone, tiny_roberta, train, weights

POISON = 4  # a token that Rows never draws


class Poisoned(dp.DataParallelTrainer):
    """A trainer whose loss is NaN for a micro-batch with a sample that begins with POISON."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        loss = super().compute_loss(model, inputs)
        bad = bool((inputs["input_ids"][:, 0] == POISON).any())
        return loss * mindspore.Tensor(float("nan") if bad else 1.0)


def poisoned_rows(n, *samples):
    rows = Rows(n)
    rows.input_ids[list(samples), 0] = POISON
    return rows


SETTINGS = {"optim": "sgd", "learning_rate": 0.1, "dataset_shuffle": False, "logging_steps": 1, "max_grad_norm": 0.0}


@pytest.mark.core
def test_nan_loss_is_left_out_of_the_update_and_the_log(group, tmp_path):
    size = group.world_size
    # An update has 4 * size samples. In the second update, the poisoned sample is in the last rank's micro-batch.
    bad = 8 * size - 2
    rows = poisoned_rows(12 * size, bad)
    with pytest.warns(RuntimeWarning) as caught:
        together = train(tiny_roberta(seed=1), rows, tmp_path, Poisoned, per_device_train_batch_size=4, **SETTINGS)
    texts = [str(warning.message) for warning in caught]
    samples = ", ".join(map(str, range(8 * size - 4, 8 * size)))
    expected = f"the loss of samples {samples} is nan at step 1 on rank {size - 1}"
    assert any(expected in text and "left out of the update and of the log" in text for text in texts), texts
    assert together.state.global_step == 3
    assert all(np.isfinite(weight).all() for weight in weights(together.model).values())
    assert all(np.isfinite(row["loss"]) for row in together.state.log_history[:3] if size > 1)
    dp.assert_replicas_in_sync(together.model)

    # One process accumulates over the same micro-batches that the ranks had.
    with alone(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        single = train(
            tiny_roberta(seed=1), rows, tmp_path, Poisoned, per_device_train_batch_size=4,
            gradient_accumulation_steps=size, **SETTINGS,
        )  # fmt: skip
    for name, weight in weights(single.model).items():
        np.testing.assert_allclose(weights(together.model)[name], weight, rtol=0, atol=2e-6, err_msg=name)
    assert together.output.training_loss == pytest.approx(single.output.training_loss, abs=1e-6)


@pytest.mark.core
def test_nan_loss_stops_all_ranks_without_the_nan_filter(group, tmp_path):
    rows = poisoned_rows(8 * group.world_size, 8 * group.world_size - 1)
    message = f"is nan at step 1 on rank {group.world_size - 1}; look at these samples"
    with pytest.raises(FloatingPointError, match=message):
        train(
            tiny_roberta(), rows, tmp_path, Poisoned, per_device_train_batch_size=4, logging_nan_inf_filter=False,
            **SETTINGS,
        )  # fmt: skip


def test_an_update_with_only_nan_losses_changes_no_weight(group, tmp_path):
    n = 4 * group.world_size
    rows = poisoned_rows(n, *range(n))
    before = weights(tiny_roberta(seed=2))
    with pytest.warns(RuntimeWarning, match="is nan at step 0 on rank 0"):
        trainer = train(tiny_roberta(seed=2), rows, tmp_path, Poisoned, per_device_train_batch_size=4, **SETTINGS)
    assert trainer.state.global_step == 1
    first, last = trainer.state.log_history
    assert ("loss" in first, "train_loss" in last) == (False, False)
    assert "learning_rate" in first
    assert np.isnan(trainer.output.training_loss)
    for name, weight in weights(trainer.model).items():
        np.testing.assert_array_equal(weight, before[name], err_msg=name)


class Moves(TrainerCallback):
    """Notes for each update whether it changed a weight, of which all were finite."""

    def __init__(self):
        self.has_moved = []

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        self.before = weights(model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        after = weights(model)
        assert all(np.isfinite(weight).all() for weight in after.values())
        self.has_moved.append(any((after[name] != weight).any() for name, weight in self.before.items()))


class Overflowing(dp.DataParallelTrainer):
    """A trainer whose losses are finite, but whose gradient overflows at step 1."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        loss = super().compute_loss(model, inputs)
        return loss * 3e38 * 0.1 if self.state.global_step == 1 else loss


def test_infinite_grad_norm_skips_the_update_or_stops_training(group, tmp_path):
    settings = {**SETTINGS, "max_grad_norm": 1.0, "per_device_train_batch_size": 4}
    rows = Rows(12 * group.world_size)
    moves = Moves()
    with pytest.warns(RuntimeWarning, match="averaged gradient is inf at step 1.*this update is left out"):
        trainer = train(tiny_roberta(), rows, tmp_path, Overflowing, callbacks=[moves], **settings)
    assert moves.has_moved == [True, False, True]
    # What the log holds is JSON.
    json.dumps(trainer.state.log_history, allow_nan=False)
    with pytest.raises(FloatingPointError, match="the norm of the averaged gradient is inf at step 1"):
        train(tiny_roberta(), rows, tmp_path, Overflowing, logging_nan_inf_filter=False, **settings)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_or_inf_gradient_without_clipping_skips_the_update_or_stops_training(group, tmp_path, value):
    """One bad value in one gradient of one rank is found, although all losses are finite."""

    class Spoils(dp.DataParallelTrainer):
        def training_step(self, model, inputs):
            loss = super().training_step(model, inputs)
            if self.state.global_step == 1 and self.group.rank == self.group.world_size - 1:
                model.classifier.dense.weight.grad.asnumpy()[3, 5] = value
            return loss

    settings = {**SETTINGS, "per_device_train_batch_size": 4}
    rows = Rows(12 * group.world_size)
    moves = Moves()
    with pytest.warns(RuntimeWarning, match="averaged gradient holds NaN or infinity at step 1.*update is left out"):
        trainer = train(tiny_roberta(), rows, tmp_path, Spoils, callbacks=[moves], **settings)
    assert moves.has_moved == [True, False, True]
    dp.assert_replicas_in_sync(trainer.model)
    with pytest.raises(FloatingPointError, match="holds NaN or infinity at step 1"):
        train(tiny_roberta(), rows, tmp_path, Spoils, logging_nan_inf_filter=False, **settings)


def test_lr_scheduler_stays_at_the_last_update_when_a_gradient_stops_training(group, tmp_path):
    settings = {**SETTINGS, "per_device_train_batch_size": 4, "logging_nan_inf_filter": False, "max_grad_norm": 1.0}
    args = dp.DataParallelArguments(str(tmp_path), **settings_here(**settings, save_strategy="no", disable_tqdm=True))
    trainer = Overflowing(tiny_roberta(), args, train_dataset=Rows(12 * group.world_size))
    with pytest.raises(FloatingPointError, match="gradient"):
        trainer.train()
    assert trainer.lr_scheduler.last_epoch == trainer.state.global_step == 1


def test_nan_warning_names_the_sample_numbers_of_a_stream(group, tmp_path):
    class Stream:
        def __iter__(self):
            rows = poisoned_rows(8 * group.world_size, 8 * group.world_size - 1)
            return ({"input_ids": rows[i]["input_ids"], "label": rows[i]["label"]} for i in range(len(rows)))

    last = 8 * group.world_size - 1
    with pytest.warns(RuntimeWarning, match=f"the loss of samples .*{last} is nan at step 1 on rank"):
        train(tiny_roberta(), Stream(), tmp_path, Poisoned, per_device_train_batch_size=4, max_steps=2, **SETTINGS)
