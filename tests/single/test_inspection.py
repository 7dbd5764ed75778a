"""Tests that every change of an array changes its fingerprint, and that large values do not count as infinite."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindnlp_dp.runtime.arrays import fingerprint, is_finite


def arrays(dtype, shape=(300, 257), seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("layout", ["rows", "transposed", "strided"])
def test_every_kind_of_change_changes_the_fingerprint(dtype, layout):
    def fresh():
        array = arrays(dtype)
        return {"rows": array, "transposed": array.T, "strided": array[::2, 1::3]}[layout]

    before = fingerprint(fresh())
    assert fingerprint(fresh()) == before
    changes = {
        "one bit of one element": lambda a: a.__setitem__((1, 2), np.nextafter(a[1, 2], a.dtype.type(9))),
        "the sign of one": lambda a: a.__setitem__((1, 2), -a[1, 2]),
        "all signs": lambda a: np.negative(a, out=a),
        "a row of zeros": lambda a: a.__setitem__(3, 0),
        "two rows in each other's place": lambda a: a.__setitem__([3, 4], a[[4, 3]]),
        "pairs in each other's place": lambda a: a.__setitem__((slice(None), [0, 1]), a[:, [1, 0]]),
        "the signs of one column": lambda a: np.negative(a[:, 1], out=a[:, 1]),
        "a scale": lambda a: np.multiply(a, a.dtype.type(0.5), out=a),
        "a NaN": lambda a: a.__setitem__((0, 0), np.nan),
    }
    for what, change in changes.items():
        array = fresh().copy(order="K")
        change(array)
        assert fingerprint(array) != before, what


def test_negating_a_gradient_with_zero_sum_changes_the_fingerprint():
    """Check a gradient of exactly [g, -g], whose sum is zero before and after the change of sign."""
    g = arrays("float32", (768,))
    for both in (np.stack([g, -g]), np.stack([g, -g], axis=1)):
        assert fingerprint(both) != fingerprint(-both)


def test_scaling_numbers_whose_sum_overflows_changes_the_fingerprint():
    array = np.full((64, 64), 2000, np.float16)
    assert fingerprint(array) != fingerprint(array * np.float16(0.5))


def test_an_unchanged_nan_keeps_the_fingerprint():
    array = arrays("float32")
    array[5, 5] = np.nan
    assert fingerprint(array) == fingerprint(array.copy())


@given(st.integers(0, 200_000), st.integers(0, 10**9), st.integers(1, 2**31))
@settings(max_examples=50)
def test_any_flipped_bits_change_the_fingerprint(length, where, flip):
    array = arrays("float32", (length + 1,))
    before = fingerprint(array)
    array.view(np.uint32)[where % (length + 1)] ^= np.uint32(flip)
    assert fingerprint(array) != before


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,)])
def test_empty_and_scalar_arrays_have_a_fingerprint(shape):
    assert fingerprint(np.ones(shape, np.float32)) == fingerprint(np.ones(shape, np.float32))
    assert is_finite(np.ones(shape, np.float32))


def test_is_finite_is_false_only_for_nan_and_infinity():
    assert is_finite(np.full(100, 3e38, np.float32)), "their sum is infinite, they are not"
    for bad in (np.nan, np.inf, -np.inf):
        array = arrays("float32")
        array[17, 3] = bad
        assert not is_finite(array)
    array[:] = [[np.inf], [-np.inf]] * 150
    assert not is_finite(array)
