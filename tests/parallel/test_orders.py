"""Test sample orders that the data determines: batches of similar lengths, and streams."""

from __future__ import annotations

import numpy as np
import pytest

import mindnlp_dp as dp
from models import Rows, alone, tiny_roberta, train, weights

LONGEST = 8


class Ragged(Rows):
    """Samples of one to eight tokens."""

    def __init__(self, num_samples: int) -> None:
        super().__init__(num_samples)
        self.lengths = np.random.default_rng(7).integers(1, LONGEST + 1, num_samples)

    def __getitem__(self, index: int) -> dict:
        length = self.lengths[index]
        return {"input_ids": self.input_ids[index, :length], "label": int(self.labels[index])}


def pad(samples):
    """Pad the samples to the longest of the batch."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    ids = [
        np.pad(sample["input_ids"], (0, longest - len(sample["input_ids"])), constant_values=1) for sample in samples
    ]
    return {
        "input_ids": np.stack(ids),
        "attention_mask": (np.stack(ids) != 1).astype(np.int64),
        "labels": np.array([sample["label"] for sample in samples]),
    }


class Watched(dp.DataParallelTrainer):
    """A trainer that records the widths of its micro-batches."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        self.__dict__.setdefault("widths", []).append(int(inputs["input_ids"].shape[1]))
        return super().compute_loss(model, inputs, *args, **kwargs)


@pytest.mark.core
def test_group_by_length_trains_the_weights_of_one_process_and_reduces_padding(group, tmp_path):
    settings = {
        "trainer_class": Watched, "group_by_length": True, "data_collator": pad, "optim": "sgd", "num_train_epochs": 2,
        "remove_unused_columns": False,
    }  # fmt: skip
    rows = Ragged(96)
    together = train(tiny_roberta(), rows, tmp_path, per_device_train_batch_size=12 // group.world_size, **settings)
    with alone():
        single = train(tiny_roberta(), Ragged(96), tmp_path, per_device_train_batch_size=12, **settings)
        mixed = train(
            tiny_roberta(),
            Ragged(96),
            tmp_path,
            per_device_train_batch_size=12,
            **{**settings, "group_by_length": False},
        )
    expected = weights(single.model)
    for name, weight in weights(together.model).items():
        np.testing.assert_allclose(weight, expected[name], rtol=0, atol=2e-6, err_msg=name)
    # Grouping must reduce padding, and the longest sample comes first.
    assert sum(single.widths) < sum(mixed.widths)
    assert single.widths[0] == LONGEST


def test_group_by_length_reads_the_lengths_from_a_column(group, tmp_path):
    class Measured(Ragged):
        def __getitem__(self, index):
            # This column reverses the order of lengths, so the test sees which lengths are used.
            return {**super().__getitem__(index), "size": LONGEST - self.lengths[index]}

    settings = {"trainer_class": Watched, "group_by_length": True, "length_column_name": "size", "data_collator": pad}
    with alone():
        trainer = train(
            tiny_roberta(),
            Measured(96),
            tmp_path,
            per_device_train_batch_size=12,
            remove_unused_columns=False,
            **settings,
        )
    assert trainer.widths[0] < LONGEST


def test_samples_without_a_length_are_refused_on_every_rank(group, tmp_path):
    with pytest.raises(ValueError, match="needs a column 'length' or 'input_ids', and samples have words"):
        train(tiny_roberta(), [{"words": 1}] * 48, tmp_path, group_by_length=True, per_device_train_batch_size=2)


class Stream:
    """An iterable of rows with a different order in every epoch."""

    def __init__(self, num_samples: int) -> None:
        self.rows, self.epoch, self.begun = Rows(num_samples), 0, []

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.begun.append(epoch)

    def __iter__(self):
        for index in np.random.default_rng(self.epoch).permutation(len(self.rows)):
            row = self.rows[int(index)]
            yield {name: row[name] for name in ("input_ids", "attention_mask", "label")}


@pytest.mark.core
@pytest.mark.parametrize("num_samples", [24, 21])
def test_a_stream_is_read_by_rank_0_only_and_trains_the_weights_of_one_process(group, tmp_path, num_samples):
    settings = {"max_steps": 9, "optim": "sgd", "logging_steps": 3}
    together = train(
        tiny_roberta(), Stream(num_samples), tmp_path, per_device_train_batch_size=12 // group.world_size, **settings
    )
    with alone():
        single = train(tiny_roberta(), Stream(num_samples), tmp_path, per_device_train_batch_size=12, **settings)
    expected = weights(single.model)
    for name, weight in weights(together.model).items():
        np.testing.assert_allclose(weight, expected[name], rtol=0, atol=2e-6, err_msg=name)
    # Only rank 0 reads, and set_epoch is called for every epoch. MindNLP 0.4's Trainer copies its data set.
    assert together.train_dataset.begun == ([0, 1, 2, 3, 4] if group.is_main else [])


def test_group_by_length_is_refused_for_a_stream(group, tmp_path):
    with pytest.raises(ValueError, match="needs a data set with an index, and a Stream has none"):
        train(tiny_roberta(), Stream(24), tmp_path, max_steps=2, group_by_length=True, per_device_train_batch_size=2)


def test_different_lengths_on_ranks_are_refused(group):
    lengths = np.arange(12) + (group.rank == group.world_size - 1)
    if group.world_size == 1:
        assert dp.make_loader(Rows(12), 2, group=group, lengths=lengths).digest_of_lengths is not None
        return
    with pytest.raises(ValueError, match="ranks have different lengths for the same samples"):
        dp.make_loader(Rows(12), 2, group=group, lengths=lengths)


def test_resume_with_other_lengths_is_refused(group, shared_tmp_path):
    settings = {"group_by_length": True, "data_collator": pad, "per_device_train_batch_size": 2, "save_steps": 1,
                "save_strategy": "steps", "remove_unused_columns": False}  # fmt: skip
    train(tiny_roberta(), Ragged(48), shared_tmp_path, max_steps=2, **settings)
    other = Ragged(48)
    other.lengths = other.lengths[::-1]
    with pytest.raises(ValueError, match="lengths was .* and is"):
        train(tiny_roberta(), other, shared_tmp_path, max_steps=4, resume=True, **settings)
