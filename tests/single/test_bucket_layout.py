from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindnlp_dp.gradients.buckets.layout import BYTES_PER_MB, completed_order, first_order, pack_buckets

SHAPES = st.lists(st.lists(st.integers(1, 5), max_size=3).map(tuple), max_size=12)


def table(buckets):
    return [[(slot.index, slot.offset, slot.numel) for slot in bucket.slots] for bucket in buckets]


def test_a_literal_table():
    """Last parameter first; the cap of 32 bytes is 8 float32; the parameter of 10 gets a bucket of its own."""
    shapes = [(2, 2), (10,), (3,), (4,), ()]
    assert table(pack_buckets(shapes, ["float32"] * 5, 32 / BYTES_PER_MB)) == [
        [(4, 0, 1), (3, 1, 4), (2, 5, 3)],
        [(1, 0, 10)],
        [(0, 0, 4)],
    ]


def test_the_order_without_any_and_what_an_order_does_not_name():
    shapes, dtypes = [(1,)] * 5, ["float32"] * 5
    assert first_order(5) == [4, 3, 2, 1, 0]
    assert pack_buckets(shapes, dtypes, 4) == pack_buckets(shapes, dtypes, 4, first_order(5))
    assert completed_order([1, 3], 5) == [1, 3, 4, 2, 0]
    assert completed_order([], 5) == first_order(5)


def test_types_do_not_mix():
    buckets = pack_buckets([(2,), (2,), (2,)], ["float32", "float16", "float32"], 4)
    assert [(bucket.dtype, [slot.index for slot in bucket.slots]) for bucket in buckets] == [
        ("float32", [2, 0]),
        ("float16", [1]),
    ]
    assert [bucket.num_bytes for bucket in buckets] == [16, 4]


@given(shapes=SHAPES, cap=st.integers(1, 200))
def test_every_parameter_has_one_slot_and_slots_have_no_gaps(shapes, cap):
    buckets = pack_buckets(shapes, ["float32"] * len(shapes), cap / BYTES_PER_MB)
    assert sorted(slot.index for bucket in buckets for slot in bucket.slots) == list(range(len(shapes)))
    for bucket in buckets:
        offset = 0
        for slot in bucket.slots:
            assert slot.offset == offset
            assert slot.shape == shapes[slot.index]
            offset += slot.numel
        assert bucket.numel == offset
        assert bucket.num_bytes <= cap or len(bucket.slots) == 1


@pytest.mark.parametrize("cap", ["auto", 0, -1, None, float("nan")])
def test_sizes_that_are_none(cap):
    with pytest.raises(ValueError, match="bucket_cap_mb must be positive, got"):
        pack_buckets([(1,)], ["float32"], cap)


def test_types_that_are_no_gradients():
    with pytest.raises(TypeError, match="parameter 0 is int64; gradients can be float64, float32"):
        pack_buckets([(1,)], ["int64"], 4)
