"""Test which parameters each gradient bucket holds, in which order, and where its slices begin."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindnlp_dp.data_parallel.buckets.bucket_layout import (
    ALIGN_NUMEL,
    BLOCK_NUMEL,
    BYTES_PER_MB,
    aligned,
    completed_order,
    first_order,
    pack_buckets,
)

SHAPES = st.lists(st.lists(st.integers(1, 5), max_size=3).map(tuple), max_size=12)


def table(buckets):
    return [[(slot.index, slot.offset, slot.numel) for slot in bucket.slots] for bucket in buckets]


def test_buckets_are_packed_from_the_last_parameter_up_to_the_cap():
    """Pack the last parameter first; the cap of 32 bytes is 8 float32, so the parameter of 10 gets its own bucket."""
    shapes = [(2, 2), (10,), (3,), (4,), ()]
    assert table(pack_buckets(shapes, ["float32"] * 5, 32 / BYTES_PER_MB)) == [
        [(4, 0, 1), (3, 64, 4), (2, 128, 3)],
        [(1, 0, 10)],
        [(0, 0, 4)],
    ]


def test_the_default_bucket_order_is_reverse_and_completes_a_partial_order():
    shapes, dtypes = [(1,)] * 5, ["float32"] * 5
    assert first_order(5) == [4, 3, 2, 1, 0]
    assert pack_buckets(shapes, dtypes, 4) == pack_buckets(shapes, dtypes, 4, first_order(5))
    assert completed_order([1, 3], 5) == [1, 3, 4, 2, 0]
    assert completed_order([], 5) == first_order(5)


def test_a_bucket_holds_one_dtype():
    buckets = pack_buckets([(2,), (2,), (2,)], ["float32", "float16", "float32"], 4)
    assert [(bucket.dtype, [slot.index for slot in bucket.slots]) for bucket in buckets] == [
        ("float32", [2, 0]),
        ("float16", [1]),
    ]
    assert [bucket.num_bytes for bucket in buckets] == [16, 4]


@given(shapes=SHAPES, cap=st.integers(1, 200))
def test_every_parameter_has_one_aligned_slot_in_a_bucket(shapes, cap):
    buckets = pack_buckets(shapes, ["float32"] * len(shapes), cap / BYTES_PER_MB)
    assert sorted(slot.index for bucket in buckets for slot in bucket.slots) == list(range(len(shapes)))
    for bucket in buckets:
        offset = 0
        for slot in bucket.slots:
            assert slot.offset == offset
            assert slot.shape == shapes[slot.index]
            offset = aligned(offset + slot.numel)
        assert bucket.numel == offset
        assert bucket.num_bytes == 4 * sum(slot.numel for slot in bucket.slots)
        assert bucket.num_bytes <= cap or len(bucket.slots) == 1


@given(
    shapes=st.lists(st.integers(0, 5 * BLOCK_NUMEL).map(lambda n: (n,)), min_size=1, max_size=8),
    num_slices=st.integers(1, 9),
)
def test_bucket_slices_are_even_and_begin_at_aligned_blocks(shapes, num_slices):
    """Slice also into more slices than there are blocks: some slices are then empty."""
    for bucket in pack_buckets(shapes, ["float32"] * len(shapes), 0.1):
        bounds = bucket.slice_bounds(num_slices)
        assert len(bounds) == num_slices + 1
        assert (bounds[0], bounds[-1]) == (0, bucket.numel)
        assert list(bounds) == sorted(bounds)
        for bound in bounds:
            assert bound % ALIGN_NUMEL == 0
            inside = [slot for slot in bucket.slots if slot.offset < bound < slot.offset + slot.numel]
            assert all((bound - slot.offset) % BLOCK_NUMEL == 0 for slot in inside)
        # A slice exceeds an even one by at most one block on either side.
        widest = max(last - first for first, last in zip(bounds, bounds[1:]))
        assert widest <= bucket.numel / num_slices + 2 * BLOCK_NUMEL


@pytest.mark.parametrize("cap", ["auto", 0, -1, None, float("nan")])
def test_an_invalid_bucket_cap_mb_is_refused(cap):
    with pytest.raises(ValueError, match="bucket_cap_mb must be positive, got"):
        pack_buckets([(1,)], ["float32"], cap)


def test_buckets_refuse_integer_parameters():
    with pytest.raises(TypeError, match="parameter 0 is int64; gradients can be float64, float32"):
        pack_buckets([(1,)], ["int64"], 4)
