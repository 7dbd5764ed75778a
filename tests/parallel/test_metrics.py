"""Test the metrics of a Trainer's log: samples and tokens of all ranks, the time of the slowest, what is excluded."""

from __future__ import annotations

import time

import numpy as np
import pytest
from library import TrainerCallback, is_0_5, settings_here

import mindnlp_dp as dp
from mindnlp_dp.runtime import heartbeat
from mindnlp_dp.training.metrics import Activity, SpeedMeter, count_input_tokens, count_label_tokens
from models import Rows, tiny_roberta, train

SPEED = ("step_seconds", "samples_per_second", "input_tokens_per_second", "gradient_sync_share", "peak_memory_gib")


class Sleep(TrainerCallback):
    """Sleeps in each update on one rank, in each evaluation and in each checkpoint on all."""

    def __init__(self, rank):
        self.rank = rank

    def on_step_begin(self, args, state, control, **kwargs):
        if args.process_index == self.rank:
            time.sleep(0.1)

    def on_evaluate(self, args, state, control, **kwargs):
        time.sleep(0.3)

    def on_save(self, args, state, control, **kwargs):
        time.sleep(0.2)


def rows_of(trainer):
    return [row for row in trainer.state.log_history if "loss" in row]


@pytest.mark.core
def test_logged_speed_counts_all_ranks_and_excludes_evaluation_and_checkpoints(group, shared_tmp_path):
    size, num_rows = group.world_size, 24
    trainer = train(
        tiny_roberta(), Rows(num_rows), shared_tmp_path, eval_dataset=Rows(4), callbacks=[Sleep(size - 1)],
        per_device_train_batch_size=max(1, 4 // size), num_train_epochs=1, logging_steps=2, evaluation_strategy="epoch",
        save_strategy="epoch", peak_teraflops=1e-3,
    )  # fmt: skip
    lines = rows_of(trainer)
    updates = trainer.state.global_step
    for line in lines:
        assert all(line[name] >= 0 for name in SPEED)
        # The rank that sleeps is the slowest, and the others wait for it.
        assert line["step_seconds"] >= 0.1
        samples = line["samples_per_second"] * line["step_seconds"]
        assert samples == pytest.approx(num_rows / updates, rel=0.05)
        # All rows have the same length, without padding.
        length = len(Rows(1)[0]["input_ids"])
        assert line["input_tokens_per_second"] == pytest.approx(length * line["samples_per_second"], rel=0.01)
        assert line["mfu"] == pytest.approx(line["teraflops_per_second"] / (size * 1e-3), rel=0.01)
        assert "label_tokens_per_second" not in line
    metrics = trainer.output.metrics
    assert metrics["evaluation_seconds"] >= 0.3
    assert metrics["checkpoint_seconds"] >= 0.2
    assert metrics["train_seconds"] >= 0.1 * updates
    assert metrics["train_seconds"] < metrics["train_runtime"] - 0.5 + 0.01
    assert metrics["train_samples_per_second"] == pytest.approx(num_rows / metrics["train_seconds"], rel=0.01)
    assert metrics["train_steps_per_second"] == pytest.approx(updates / metrics["train_seconds"], rel=0.01)
    same = group.all_gather_object([{k: v for k, v in line.items() if k != "epoch"} for line in lines])
    assert all(other == same[0] for other in same)


def test_flos_of_a_failed_train_call_are_not_counted_in_the_next(group, tmp_path):
    """The first call trains five updates, without a log line, before it fails."""

    class Fails(TrainerCallback):
        calls = 0

        def on_step_end(self, args, state, control, **kwargs):
            self.calls += 1
            if self.calls == 5:
                raise InterruptedError

    rows = Rows(32)
    settings = {
        "per_device_train_batch_size": max(1, 4 // group.world_size), "logging_steps": 8, "num_train_epochs": 1,
        "save_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip
    seen = []

    class Watch(dp.DataParallelTrainer):
        def log(self, logs, *rest, **more):
            seen.append((logs, self.training_loop.speed.total.flos, self.training_loop.speed.total.updates))
            super().log(logs, *rest, **more)

    args = dp.DataParallelArguments(str(tmp_path), **settings_here(**settings))
    trainer = Watch(tiny_roberta(), args, train_dataset=rows, callbacks=[Fails()])
    with pytest.raises(InterruptedError):
        trainer.train()
    trainer.train()
    whole = train(tiny_roberta(), rows, tmp_path / "whole", trainer_class=Watch, **settings)
    (again, flos, updates), *_ = seen
    assert updates == 8
    assert flos == pytest.approx(whole.state.total_flos, rel=1e-6)
    assert again["teraflops_per_second"] * again["step_seconds"] * 8e12 == pytest.approx(flos, rel=1e-3)


def test_heartbeat_and_progress_bar_show_the_speed(group, tmp_path, monkeypatch):
    reported, shown = [], []
    monkeypatch.setattr(heartbeat, "report_speed", reported.append)

    class Bar:
        def set_postfix(self, values, refresh):
            shown.append(values)

    class Bars(TrainerCallback):
        training_bar = Bar()

    trainer = train(
        tiny_roberta(), Rows(8), tmp_path, callbacks=[Bars()], logging_steps=1,
        per_device_train_batch_size=max(1, 4 // group.world_size),
    )  # fmt: skip
    lines = rows_of(trainer)
    assert len(lines) == len(reported) == len(shown)
    for line, report, bar in zip(lines, reported, shown):
        assert report["step_seconds"] == line["step_seconds"]
        assert set(bar) == {"loss", "s/step", "samples/s", "tokens/s"}


@pytest.mark.skipif(is_0_5, reason="one library is enough here")
def test_label_tokens_of_language_models_exclude_the_first_token(group, tmp_path):
    """The first label of a row is not one; without a saved checkpoint no time is lost to any."""
    import tiny_transformers

    class Texts:
        ids = np.arange(80).reshape(8, 10) % 40

        def __len__(self):
            return 8

        def __getitem__(self, index):
            return {"input_ids": self.ids[index], "labels": self.ids[index]}

    trainer = train(
        tiny_transformers.build("llama"), Texts(), tmp_path, logging_steps=1,
        per_device_train_batch_size=max(1, 4 // group.world_size),
    )  # fmt: skip
    for line in rows_of(trainer):
        assert line["label_tokens_per_second"] == pytest.approx(0.9 * line["input_tokens_per_second"], rel=1e-3)
        assert "mfu" not in line
    assert "checkpoint_seconds" not in trainer.output.metrics


def test_speed_meter_handles_no_updates_and_ranks_without_samples(group):
    meter = SpeedMeter(group, group)
    meter.start()
    assert set(meter.since_log()) == {"peak_memory_gib"}
    with meter.during(Activity.CHECKPOINT):
        time.sleep(0.05)
    meter.add_update(0.0)
    if group.is_main:
        meter.add_batch(3, 6, 3)
    line = meter.since_log()
    meter.stop()
    assert line["checkpoint_seconds"] >= 0.05
    assert line["step_seconds"] < 0.05
    # Both are rounded to thousandths.
    assert line["input_tokens_per_second"] == pytest.approx(2 * line["samples_per_second"], rel=1e-2)
    assert line["label_tokens_per_second"] == pytest.approx(line["samples_per_second"], rel=1e-2)
    assert meter.of_run()["train_seconds"] < 0.05


def test_input_and_label_tokens_exclude_padding_and_ignored_labels():
    ids = np.ones((2, 3), np.int64)
    assert count_input_tokens({"input_ids": ids}, "input_ids") == 6
    assert count_input_tokens({"input_ids": ids, "attention_mask": np.array([[1, 0, 0], [1, 1, 0]])}, "input_ids") == 3
    # A mask of pairs of tokens, as packed rows have, says nothing about padding.
    assert count_input_tokens({"input_ids": ids, "attention_mask": np.zeros((2, 1, 3, 3))}, "input_ids") == 6
    assert count_input_tokens({"pixel_values": np.ones((2, 3), np.float32)}, "pixel_values") == 0
    assert count_input_tokens({}, "input_ids") == 0
    assert count_label_tokens({"labels": np.array([1, 0])}) == 0
    assert count_label_tokens({"labels": np.array([[1, -100], [-100, -100]])}) == 1
    assert count_label_tokens({"labels": np.array([[1, 2, 3], [-100, -100, 4]])}, shifted=True) == 3
    assert count_label_tokens({"labels": np.ones((2, 2), np.float32)}) == 0
