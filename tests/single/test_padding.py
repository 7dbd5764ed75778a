"""Tests dp.PaddingCollator as tables: rows of tokens before and after."""

from __future__ import annotations

from types import SimpleNamespace

import mindspore
import numpy as np
import pytest

import mindnlp_dp as dp


def rows(**columns):
    return [dict(zip(columns, values)) for values in zip(*columns.values())]


IDS = [[5, 6, 7], [8]]


@pytest.mark.parametrize("kind", [list, np.array, lambda values: mindspore.Tensor(values, mindspore.int64)])
def test_rows_are_padded_to_the_longest_row(kind):
    samples = rows(
        input_ids=map(kind, IDS), attention_mask=map(kind, [[1, 1, 1], [1]]),
        token_type_ids=map(kind, [[0, 1, 1], [1]]), labels=map(kind, [[5, -100, 7], [8]]), score=[0.5, 1.5],
    )  # fmt: skip
    batch = dp.PaddingCollator(pad_token_id=9)(samples)
    assert {name: values.tolist() for name, values in batch.items()} == {
        "input_ids": [[5, 6, 7], [8, 9, 9]],
        "attention_mask": [[1, 1, 1], [1, 0, 0]],
        "token_type_ids": [[0, 1, 1], [1, 0, 0]],
        "labels": [[5, -100, 7], [8, -100, -100]],
        "score": [0.5, 1.5],
    }


@pytest.mark.parametrize(
    ("settings", "ids", "mask"),
    [
        ({}, [[5, 6, 7], [8, 0, 0]], [[1, 1, 1], [1, 0, 0]]),
        ({"side": "left"}, [[5, 6, 7], [0, 0, 8]], [[1, 1, 1], [0, 0, 1]]),
        ({"pad_to_multiple_of": 4}, [[5, 6, 7, 0], [8, 0, 0, 0]], [[1, 1, 1, 0], [1, 0, 0, 0]]),
        ({"pad_to_multiple_of": 3}, [[5, 6, 7], [8, 0, 0]], [[1, 1, 1], [1, 0, 0]]),
        (
            {"tokenizer": SimpleNamespace(pad_token_id=3, padding_side="left")},
            [[5, 6, 7], [3, 3, 8]],
            [[1, 1, 1], [0, 0, 1]],
        ),
        (
            {"tokenizer": SimpleNamespace(pad_token_id=3, padding_side="left"), "side": "right", "pad_token_id": 4},
            [[5, 6, 7], [8, 4, 4]],
            [[1, 1, 1], [1, 0, 0]],
        ),
    ],
)
def test_padding_follows_side_pad_token_and_pad_to_multiple_of(settings, ids, mask):
    batch = dp.PaddingCollator(**settings)(rows(input_ids=IDS))
    assert batch["input_ids"].tolist() == ids
    assert batch["attention_mask"].tolist() == mask


def test_labels_of_every_task_are_padded_or_kept():
    collate = dp.PaddingCollator(pad_to_multiple_of=4)
    assert collate(rows(input_ids=IDS, label=[1, 0]))["labels"].tolist() == [1, 0]
    # One number for each class.
    classes = [[0.0, 1.0], [1.0, 1.0]]
    assert collate(rows(input_ids=IDS, labels=classes))["labels"].tolist() == classes
    # Another text, with its own length.
    targets = collate(rows(input_ids=IDS, labels=[[7], [7, 8, 9, 7, 8]], decoder_input_ids=[[1], [1, 7, 8, 9, 7]]))
    assert targets["labels"].shape == targets["decoder_input_ids"].shape == (2, 8)
    assert targets["labels"][0].tolist() == [7] + 7 * [-100]
    assert targets["input_ids"].shape == (2, 4)
    # As long as the rows, which all have one length.
    batch = collate(rows(input_ids=[[5, 6], [7, 8]], labels=[[5, 6], [7, 8]]))
    assert batch["labels"].tolist() == [[5, 6, -100, -100], [7, 8, -100, -100]]


def test_an_empty_row_keeps_the_dtype():
    batch = dp.PaddingCollator()(rows(input_ids=[[], [5]], labels=[[], [5]]))
    assert batch["input_ids"].tolist() == [[0], [5]]
    assert batch["input_ids"].dtype == np.int64


@pytest.mark.parametrize("dtype", [bool, np.int8, np.uint8])
def test_small_integers_and_bool_are_widened(dtype):
    """A uint8 does not hold -100, and a token id may be larger than the ids of a sample."""
    rows = [{"input_ids": np.ones(size, dtype), "labels": np.ones(size, dtype)} for size in (1, 3)]
    batch = dp.PaddingCollator(pad_token_id=300)(rows)
    assert batch["input_ids"].tolist() == [[1, 300, 300], [1, 1, 1]]
    assert batch["labels"].tolist() == [[1, -100, -100], [1, 1, 1]]


def test_samples_with_different_columns_are_refused():
    rows = [{"input_ids": [1]}, {"input_ids": [1], "labels": [1]}]
    for each in (rows, rows[::-1]):
        with pytest.raises(ValueError, match="samples 0 and 1 of a batch .* same columns: one does not have 'labels'"):
            dp.PaddingCollator()(each)


def test_invalid_padding_settings_and_ragged_columns_are_refused():
    with pytest.raises(ValueError, match="no padding token; set tokenizer.pad_token"):
        dp.PaddingCollator(SimpleNamespace(pad_token_id=None, padding_side="right"))
    with pytest.raises(ValueError, match='side is "right" or "left", got \'top\''):
        dp.PaddingCollator(side="top")
    with pytest.raises(ValueError, match="pad_to_multiple_of is at least 1, got 0"):
        dp.PaddingCollator(pad_to_multiple_of=0)
    with pytest.raises(ValueError, match="'spans' have different shapes"):
        dp.PaddingCollator()(rows(input_ids=IDS, spans=[[1, 2], [1]]))
