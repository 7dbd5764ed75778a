"""Test DataParallelArguments: upgraded arguments, refused settings, and who logs and saves."""

from __future__ import annotations

import math
import types
from dataclasses import dataclass

import pytest
from mindnlp.engine import TrainingArguments
from mindspore.dataset import NumpySlicesDataset

import mindnlp_dp as dp
from mindnlp_dp.data.dataset_adapter import mapped
from mindnlp_dp.training.trainer.callbacks import callback_states, load_callback_states
from mindnlp_dp.training.trainer.mindnlp_0_4.arguments import upgrade_arguments
from models import Rows, tiny_roberta


@dataclass
class MyArguments(TrainingArguments):
    flavor: str = "plain"


@pytest.fixture(autouse=True)
def group():
    return dp.init_process_group()


def test_plain_training_arguments_are_upgraded(tmp_path):
    plain = TrainingArguments(str(tmp_path), learning_rate=0.5, warmup_steps=3)
    upgraded = upgrade_arguments(plain)
    assert type(upgraded) is dp.DataParallelArguments
    assert (upgraded.learning_rate, upgraded.warmup_steps, upgraded.dataset_shuffle) == (0.5, 3, True)
    assert upgraded.world_size == 1
    assert upgrade_arguments(upgraded) is upgraded


@pytest.mark.parametrize("kind", [dp.DataParallelArguments, TrainingArguments, MyArguments])
@pytest.mark.parametrize(
    ("metric", "asked", "expected"),
    [
        ("loss", None, False), ("eval_loss", None, False), ("eval_german_loss", None, False), ("log_loss", None, False),
        ("accuracy", None, True), ("lossless", None, True), ("eval_german_loss", True, True), ("f1", False, False),
    ],
)  # fmt: skip
def test_greater_is_better_is_false_for_losses_of_any_name(tmp_path, kind, metric, asked, expected):
    args = kind(str(tmp_path), metric_for_best_model=metric, greater_is_better=asked)
    assert upgrade_arguments(args).greater_is_better is expected


@pytest.mark.parametrize(
    ("value", "best", "is_better"),
    [
        (0.5, None, True),
        (0.5, 0.4, True),
        (0.4, 0.5, False),
        (math.nan, None, False),
        (math.nan, 0.5, False),
        (0.1, math.nan, True),
    ],
)
def test_a_nan_metric_is_never_better(tmp_path, value, best, is_better):
    args = dp.DataParallelArguments(str(tmp_path), metric_for_best_model="f1")
    assert args.is_better(value, best) is is_better


def test_an_upgraded_arguments_subclass_keeps_its_fields(tmp_path):
    upgraded = upgrade_arguments(MyArguments(str(tmp_path), flavor="own"))
    assert isinstance(upgraded, MyArguments)
    assert isinstance(upgraded, dp.DataParallelArguments)
    assert upgraded.flavor == "own"
    assert upgraded.bucket_cap_mb is None
    assert "flavor" in upgraded.to_dict()


def test_upgraded_arguments_are_validated(tmp_path, group, monkeypatch):
    monkeypatch.setattr(type(group), "world_size", 2)
    with pytest.raises(ValueError, match="auto_find_batch_size with several ranks"):
        upgrade_arguments(TrainingArguments(str(tmp_path), auto_find_batch_size=True))


def test_invalid_argument_values_and_types_are_refused(tmp_path):
    with pytest.raises(ValueError, match="gradient_accumulation_steps must be at least 1, got 0"):
        dp.DataParallelArguments(str(tmp_path), gradient_accumulation_steps=0)
    with pytest.raises(TypeError, match="args must be a DataParallelArguments, got str"):
        upgrade_arguments("out")


@pytest.mark.parametrize(
    ("ranks", "on_each_node", "expected"),
    [((0, 0), False, True), ((2, 0), False, False), ((2, 0), True, True), ((3, 1), True, False), ((0, 0), True, True)],
)
def test_the_first_rank_of_the_job_or_of_each_host_logs_and_saves(monkeypatch, tmp_path, ranks, on_each_node, expected):
    """Check two hosts of two ranks: the first rank of the job, or the first rank of each host, logs and saves."""
    args = dp.DataParallelArguments(str(tmp_path), log_on_each_node=on_each_node, save_on_each_node=on_each_node)
    rank, local_rank = ranks
    place = types.SimpleNamespace(rank=rank, local_rank=local_rank, world_size=4)
    monkeypatch.setattr(dp.DataParallelArguments, "process_group", place)
    assert args.should_log == args.should_save == expected


def test_fp16_without_effect_gives_a_warning(tmp_path):
    with pytest.warns(RuntimeWarning, match="fp16 has no effect on training in MindNLP 0.4.1"):
        dp.DataParallelArguments(str(tmp_path), fp16=True)


def test_bf16_full_eval_is_refused_on_a_cpu_and_fp16_full_eval_works(tmp_path):
    with pytest.raises(ValueError, match="bf16_full_eval is not supported on a CPU"):
        dp.DataParallelArguments(str(tmp_path), bf16_full_eval=True)
    with pytest.raises(ValueError, match="bf16_full_eval is not supported on a CPU"):
        dp.DataParallelTrainer(tiny_roberta(), TrainingArguments(str(tmp_path), bf16_full_eval=True))
    args = dp.DataParallelArguments(str(tmp_path), fp16_full_eval=True)
    trainer = dp.DataParallelTrainer(tiny_roberta(), args, eval_dataset=Rows(4))
    assert trainer.evaluate()["eval_loss"] > 0


def test_dataset_num_workers_without_effect_gives_a_warning(tmp_path):
    with pytest.warns(RuntimeWarning, match="dataset_num_workers has no effect here: each rank reads its samples"):
        dp.DataParallelArguments(str(tmp_path), dataset_num_workers=4)


def test_map_fn_is_refused_for_lists_and_batched_data_sets():
    with pytest.raises(ValueError, match="map_fn works on the samples of a MindSpore data set, .* is a list;"):
        mapped([{"x": 1}], lambda x: x)
    batches = NumpySlicesDataset({"x": [1, 2]}).batch(2)
    with pytest.raises(ValueError, match="is a BatchDataset that is batched already"):
        mapped(batches, lambda x: x)


def test_callback_state_in_the_form_of_transformers_is_restored():
    class Counts:
        def __init__(self, limit=3):
            self.limit, self.count = limit, 0

        def state(self):
            return {"args": {"limit": self.limit}, "attributes": {"count": self.count}}

        @classmethod
        def from_state(cls, state):
            raise AssertionError("the callback is there")

    counts, later = Counts(), Counts(limit=5)
    counts.count = 2
    load_callback_states([later], callback_states([counts]))
    # What the user passes to a resumed run counts.
    assert (later.limit, later.count) == (5, 2)


def test_a_callback_without_load_state_dict_is_refused():
    class Keeps:
        def state_dict(self):
            return {"n": 1}

    states = callback_states([Keeps()])
    with pytest.raises(TypeError, match="Keeps has state_dict.*and no load_state_dict"):
        load_callback_states([Keeps()], states)


@pytest.mark.parametrize("kind", [TrainingArguments, dp.DataParallelArguments])
def test_an_unknown_optimizer_is_refused_with_the_list_of_known_ones(tmp_path, kind):
    message = r"optim='adafactor': MindNLP 0.4.1 has 'adamw' or 'sgd', and mindnlp_dp adds 'muon',.* optimizers=\(opt"
    with pytest.raises(ValueError, match=message):
        kind(str(tmp_path), optim="adafactor")
