"""Test that predictions of all ranks are gathered in the order of the data set, and padded."""

from __future__ import annotations

from collections import namedtuple

import numpy as np
import pytest

from mindnlp_dp.training.evaluate import accuracy
from mindnlp_dp.training.evaluation_gather import OrderedGatherer, concatenate, to_numpy


class TwoRanks:
    """A fake process group of two ranks, in which rank 1 computes the values of rank 0 plus 100."""

    num_calls = 0

    def all_gather_object(self, steps):
        self.num_calls += 1
        return [steps, [None if step is None else step + 100 for step in steps]]


def test_gathered_evaluation_steps_are_in_data_set_order():
    group = TwoRanks()
    gatherer = OrderedGatherer(group, gather_every=2)
    for step in ([0, 1], [4, 5], [8]):
        gatherer.add(np.array(step))
    assert gatherer.finish().tolist() == [0, 1, 100, 101, 4, 5, 104, 105, 8, 108]
    assert group.num_calls == 2


def test_evaluation_gathers_from_ranks_without_rows():
    gatherer = OrderedGatherer(TwoRanks())
    gatherer.add(None)
    assert gatherer.finish() is None
    gatherer = OrderedGatherer(TwoRanks(), gather_every=1)
    gatherer.add(np.array([1]))
    gatherer.add(None)
    assert gatherer.finish().tolist() == [1, 101]


def test_predictions_of_different_lengths_are_padded():
    parts = [np.ones((1, 2)), np.zeros((2, 3))]
    assert concatenate(parts).tolist() == [[1, 1, -100], [0, 0, 0], [0, 0, 0]]
    assert concatenate([np.ones((1, 1, 2)), np.ones((1, 2, 2))]).shape == (2, 2, 2)


@pytest.mark.parametrize(
    ("dtype", "values", "padding"),
    [("bool", [1, 0], 0), ("uint8", [1, 200], -100), ("uint32", [1, 70000], -100), ("int8", [1, -7], -100),
     ("float16", [1, 0.5], -100)],
)  # fmt: skip
def test_predictions_of_any_dtype_are_padded_with_minus_100_or_false(dtype, values, padding):
    short, long = np.array([values], dtype), np.array([values + values], dtype)
    assert concatenate([short, long]).tolist() == [[*values, padding, padding], values + values]
    assert concatenate([long, short]).tolist() == [values + values, [*values, padding, padding]]


def test_attention_maps_of_different_lengths_are_padded_in_both_dimensions():
    joined = concatenate([np.ones((1, 3, 2, 2)), np.zeros((1, 3, 4, 4))])
    assert joined.shape == (2, 3, 4, 4)
    assert joined[0, 0].tolist() == [[1, 1, -100, -100], [1, 1, -100, -100], [-100] * 4, [-100] * 4]


def test_named_tuples_of_outputs_keep_their_type():
    pair = namedtuple("pair", ["loss", "logits"])
    parts = [to_numpy(pair(np.array([number]), [np.array([[number]])])) for number in (1, 2)]
    joined = concatenate(parts)
    assert isinstance(joined, pair)
    assert (joined.loss.tolist(), joined.logits[0].tolist()) == ([1, 2], [[1], [2]])


def test_nested_outputs_are_concatenated():
    parts = [{"a": (np.array([1]), np.array([[2.0]]))}, {"a": (np.array([3]), np.array([[4.0]]))}]
    joined = concatenate(parts)
    assert joined["a"][0].tolist() == [1, 3]
    assert joined["a"][1].tolist() == [[2.0], [4.0]]


def test_accuracy_is_the_fraction_of_correct_predictions():
    assert accuracy(np.array([[1, 2], [3, 0], [0, 1]]), np.array([1, 0, 0])) == pytest.approx(2 / 3)
