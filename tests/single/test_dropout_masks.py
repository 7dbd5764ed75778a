"""Test dropout masks: a sample has the same mask in any batch, on any rank, and at any padded length."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindnlp_dp.data.batches import streams_of
from mindnlp_dp.dropout import dropout_masks
from mindnlp_dp.runtime.random_state import MaskRecord, SampleShard, SampleStreams, ShardOf, seeded, shared_by_samples

# Samples, tokens, features, heads, choices and batches end to end; letters without a space are one dimension.
LAYOUTS = [
    "B D", "BL D", "B L D", "BR L D", "CB L D", "B D L", "L B D",
    "B N L L", "BR N L L", "CB N L L", "BN L L", "L L B N",
]  # fmt: skip


def sample_masks(shape, positions, *, lengths=(), choices=(), starts=None, shard=None, key=(5, 3), p=0.5):
    """Return the masks of a tensor of ``shape`` whose samples have these positions in the global batch."""
    streams = SampleStreams(
        key[0], np.array(positions), frozenset(lengths), frozenset(choices), starts or {}, shard=shard
    )
    with seeded(1, streams):
        return dropout_masks.dropout_mask(shape, p, (0, key[1])).reshape(shape)


def masks_by_sample(layout, positions, length, starts=None):
    """Return masks with the samples first, and the dimensions of a sample's mask that count tokens."""
    sizes = {"B": len(positions), "L": length, "D": 7, "N": 6, "R": 2, "C": 4}
    shape = [math.prod(sizes[letter] for letter in word) for word in layout.split()]
    masks = sample_masks(shape, positions, lengths=[length], choices=[2], starts=starts)
    letters = layout.replace(" ", "")
    masks = np.moveaxis(masks.reshape([sizes[letter] for letter in letters]), letters.index("B"), 0)
    return masks, [at for at, letter in enumerate(letters.replace("B", "")) if letter == "L"]


def first_tokens(mask, tokens, size):
    for each in tokens:
        mask = mask.take(range(size), each)
    return mask


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5])
@pytest.mark.parametrize("shape", [(400, 10_001), (40, 4, 160, 150)])
def test_sample_masks_drop_the_fraction_p_and_are_independent(p, shape):
    keep = sample_masks(shape, range(shape[0]), lengths=[160, 150], p=p).reshape(shape[0], -1) - (1 - p)
    assert abs(keep.sum()) < 5 * np.sqrt(keep.size * p * (1 - p))
    for one, other in ((keep[1:], keep[:-1]), (keep[:, 1:], keep[:, :-1])):
        assert abs(np.mean(one * other) / (p * (1 - p))) < 5 / np.sqrt(one.size)


@given(num_rows=st.integers(1, 12), per_row=st.integers(1, 70), seed=st.integers(0, 99))
@settings(max_examples=30)
def test_a_sample_has_the_same_dropout_mask_in_any_batch(num_rows, per_row, seed):
    """Compare the rows of one batch with batches of single rows in another order."""
    positions = np.random.default_rng(seed).permutation(num_rows)
    expected = sample_masks((num_rows, per_row), range(num_rows), p=0.3)
    for position in positions:
        np.testing.assert_array_equal(sample_masks((1, per_row), [position], p=0.3)[0], expected[position])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("length", [5, 31, 33, 64])
def test_the_padded_length_does_not_change_a_dropout_mask(layout, length):
    """Compare a sample of 5 tokens that is padded beside others with the same sample alone, without padding."""
    padded, tokens = masks_by_sample(layout, [4, 0, 9], length)
    alone, _ = masks_by_sample(layout, [9], 5)
    np.testing.assert_array_equal(first_tokens(padded[2], tokens, 5), alone[0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_padding_side_does_not_change_a_dropout_mask(layout):
    """Texts of 5, 12 and 9 tokens are padded to 12 on the left, and on the right."""
    starts = {12: np.array([[7], [0], [3]]).repeat(2 if "R" in layout else 1, 1)}
    left, tokens = masks_by_sample(layout, [4, 0, 9], 12, starts=starts)
    right, _ = masks_by_sample(layout, [4, 0, 9], 12)
    for number, size in enumerate((5, 12, 9)):
        flipped = np.flip(left[number], tokens)
        mine = np.flip(first_tokens(flipped, tokens, size), tokens)
        np.testing.assert_array_equal(mine, first_tokens(right[number], tokens, size))


def test_padding_does_not_change_a_cross_attention_dropout_mask():
    """Cross-attention of 7 tokens of the decoder to 40 of the encoder, padded to 33 and 64."""
    padded = sample_masks((2, 4, 33, 64), [1, 2], lengths=[33, 64])
    np.testing.assert_array_equal(padded[1:, :, :7, :40], sample_masks((1, 4, 7, 40), [2], lengths=[7, 40]))


@pytest.mark.parametrize(
    ("of", "shape", "axis", "bounds"),
    [
        (ShardOf.HEADS, (3, 6, 40, 40), 1, (0, 3, 6)), (ShardOf.WIDTH, (3, 40, 7), 2, (0, 3, 7)),
        (ShardOf.TOKENS, (3, 41, 7), 1, (0, 21, 41)), (ShardOf.TOKENS, (3, 41), 1, (0, 14, 28, 41)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_padded_on_the_left", [False, True])
def test_masks_of_head_width_and_token_shards_are_slices_of_the_full_mask(
    of, shape, axis, bounds, is_padded_on_the_left
):
    positions, lengths = np.array([4, 0, 9]), [40, 41]
    starts = {41: np.array([[7], [0], [3]])} if is_padded_on_the_left else None
    if len(shape) == 2:
        # Flattened tokens, as in an adapter of a mixture of experts.
        expected = sample_masks((3 * 41, 7), positions, lengths=lengths, starts=starts).reshape(3, 41, 7)
    else:
        expected = sample_masks(shape, positions, lengths=lengths, starts=starts)
    parts = []
    for first, last in zip(bounds, bounds[1:]):
        own = list(expected.shape)
        own[axis] = last - first
        flat = (3 * own[1], 7) if len(shape) == 2 else tuple(own)
        # Three heads are one block.
        shard = (
            SampleShard(first // 3, last // 3, 2) if of is ShardOf.HEADS else SampleShard(first, last, bounds[-1], of)
        )
        mine = sample_masks(flat, positions, lengths=lengths, starts=starts, shard=shard)
        parts.append(mine.reshape(own))
    np.testing.assert_array_equal(np.concatenate(parts, axis), expected)


def test_masks_of_head_shards_are_slices_with_several_rows_per_sample():
    """Shard heads that are a dimension of each of a sample's two rows, and heads that are its rows."""
    positions, shard, lengths = np.array([3, 1]), SampleShard(1, 2, 3), [40, 36]
    whole = sample_masks((4, 6, 40, 36), positions, lengths=lengths).reshape(2, 2, 6, 40, 36)
    mine = sample_masks((4, 2, 40, 36), positions, lengths=lengths, shard=shard)
    np.testing.assert_array_equal(mine.reshape(2, 2, 2, 40, 36), whole[:, :, 2:4])
    flat = sample_masks((12, 40, 36), positions, lengths=lengths).reshape(2, 6, 40, 36)
    for shard, of_six in ((SampleShard(1, 2, 3), slice(2, 4)), (SampleShard(2, 3, 6), slice(2, 3))):
        own = (2 * (of_six.stop - of_six.start), 40, 36)
        mine = sample_masks(own, positions, lengths=lengths, shard=shard)
        np.testing.assert_array_equal(mine.reshape(2, -1, 40, 36), flat[:, of_six])


def test_dropout_in_a_training_step_draws_masks_per_sample():
    """Several rows per sample belong to it, one row is for all, and other numbers of rows are drawn per rank."""
    streams = SampleStreams(5, np.array([2, 0]), frozenset([3]))
    with seeded(1, streams):
        several, shared = (
            dropout_masks.dropout_mask(shape, 0.5, (9, call)) for call, shape in ((3, (6, 40)), (4, (1, 40)))
        )
        assert not streams.record.doubt
        other = dropout_masks.dropout_mask((5, 40), 0.5, (9, 3))
    assert streams.record.doubt.startswith("a tensor of shape (5, 40) does not have rows for 2 samples")
    np.testing.assert_array_equal(other, dropout_masks.keep_mask(200, 0.5, (9, 3)))
    with seeded(2, SampleStreams(5, np.array([0, 1, 2]), frozenset([3]))):
        whole = dropout_masks.dropout_mask((9, 40), 0.5, (8, 3)).reshape(3, -1)
        np.testing.assert_array_equal(dropout_masks.dropout_mask((1, 40), 0.5, (8, 4)), shared)
    np.testing.assert_array_equal(several.reshape(2, -1), whole[[2, 0]])
    for shape in ((), (0, 40), (2, 0)):
        with seeded(1, SampleStreams(5, np.array([2, 0]))):
            assert dropout_masks.dropout_mask(shape, 0.5, (9, 3)).size == math.prod(shape)


def test_a_position_table_has_one_dropout_mask_for_all_samples():
    """Tables with a row per token by their shape; others, such as DeBERTa's, in a block that says so."""
    with seeded(1, SampleStreams(5, np.array([2, 0]), frozenset([6]))):
        table = dropout_masks.dropout_mask((6, 40), 0.5, (9, 3))
    for positions in ([0, 1, 2], [4]):
        with seeded(1, SampleStreams(5, np.array(positions), frozenset([6]))), shared_by_samples():
            np.testing.assert_array_equal(dropout_masks.dropout_mask((6, 40), 0.5, (9, 3)), table)
    with shared_by_samples():
        assert dropout_masks.dropout_mask((6, 40), 0.5, (9, 3)).size == 240


@pytest.mark.parametrize(
    ("first", "second", "doubt"),
    [
        ((4, 8, 6), (4, 9, 6), ""),
        ((4, 6), (4, 6), ""),
        ((4, 2, 8, 8), (4, 2, 9, 9), ""),
        ((4, 5, 6), (4, 5, 7), "had a tensor of another layout before, and has one of shape"),
        ((4, 6), (4, 6, 6), "had a tensor of another layout before, and has one of shape"),
        ((8, 9, 6), (8, 6), ""),
        ((512, 6), (512, 6), "may have 128 rows for each of 4 samples, or be a table"),
    ],
)
def test_a_dropout_mask_that_depends_on_other_samples_is_recorded(first, second, doubt):
    """The same dropout call of two updates, with 8 tokens and then 9; without a doubt, two calls."""
    record = MaskRecord()
    for shape, length in ((first, 8), (second, 9)):
        with seeded(1, SampleStreams(5, np.arange(4), frozenset([length]), record=record)):
            dropout_masks.dropout_mask(shape, 0.5, (9, len(shape) if first == (8, 9, 6) else 3))
    assert doubt in record.doubt
    assert bool(doubt) == bool(record.doubt)


def test_left_padding_of_two_texts_of_one_length_is_recorded():
    record = MaskRecord()
    masks = {"attention_mask": np.array([[0, 1, 1]]), "decoder_attention_mask": np.array([[1, 1, 1]])}
    streams_of({name: mask[:, 1:] for name, mask in masks.items()}, 1, record)
    assert not record.doubt
    streams_of(masks, 1, record)
    assert "the same length and are padded on the left" in record.doubt


def test_dropout_masks_equal_recorded_bits():
    """A resumed run needs the masks of the program that began it."""
    keep = sample_masks((2, 16), [0, 5], key=(1, 2))
    assert np.packbits(keep).tobytes().hex() == "68a4508a"
    keep = sample_masks((2, 2, 2, 2), [0, 5], key=(1, 2), lengths=[2])
    assert np.packbits(keep).tobytes().hex() == "464b"
