"""Test global batches that scale with the number of ranks: one pass per epoch, learning rate in proportion."""

from __future__ import annotations

import math

import numpy as np
import pytest
from library import TrainerCallback, is_0_5
from mindspore.dataset import NumpySlicesDataset

import mindnlp_dp as dp
from mindnlp_dp.data.sampler import epoch_order
from mindnlp_dp.runtime.job_context import attempt_env
from models import Rows, tiny_roberta, train, weights

NUM_SAMPLES = 37
# The plan: twelve samples per update, four updates per epoch.
SETTINGS = {
    "global_batch_size": 12, "per_device_train_batch_size": 5, "num_train_epochs": 3, "learning_rate": 1e-2,
    "warmup_steps": 3, "lr_scheduler_type": "cosine", "logging_steps": 1, "save_strategy": "steps", "save_steps": 1,
}  # fmt: skip
PLANNED = 12
NUMBERS = {tuple(row): number for number, row in enumerate(Rows(NUM_SAMPLES).input_ids.tolist())}


class Stop(TrainerCallback):
    """Interrupts the training after ``step`` updates, when the last one is already saved."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


class Notes(dp.DataParallelTrainer):
    """Records the samples that this rank contributes to every update."""

    updates: list

    def training_step(self, model, inputs, *args):
        numbers = [NUMBERS[tuple(row)] for row in inputs["input_ids"].asnumpy().tolist()]
        # In its first micro-step a run has a dummy batch where a rank has no rows.
        if self.training_loop.across_ranks.loss_weight > 0:
            self.updates.append((self.state.global_step, numbers))
        return super().training_step(model, inputs, *args)


@pytest.fixture
def missing(group, monkeypatch):
    """Return a function that sets the full size of the job to ``times`` the present ranks, with scaled batches."""

    def tell(times):
        for name, value in attempt_env(0, "job", times * group.world_size, scale_batch=True).items():
            if name.endswith(("FULL_SIZE", "SCALE_BATCH")):
                monkeypatch.setenv(name, value)

    return tell


def run(folder, *, stop_at=None, kind=Notes, rows=None, **more):
    callbacks = [Stop(stop_at)] if stop_at else []
    settings = {**SETTINGS, **more}
    return train(tiny_roberta(dropout=0.0), rows or Rows(NUM_SAMPLES), folder, kind, callbacks=callbacks, **settings)


def read_by_all(group, updates):
    """Return for each update the sorted samples that all ranks read together."""
    read = {}
    for ranks in group.all_gather_object(updates):
        for step, mine in ranks:
            read.setdefault(step, []).extend(mine)
    return [sorted(read[step]) for step in sorted(read)]


@pytest.mark.core
def test_elastic_batches_and_learning_rate_follow_ranks_that_leave_and_return(
    group, shared_tmp_path, missing, monkeypatch
):
    """Two updates run with all ranks, three with a third of them, and the rest with all again."""
    monkeypatch.setattr(Notes, "updates", [], raising=False)
    with pytest.raises(KeyboardInterrupt):
        run(shared_tmp_path, stop_at=2)
    missing(3)
    with pytest.raises(KeyboardInterrupt):
        run(shared_tmp_path, stop_at=5, resume=True)
    missing(1)
    trainer = run(shared_tmp_path, resume=True)

    sizes = [12, 12, 4, 4, 4, 1, *[12, 12, 12, 1] * 2]
    order = np.concatenate([epoch_order(NUM_SAMPLES, 42, epoch) for epoch in range(3)])
    ends = np.cumsum(sizes)
    assert ends[-1] == len(order)
    expected = [sorted(order[end - size : end].tolist()) for end, size in zip(ends, sizes)]
    assert read_by_all(group, Notes.updates) == expected

    state = trainer.state
    assert (state.global_step, state.max_steps, state.epoch) == (len(sizes), len(sizes), 3.0)
    # A log shows the learning rate of the next update (with MindNLP 0.5, of the last one): a third for a third of a
    # batch, at the schedule's position that corresponds to the samples seen.
    updates_before = [0, 1, 2, 2, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    share = [1, 1, *[1 / 3] * 3, *[1] * 9]

    def planned_rate(updates):
        if updates < 3:
            return 1e-2 * updates / 3
        return 1e-2 * 0.5 * (1 + math.cos(math.pi * (updates - 3) / (12 - 3)))

    logged = [row["learning_rate"] for row in state.log_history if "learning_rate" in row and "loss" in row]
    rates = [share[step - 1] * planned_rate(updates_before[step - is_0_5]) for step in range(1, len(sizes) + 1)]
    assert logged == pytest.approx(rates)


@pytest.mark.parametrize("steps", [{"num_train_epochs": 2}, {"max_steps": 7}])
def test_elastic_start_with_half_the_ranks_equals_half_the_batch(group, shared_tmp_path, missing, steps):
    common = {**steps, "lr_scheduler_type": "constant", "warmup_steps": 0, "kind": dp.DataParallelTrainer}
    # Seven planned updates are two epochs without the last sample; with half the batch they take 13 updates.
    plain = {**common, "max_steps": 13} if "max_steps" in steps else common
    half = run(shared_tmp_path / "half", **{**plain, "global_batch_size": 6, "learning_rate": 5e-3})
    missing(2)
    scaled = run(shared_tmp_path / "scaled", **common)
    assert scaled.state.global_step == half.state.global_step == (13 if "max_steps" in steps else 14)
    for name, weight in weights(half.model).items():
        np.testing.assert_array_equal(weights(scaled.model)[name], weight, err_msg=name)
    # The full number of ranks can resume the run with the planned batch size.
    missing(1)
    again = run(shared_tmp_path / "scaled", resume=True, **common)
    assert again.state.global_step == scaled.state.global_step
    assert again.training_loop.loader.global_batch_size == PLANNED


def test_elastic_accumulation_is_not_scaled_again_by_a_second_train_call(group, shared_tmp_path, monkeypatch):
    """A third of the ranks takes three times as many micro steps in each training, not nine times in the second."""
    for name, value in attempt_env(0, "job", 3 * group.world_size).items():
        if name.endswith("FULL_SIZE"):
            monkeypatch.setenv(name, value)
    settings = {"global_batch_size": None, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    trainer = run(shared_tmp_path, kind=dp.DataParallelTrainer, max_steps=1, save_strategy="no", **settings)
    args = trainer.args
    for _ in range(2):
        assert trainer.training_loop.loader.global_batch_size == 12 * group.world_size
        assert trainer.training_loop.loader.micro_steps == 6
        # The user's arguments stay as they are, and what is changed in them counts.
        assert trainer.args.gradient_accumulation_steps == 2
        args.max_steps += 1
        trainer.train()
        assert trainer.state.global_step == args.max_steps


def test_elastic_batch_scaling_refuses_pipelines_grouped_lengths_and_plateaus(group, shared_tmp_path, missing):
    columns = {"input_ids": np.stack([Rows(8)[i]["input_ids"] for i in range(8)]), "labels": np.zeros(8, np.int32)}
    missing(2)
    settings = {"kind": dp.DataParallelTrainer, "max_steps": 1}
    with pytest.raises(ValueError, match="supported for a data set with an index"):
        run(shared_tmp_path, rows=NumpySlicesDataset(columns, shuffle=False).batch(3), **settings)
    with pytest.raises(ValueError, match="not if it is grouped by length"):
        run(shared_tmp_path, group_by_length=True, **settings)
    with pytest.raises(ValueError, match="a ReduceLROnPlateau does not say what it is at another step"):
        run(
            shared_tmp_path, lr_scheduler_type="reduce_lr_on_plateau", evaluation_strategy="steps",
            eval_dataset=Rows(8), **settings,
        )  # fmt: skip
