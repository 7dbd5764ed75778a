"""Test that all ranks take the same decisions: best model, early stop, learning rate, updates, fractional epochs."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import warnings

import numpy as np
import pytest
from library import EarlyStoppingCallback, TrainerCallback, is_0_5, optim

import mindnlp_dp as dp
from mindnlp_dp.checkpoint.directory import checkpoints_in
from models import Rows, alone, tiny_roberta, train, weights

EVERY_EPOCH = {"evaluation_strategy": "epoch", "save_strategy": "epoch", "num_train_epochs": 6, "dataset_shuffle": True}


def same_on_every_rank(group, value):
    values = group.all_gather_object(value)
    assert all(other == values[0] for other in values), values
    return values[0]


class Scores:
    """A metric that returns the given scores on rank 0, and random numbers if it were called on another rank."""

    def __init__(self, group, scores):
        self.scores = iter(scores if group.is_main else np.random.rand(100))

    def __call__(self, prediction):
        return {"score": next(self.scores)}


@pytest.mark.core
def test_best_model_is_the_same_on_all_ranks_and_loaded_at_the_end(group, shared_tmp_path):
    trainer = train(
        tiny_roberta(seed=1), Rows(8 * group.world_size), shared_tmp_path, eval_dataset=Rows(5),
        compute_metrics=Scores(group, [np.nan, 0.7, 0.3, 0.7, np.nan, 0.6]), per_device_train_batch_size=4,
        load_best_model_at_end=True, metric_for_best_model="score", save_total_limit=2,
        **EVERY_EPOCH,
    )  # fmt: skip
    assert same_on_every_rank(group, (trainer.state.best_metric, trainer.state.best_model_checkpoint)) == (
        0.7, str(shared_tmp_path / "checkpoint-4"),
    )  # fmt: skip
    group.barrier()
    assert sorted(os.listdir(shared_tmp_path)) == ["checkpoint-12", "checkpoint-4"]  # the last one and the best
    from mindnlp.transformers import RobertaForSequenceClassification

    best = RobertaForSequenceClassification.from_pretrained(str(shared_tmp_path / "checkpoint-4"))
    for name, weight in weights(best).items():
        np.testing.assert_array_equal(weights(trainer.model)[name], weight, err_msg=name)
    dp.assert_replicas_in_sync(trainer.model)


@pytest.mark.core
def test_best_model_may_be_evaluated_after_its_checkpoint(group, shared_tmp_path):
    """Every second update is saved, and every second save is followed by an evaluation, after its epoch."""
    trainer = train(
        tiny_roberta(seed=1), Rows(16 * group.world_size), shared_tmp_path, eval_dataset=Rows(5),
        compute_metrics=Scores(group, [0.5, 0.7, 0.3]), per_device_train_batch_size=4, metric_for_best_model="score",
        save_total_limit=2, **{**EVERY_EPOCH, "num_train_epochs": 3, "save_strategy": "steps", "save_steps": 2},
    )  # fmt: skip
    assert same_on_every_rank(group, (trainer.state.best_metric, trainer.state.best_model_checkpoint)) == (
        0.7, str(shared_tmp_path / "checkpoint-8"),
    )  # fmt: skip
    group.barrier()
    assert sorted(os.listdir(shared_tmp_path)) == ["checkpoint-12", "checkpoint-8"]


def test_save_total_limit_of_one_keeps_only_the_best_checkpoint(group, shared_tmp_path):
    train(
        tiny_roberta(seed=1), Rows(8 * group.world_size), shared_tmp_path, eval_dataset=Rows(5),
        compute_metrics=Scores(group, [0.1, 0.7, 0.3, 0.5, 0.2, 0.6]), per_device_train_batch_size=4,
        load_best_model_at_end=True, metric_for_best_model="score", greater_is_better=True, save_total_limit=1,
        **EVERY_EPOCH,
    )  # fmt: skip
    group.barrier()
    assert os.listdir(shared_tmp_path) == ["checkpoint-4"]


def test_early_stopping_stops_all_ranks_at_the_same_update(group, shared_tmp_path):
    trainer = train(
        tiny_roberta(seed=1), Rows(8 * group.world_size), shared_tmp_path, eval_dataset=Rows(5),
        compute_metrics=Scores(group, [np.nan, 0.7, 0.3, 0.5]), per_device_train_batch_size=4,
        load_best_model_at_end=True, metric_for_best_model="score", greater_is_better=True,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)], **EVERY_EPOCH,
    )  # fmt: skip
    assert same_on_every_rank(group, trainer.state.global_step) == 8


def test_reduce_lr_on_plateau_has_the_same_learning_rate_on_all_ranks(group, shared_tmp_path):
    class Plateau(dp.DataParallelTrainer):
        def create_scheduler(self, num_training_steps, optimizer=None):
            self.lr_scheduler = optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, mode="max", patience=0, factor=0.5)
            self._created_lr_scheduler = True
            return self.lr_scheduler

    trainer = train(
        tiny_roberta(seed=1), Rows(8 * group.world_size), shared_tmp_path, Plateau, eval_dataset=Rows(5),
        compute_metrics=Scores(group, [0.1, 0.7, 0.3, 0.8, 0.2, 0.9]), per_device_train_batch_size=4, logging_steps=1,
        metric_for_best_model="score", greater_is_better=True, **EVERY_EPOCH,
    )  # fmt: skip
    rates = [row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row][::2]
    assert same_on_every_rank(group, rates) == pytest.approx([0.01, 0.01, 0.01, 0.005, 0.005, 0.0025])


def test_metrics_that_evaluate_adds_are_those_of_rank_0(group, shared_tmp_path):
    class Adds(dp.DataParallelTrainer):
        def create_scheduler(self, num_training_steps, optimizer=None):
            self.lr_scheduler = optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, mode="max", patience=0, factor=0.5)
            self._created_lr_scheduler = True
            return self.lr_scheduler

        def evaluate(self, *args, **kwargs):
            metrics = super().evaluate(*args, **kwargs)
            number = self.state.global_step
            return {**metrics, **({"eval_mine": -number} if self.world.is_main else {"eval_mine": number})}

    trainer = train(
        tiny_roberta(seed=1), Rows(8 * group.world_size), shared_tmp_path, Adds, eval_dataset=Rows(5),
        per_device_train_batch_size=4, metric_for_best_model="mine", greater_is_better=True, **EVERY_EPOCH,
    )  # fmt: skip
    assert same_on_every_rank(group, trainer.optimizer.param_groups[0]["lr"]) == pytest.approx(0.01 / 2**5)
    assert same_on_every_rank(group, trainer.state.best_metric) == -2


def test_missing_metric_for_best_model_is_refused(group, shared_tmp_path):
    with pytest.raises(ValueError, match="eval_f1, which is not among the metrics: eval_score"):
        train(
            tiny_roberta(seed=1), Rows(8 * group.world_size), shared_tmp_path, eval_dataset=Rows(5),
            compute_metrics=Scores(group, [0.1]), metric_for_best_model="f1", **EVERY_EPOCH,
        )  # fmt: skip


@pytest.mark.core
@pytest.mark.parametrize("flag", ["should_training_stop", "should_epoch_stop", "should_save", "should_evaluate"])
@pytest.mark.parametrize("rank", [0, -1])
def test_stop_flags_of_any_rank_count_and_other_control_flags_only_of_rank_0(group, shared_tmp_path, flag, rank):
    """A stop from any rank stops all ranks at the same update; other flags are rank 0's decision. No rank hangs."""

    class SetsIt(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if args.process_index == range(args.world_size)[rank]:
                setattr(control, flag, state.global_step == 1)

    counts = rank == 0 or group.world_size == 1 or flag.endswith("_stop")
    told = f"rank {group.world_size - 1} set {flag} and rank 0 did not"
    with contextlib.nullcontext() if counts else pytest.warns(RuntimeWarning, match=told):
        trainer = train(
            tiny_roberta(), Rows(12 * group.world_size), shared_tmp_path, callbacks=[SetsIt()], eval_dataset=Rows(3),
            per_device_train_batch_size=4, num_train_epochs=2,
        )  # fmt: skip
    group.barrier()
    steps = {"should_training_stop": 1, "should_epoch_stop": 4}
    assert same_on_every_rank(group, trainer.state.global_step) == (steps.get(flag, 6) if counts else 6)
    assert os.path.exists(shared_tmp_path / "checkpoint-1") == (flag == "should_save" and counts)
    evaluated = any("eval_loss" in row for row in trainer.state.log_history)
    assert evaluated == (flag == "should_evaluate" and counts)


@pytest.mark.core
def test_signal_to_one_rank_stops_all_ranks_at_the_same_update(group, shared_tmp_path):
    """The signal handler does what a user's would do: it sets the stop flag of this rank's trainer."""
    trainers = []

    class Trainer(dp.DataParallelTrainer):
        def training_step(self, model, inputs):
            if self.args.process_index == self.args.world_size - 1 and self.state.global_step == 2:
                trainers.append(self)
                os.kill(os.getpid(), signal.SIGUSR1)
            return super().training_step(model, inputs)

    previous = signal.signal(
        signal.SIGUSR1, lambda number, frame: setattr(trainers[0].control, "should_training_stop", True)
    )
    try:
        trainer = train(
            tiny_roberta(), Rows(24 * group.world_size), shared_tmp_path, Trainer, per_device_train_batch_size=4
        )
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert same_on_every_rank(group, trainer.state.global_step) == 3
    dp.assert_replicas_in_sync(trainer.model)


@pytest.mark.parametrize(
    "event", ["on_epoch_begin", "on_step_begin", "on_substep_end", "on_log", "on_evaluate", "on_save"]
)
@pytest.mark.parametrize("flag", ["should_training_stop", "should_evaluate"])
def test_control_flags_of_one_rank_in_any_callback_event_do_not_hang(group, shared_tmp_path, event, flag):
    """No rank hangs, and a stop stops all ranks at the same update."""

    def sets(self, args, state, control, **kwargs):
        if args.process_index == args.world_size - 1 and state.global_step == 2:
            setattr(control, flag, True)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = train(
            tiny_roberta(), Rows(16 * group.world_size), shared_tmp_path, logging_steps=1, eval_dataset=Rows(3),
            callbacks=[type("Sets", (TrainerCallback,), {event: sets})()], per_device_train_batch_size=2,
            gradient_accumulation_steps=4, evaluation_strategy="steps", eval_steps=2, save_strategy="steps",
            save_steps=2, num_train_epochs=3,
        )  # fmt: skip
    stop_at = 3 if event in ("on_step_begin", "on_substep_end") else 2
    expected = stop_at if flag == "should_training_stop" else 6
    assert same_on_every_rank(group, trainer.state.global_step) == expected


def test_signal_during_the_agreement_on_flags_stops_all_ranks(group, shared_tmp_path):
    """A signal that arrives while the ranks agree on flags takes effect at the next update at the latest."""

    class Slow(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2 and args.process_index == args.world_size - 1:
                threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            if state.global_step == 2 and args.process_index == 0:
                time.sleep(1.0)

    class Trainer(dp.DataParallelTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            trainers.append(self)

    trainers = []
    previous = signal.signal(
        signal.SIGUSR1, lambda number, frame: setattr(trainers[0].control, "should_training_stop", True)
    )
    try:
        rows = Rows(48 * group.world_size)
        trainer = train(
            tiny_roberta(), rows, shared_tmp_path, Trainer, callbacks=[Slow()], per_device_train_batch_size=4
        )
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert same_on_every_rank(group, trainer.state.global_step) in (2, 3)


def test_equal_control_flags_on_all_ranks_give_no_warning(group, shared_tmp_path):
    """Logging, evaluating and saving at the same update leave no flag set that would cause a warning later."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*rank 0 decides")
        trainer = train(
            tiny_roberta(), Rows(16 * group.world_size), shared_tmp_path, eval_dataset=Rows(3), logging_steps=1,
            per_device_train_batch_size=4, evaluation_strategy="steps", eval_steps=2, save_strategy="epoch",
            num_train_epochs=2,
        )  # fmt: skip
    history = trainer.state.log_history
    assert [row["step"] for row in history if "loss" in row] == list(range(1, 9))
    assert [row["step"] for row in history if "eval_loss" in row] == [2, 4, 6, 8]
    assert [path.name for path in checkpoints_in(shared_tmp_path)] == ["checkpoint-4", "checkpoint-8"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"num_train_epochs": 1.5}, (8, 1.6, 18 + 12)),
        ({"num_train_epochs": 0.25}, (2, 0.4, 8)),
        ({"max_steps": 7}, (7, 1.4, 18 + 8)),
        ({"num_train_epochs": 2, "dataset_drop_last": True}, (8, 2.0, 16 + 16)),
    ],
)
def test_update_counts_are_global_and_epochs_may_be_fractional(group, tmp_path, settings, expected):
    steps, epoch, num_read = expected
    rows = Rows(18)
    settings = {"logging_steps": 0.25, "warmup_ratio": 0.5, "optim": "sgd", **settings}
    together = train(tiny_roberta(), rows, tmp_path, per_device_train_batch_size=4 // group.world_size, **settings)
    assert together.state.global_step == steps
    assert together.state.epoch == pytest.approx(epoch)
    with alone():
        single = train(tiny_roberta(), Rows(18), tmp_path, per_device_train_batch_size=4, **settings)
    rates, alone_rates = ([row.get("learning_rate") for row in t.state.log_history] for t in (together, single))
    assert rates == alone_rates
    assert len([rate for rate in rates if rate is not None]) >= 2
    assert sum(group.all_gather_object(len(together.train_dataset.read))) == num_read


@pytest.mark.core
def test_a_stream_is_trained_for_max_steps_and_read_again_when_it_ends(group, tmp_path):
    rows = Rows(10)
    opened = []

    class Stream:
        def __iter__(self):
            opened.append(1)
            return ({"input_ids": rows[i]["input_ids"], "label": rows[i]["label"]} for i in range(10))

    settings = {"max_steps": 5, "optim": "sgd", "logging_steps": 1}
    together = train(tiny_roberta(), Stream(), tmp_path, per_device_train_batch_size=4 // group.world_size, **settings)
    assert together.state.global_step == 5
    assert sum(opened) == (2 if group.is_main else 0)  # each pass has three batches, and only rank 0 reads
    with alone():
        single = train(tiny_roberta(), Stream(), tmp_path, per_device_train_batch_size=4, **settings)
    for name, weight in weights(together.model).items():
        np.testing.assert_allclose(weight, weights(single.model)[name], rtol=0, atol=2e-6, err_msg=name)


def test_stream_errors_are_raised_on_all_ranks(group, tmp_path):
    class Stream:
        def __iter__(self):
            rows = Rows(10)
            yield from ({"input_ids": rows[i]["input_ids"], "label": rows[i]["label"]} for i in range(6))
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        train(tiny_roberta(), Stream(), tmp_path, per_device_train_batch_size=1, max_steps=20)


def test_tokens_are_counted_over_all_ranks(group, tmp_path):
    trainer = train(
        tiny_roberta(), Rows(12), tmp_path, per_device_train_batch_size=4 // group.world_size, logging_steps=1,
        include_num_input_tokens_seen=True, include_tokens_per_second=True,
    )  # fmt: skip
    seen = [row["num_input_tokens_seen"] for row in trainer.state.log_history]
    assert seen == [32, 64, 96, 96]
    metrics = trainer.output.metrics
    assert metrics["train_tokens_per_second"] == pytest.approx(96 / metrics["train_seconds"], rel=1e-2)


@pytest.mark.skipif(not is_0_5, reason="MindNLP 0.4 knows the best metric where it saves")
def test_early_stopping_works_without_checkpoints(group, tmp_path):
    trainer = train(
        tiny_roberta(), Rows(8 * group.world_size), tmp_path, eval_dataset=Rows(3), max_steps=10, eval_steps=1,
        per_device_train_batch_size=2, evaluation_strategy="steps", metric_for_best_model="score",
        greater_is_better=True, compute_metrics=lambda prediction: {"score": 1.0},
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )  # fmt: skip
    # The first score is the best, and the next two do not improve on it.
    assert (trainer.state.global_step, trainer.state.best_metric) == (3, 1.0)


class Watches(TrainerCallback):
    """Records the events of an update, with the rates and the weight and gradient of one parameter."""

    def __init__(self):
        self.events, self.gradients, self.moved = [], [], []

    def __getattribute__(self, name):
        if name.startswith("on_") and name in ("on_step_begin", "on_substep_end", "on_step_end", "on_log"):
            self.events.append(name)
        return super().__getattribute__(name)

    def on_pre_optimizer_step(self, args, state, control, model=None, lr_scheduler=None, **kwargs):
        self.events.append("on_pre_optimizer_step")
        self.before, self.rate = model.classifier.out_proj.bias.asnumpy().copy(), lr_scheduler.get_last_lr()[0]
        self.gradients.append(model.classifier.out_proj.bias.grad.asnumpy().copy())

    def on_optimizer_step(self, args, state, control, model=None, lr_scheduler=None, **kwargs):
        self.events.append("on_optimizer_step")
        assert lr_scheduler.get_last_lr()[0] == self.rate
        self.moved.append((model.classifier.out_proj.bias.asnumpy() - self.before) / self.rate)


@pytest.mark.core
@pytest.mark.parametrize("zero_stage", ["auto", 1])
def test_callbacks_are_called_before_and_after_the_optimizer_step(group, tmp_path, zero_stage):
    watches = Watches()
    train(
        tiny_roberta(), Rows(16 * group.world_size), tmp_path, per_device_train_batch_size=2, optim="sgd", max_steps=2,
        gradient_accumulation_steps=2, max_grad_norm=0, callbacks=[watches], zero_stage=zero_stage, logging_steps=5,
    )  # fmt: skip
    once = ["on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end"]
    assert [event for event in watches.events if event != "on_log"] == 2 * once
    for gradient, moved in zip(watches.gradients, watches.moved):
        np.testing.assert_allclose(moved, -gradient, rtol=1e-3, atol=1e-6)
    assert same_on_every_rank(group, np.concatenate(watches.gradients).tolist())


def test_a_callback_on_one_rank_only_keeps_replicas_in_sync(group, tmp_path):
    watches = Watches()
    trainer = train(
        tiny_roberta(), Rows(8 * group.world_size), tmp_path, per_device_train_batch_size=2, optim="sgd", max_steps=2,
        callbacks=[watches] if group.is_main else [],
    )  # fmt: skip
    assert len(watches.moved) == (2 if group.is_main else 0)
    dp.assert_replicas_in_sync(trainer.model)


def test_a_callback_may_change_the_averaged_gradients(group, tmp_path):
    class Zeroes(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            for parameter in model.roberta.parameters():
                parameter.grad = parameter.grad * 0 if parameter.grad is not None else None

    before = weights(tiny_roberta())
    trainer = train(
        tiny_roberta(), Rows(8 * group.world_size), tmp_path, per_device_train_batch_size=2, optim="sgd", max_steps=2,
        callbacks=[Zeroes()],
    )  # fmt: skip
    for name, weight in weights(trainer.model).items():
        assert np.array_equal(weight, before[name]) == (not name.startswith("classifier")), name
