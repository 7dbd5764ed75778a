"""Test Trainers with custom data loading: overridden methods that return data, and samples that are not dicts."""

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
    ("name", "use"), [("train", "train_dataset"), ("eval", "eval_dataset"), ("test", "predict's data set")]
)
def test_data_methods_that_return_a_pytorch_loader_are_refused(group, tmp_path, name, use):
    kind = override(name, lambda self, dataset=None: Loader(Rows(4)))
    trainer = kind(tiny_roberta(), dp.DataParallelArguments(str(tmp_path)), train_dataset=Rows(4), eval_dataset=Rows(4))
    call = {"train": trainer.train, "eval": trainer.evaluate, "test": lambda: trainer.predict(Rows(4))}[name]
    told = f"MyTrainer.get_{name}_dataloader returned a Loader, whose batches .* pass its data set as {use} and"
    with pytest.raises(TypeError, match=told if is_0_5 else "a Loader yields batches, .* and its collate_fn as data_"):
        call()


def test_a_pytorch_loader_is_refused_as_a_data_set(group, tmp_path):
    trainer = dp.DataParallelTrainer(tiny_roberta(), dp.DataParallelArguments(str(tmp_path)))
    with pytest.raises(TypeError, match="a Loader yields batches"):
        trainer.evaluate(Loader(Rows(4)))
    with pytest.raises(TypeError, match="a Loader yields batches"):
        dp.make_loader(Loader(Rows(4)), 2)


class IterableDataset:
    """What an IterableDataset of PyTorch inherits; its subclasses may define a length."""

    def __getitem__(self, index):
        raise NotImplementedError


class Stream(IterableDataset):
    def __len__(self):
        return 12

    def __iter__(self):
        return map(Rows(12).__getitem__, range(12))


def test_an_iterable_dataset_with_a_length_is_read_as_a_stream(group, tmp_path):
    trainer = train(tiny_roberta(), Stream(), tmp_path, per_device_train_batch_size=2, **SETTINGS)
    assert trainer.state.global_step == 3


def test_data_methods_that_return_our_loaders_train_and_evaluate_as_in_one_process(group, tmp_path):
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
def test_data_methods_of_mindnlp_0_4_may_return_mindspore_pipelines(group, tmp_path):
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


METHODS = ["_get_train_sampler", "_get_eval_sampler", "_maybe_log_save_evaluate"]
METHODS += ["_get_dataloader", "get_batch_samples"] if is_0_5 else ["get_train_dataloader", "get_eval_dataloader"]


@pytest.mark.parametrize("name", METHODS)
def test_overridden_methods_that_are_never_called_are_refused(group, tmp_path, name):
    kind = type("MyTrainer", (dp.DataParallelTrainerMixin, Trainer), {name: lambda self: None})
    with pytest.raises(ValueError, match=f"MyTrainer has its own {name}, which is not called: [a-z ]+"):
        kind(tiny_roberta(), dp.DataParallelArguments(str(tmp_path)), train_dataset=Rows(4))


# Samples that are not dicts.


class Sample:
    """An object whose attributes are columns, beside one that no model takes."""

    def __init__(self, row):
        self.input_ids, self.attention_mask, self.label = row["input_ids"], row["attention_mask"], row["label"]
        self.guid = object()


class Kind(list):
    """A data set of samples of another kind than dicts, made of ``Rows``."""

    def __init__(self, num_samples, make):
        super().__init__(make(Rows(num_samples)[index], index) for index in range(num_samples))


KINDS = {
    "tuples": (lambda row, index: (row["input_ids"], row["label"]), lambda sample: sample),
    "strings": (
        lambda row, index: " ".join(map(str, [*row["input_ids"], row["label"]])),
        lambda sample: ([*map(int, sample.split())][:-1], int(sample.split()[-1])),
    ),
    "numbers": (lambda row, index: index, lambda sample: (Rows(40).input_ids[sample], Rows(40).labels[sample])),
    "objects": (lambda row, index: Sample(row), lambda sample: (sample.input_ids, sample.label)),
    "arrays": (
        lambda row, index: np.append(row["input_ids"], row["label"]), lambda sample: (sample[:-1], sample[-1]),
    ),
}  # fmt: skip


@pytest.mark.core
@pytest.mark.parametrize("kind", KINDS)
def test_samples_of_any_kind_train_and_evaluate_with_the_users_collator(group, tmp_path, kind):
    make, read = KINDS[kind]

    def collate(samples):
        ids, labels = zip(*map(read, samples))
        return {"input_ids": np.array(ids), "attention_mask": np.ones((len(ids), LENGTH), np.int64),
                "labels": np.array(labels)}  # fmt: skip

    settings = {**SETTINGS, "dataset_shuffle": True, "per_device_train_batch_size": 2}
    trainer = train(
        tiny_roberta(), Kind(40, make), tmp_path, data_collator=collate, eval_dataset=Kind(40, make)[:7], **settings
    )
    expected = train(tiny_roberta(), Rows(40), tmp_path, eval_dataset=Kind(40, lambda row, index: row)[:7], **settings)
    for name, weight in weights(trainer.model).items():
        np.testing.assert_array_equal(weight, weights(expected.model)[name], err_msg=name)
    assert trainer.evaluate()["eval_loss"] == expected.evaluate()["eval_loss"]
    assert trainer.predict(trainer.eval_dataset).predictions.shape == (7, 3)


def test_a_stream_of_samples_of_any_kind_trains_with_the_users_collator(group, tmp_path):
    def collate(samples):
        return {"input_ids": np.array([ids for ids, _ in samples]), "labels": np.array([label for _, label in samples])}

    class Stream:
        def __iter__(self):
            return iter(Kind(40, KINDS["tuples"][0]))

    class Alike(Stream):
        def __iter__(self):
            return iter([{"input_ids": ids, "labels": label} for ids, label in super().__iter__()])

    settings = {**SETTINGS, "per_device_train_batch_size": 2}
    trainer = train(tiny_roberta(), Stream(), tmp_path, data_collator=collate, **settings)
    expected = train(tiny_roberta(), Alike(), tmp_path, **settings)
    for name, weight in weights(trainer.model).items():
        np.testing.assert_array_equal(weight, weights(expected.model)[name], err_msg=name)


def test_objects_are_read_by_their_attributes_without_a_collator(group, tmp_path):
    settings = {**SETTINGS, "per_device_train_batch_size": 2}
    objects = Kind(40, KINDS["objects"][0])
    trainer = train(tiny_roberta(), objects, tmp_path, eval_dataset=objects[:7], **settings)
    dicts = Kind(40, lambda row, index: row)[:7]
    expected = train(tiny_roberta(), Rows(40), tmp_path, eval_dataset=dicts, **settings)
    for name, weight in weights(trainer.model).items():
        np.testing.assert_array_equal(weight, weights(expected.model)[name], err_msg=name)
    assert trainer.evaluate()["eval_loss"] == expected.evaluate()["eval_loss"]


@pytest.mark.parametrize("kind", ["tuples", "strings", "numbers", "arrays"])
def test_samples_without_columns_are_refused_without_a_collator(group, tmp_path, kind):
    samples = Kind(8, KINDS[kind][0])
    named = {"tuples": "tuple", "strings": "str", "numbers": "int", "arrays": "ndarray"}[kind]
    told = rf"sample \d is a {named}, expected a dict of column names and values \(rank \d\); pass a data_collator"
    with pytest.raises(TypeError, match=told):
        train(tiny_roberta(), samples, tmp_path, **SETTINGS)
    with pytest.raises(TypeError, match=told):
        next(dp.make_loader(samples, 2).updates())


def test_a_collator_that_does_not_return_a_dict_is_refused(group, tmp_path):
    with pytest.raises(TypeError, match="the data_collator returned a tuple, expected a dict"):
        train(tiny_roberta(), Rows(8), tmp_path, data_collator=lambda samples: (1, 2), **SETTINGS)


def test_tuples_that_differ_between_ranks_are_refused_with_the_item(group, several, tmp_path):
    samples = [(index, group.rank if index == 3 else 0) for index in range(4)]
    with pytest.raises(ValueError, match="sample 3 of rank 1 is not that of rank 0: its column 'item 1' holds 1"):
        dp.make_loader(samples, 2, collate=dict)


@pytest.mark.parametrize("value", ["positive", None])
@pytest.mark.parametrize("name", ["label", "labels"])
def test_a_label_that_is_not_a_number_is_refused_with_its_sample_number(group, tmp_path, name, value):
    def make(row, index):
        return {"input_ids": row["input_ids"], name: value if index == 3 else row["label"]}

    told = rf"'labels?' of sample 3 is {value!r}, expected a number or an array of numbers \(rank \d"
    # Every rank has the sample.
    samples = Kind(4, make)
    settings = {**SETTINGS, "per_device_train_batch_size": 4}
    with alone(), pytest.raises(TypeError, match=told):
        train(tiny_roberta(), samples, tmp_path, **settings)
    with alone():
        trainer = dp.DataParallelTrainer(tiny_roberta(), dp.DataParallelArguments(str(tmp_path)))
        with pytest.raises(TypeError, match=told):
            trainer.evaluate(samples)


def test_group_by_length_refuses_samples_without_columns(group, tmp_path):
    settings = {"group_by_length": True, "data_collator": list, **SETTINGS}
    with pytest.raises(ValueError, match="samples have none: sample 0 is a tuple; set length_column_name"):
        train(tiny_roberta(), Kind(8, KINDS["tuples"][0]), tmp_path, **settings)
