"""Test Trainers with data loading of the user's own: overridden methods that open data, samples that are not dicts."""

from __future__ import annotations

import numpy as np
import pytest
from library import Trainer, is_0_5
from mindspore.dataset import GeneratorDataset

import mindnlp_dp as dp
from models import LENGTH, Rows, alone, tiny_roberta, train, weights

OPENS = "dataloader" if is_0_5 else "dataset"
SETTINGS = {"max_steps": 3, "optim": "sgd", "dataset_shuffle": False}


def override(name, function):
    """Return a Trainer of the user's own with one method overridden."""
    return type("MyTrainer", (dp.DataParallelTrainerMixin, Trainer), {f"get_{name}_{OPENS}": function})


class Loader:
    """What a DataLoader of PyTorch looks like."""

    collate_fn, batch_size = list, 2

    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        return iter([self.dataset[0]])

    def __len__(self):
        return 1


@pytest.mark.parametrize(
    ("name", "use"), [("train", "train_dataset"), ("eval", "eval_dataset"), ("test", "the data set of predict")]
)
def test_a_method_that_returns_a_loader_of_pytorch_gets_one_sentence(group, tmp_path, name, use):
    kind = override(name, lambda self, dataset=None: Loader(Rows(4)))
    trainer = kind(tiny_roberta(), dp.DataParallelArguments(str(tmp_path)), train_dataset=Rows(4), eval_dataset=Rows(4))
    call = {"train": trainer.train, "eval": trainer.evaluate, "test": lambda: trainer.predict(Rows(4))}[name]
    told = f"MyTrainer.get_{name}_dataloader returned a Loader, whose batches .* pass its data set as {use} and"
    with pytest.raises(TypeError, match=told if is_0_5 else "a Loader yields batches, .* and its collate_fn as data_"):
        call()


def test_a_loader_of_pytorch_is_not_taken_for_a_data_set(group, tmp_path):
    trainer = dp.DataParallelTrainer(tiny_roberta(), dp.DataParallelArguments(str(tmp_path)))
    with pytest.raises(TypeError, match="a Loader yields batches"):
        trainer.evaluate(Loader(Rows(4)))
    with pytest.raises(TypeError, match="a Loader yields batches"):
        dp.make_loader(Loader(Rows(4)), 2)


def test_methods_that_return_loaders_of_ours_train_and_evaluate_as_in_one_process(group, tmp_path):
    columns = ["input_ids", "attention_mask", "label"]

    def open_train(self):
        return dp.make_loader(Rows(12), 4 // group_size(), columns=columns)

    def open_eval(self, dataset=None):
        # Windows of several micro-batches.
        return dp.make_loader(Rows(7), 1, 2, columns=columns)

    def run():
        kind = type("Both", (override("train", open_train),), {f"get_eval_{OPENS}": open_eval})
        trainer = train(tiny_roberta(), Rows(1), tmp_path, trainer_class=kind, eval_dataset=Rows(1), **SETTINGS)
        return trainer, trainer.evaluate()

    trainer, metrics = run()
    with alone():
        expected, expected_metrics = run()
    assert metrics["eval_loss"] == pytest.approx(expected_metrics["eval_loss"], rel=1e-5)
    for name, weight in weights(trainer.model).items():
        np.testing.assert_allclose(weight, weights(expected.model)[name], rtol=0, atol=2e-6, err_msg=name)


def group_size():
    return dp.get_process_group().world_size


@pytest.mark.skipif(is_0_5, reason="these methods of MindNLP 0.4 return data sets")
def test_methods_of_mindnlp_0_4_may_return_data_sets(group, tmp_path):
    rows = Rows(16)
    source = [(rows.input_ids[i], np.ones(LENGTH, np.int64), rows.labels[i]) for i in range(len(rows))]

    def pipeline(self, dataset=None):
        return GeneratorDataset(source, ["input_ids", "attention_mask", "labels"], shuffle=False).batch(4)

    kind = type("Both", (override("train", pipeline),), {"get_eval_dataset": pipeline})
    trainer = train(tiny_roberta(), Rows(1), tmp_path, trainer_class=kind, eval_dataset=Rows(1), **SETTINGS)
    expected = train(tiny_roberta(), rows, tmp_path, eval_dataset=rows, global_batch_size=4, **SETTINGS)
    for name, weight in weights(trainer.model).items():
        np.testing.assert_allclose(weight, weights(expected.model)[name], rtol=0, atol=2e-6, err_msg=name)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected.evaluate()["eval_loss"], rel=1e-5)


@pytest.mark.skipif(is_0_5, reason="Transformers calls these methods, or they have an error of their own")
@pytest.mark.parametrize("name", ["get_train_dataloader", "get_eval_dataloader", "_get_train_sampler"])
def test_methods_that_mindnlp_0_4_never_calls_are_an_error(group, tmp_path, name):
    kind = type("MyTrainer", (dp.DataParallelTrainerMixin, Trainer), {name: lambda self: None})
    with pytest.raises(ValueError, match=f"MyTrainer has its own {name}, which MindNLP 0.4's Trainer does not call"):
        kind(tiny_roberta(), dp.DataParallelArguments(str(tmp_path)), train_dataset=Rows(4))
