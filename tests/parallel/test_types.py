"""Test every collective with every type, NumPy arrays and MindSpore tensors of several shapes, on every backend.

The data of a rank is a function of the rank, so NumPy computes the expected result from the inputs of all
ranks, in float64 or in integers.
"""

from __future__ import annotations

import functools

import mindspore
import ml_dtypes
import numpy as np
import pytest

from mindnlp_dp.communication.operations import Operation

FLOATS = ["float64", "float32", "float16", "bfloat16"]
INTEGERS = ["int8", "int16", "int32", "int64", "uint8"]
TYPES = [*FLOATS, *INTEGERS, "bool"]
SHAPES = {"matrix": (3, 2), "one element": (1,), "scalar": (), "empty": (0, 4)}
KINDS = ["numpy", "tensor", "strided numpy"]


def numpy_type(dtype):
    return np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)


def held_by(rank, dtype, shape):
    """Return the data of ``rank``: small values, exact in every type; sign and parity vary by rank and element."""
    values = np.asarray(np.arange(np.prod(shape, dtype=int)).reshape(shape) + rank)
    if dtype == "bool":
        return np.asarray(values % 2 == 0)
    if dtype.startswith("uint"):
        return values.astype(dtype)
    return np.asarray(values * (-1) ** rank).astype(numpy_type(dtype))


def as_kind(array, kind):
    if kind == "tensor":
        if array.dtype == ml_dtypes.bfloat16:
            return mindspore.Tensor(array.astype(np.float32)).astype(mindspore.bfloat16)
        return mindspore.Tensor(array)
    if kind == "strided numpy" and array.ndim:
        return np.repeat(array, 2, axis=0)[::2]
    return array


def as_numpy(x):
    if isinstance(x, np.ndarray):
        return x
    if x.dtype == mindspore.bfloat16:
        return x.astype(mindspore.float32).asnumpy().astype(ml_dtypes.bfloat16)
    return x.asnumpy()


def check(result, expected, like):
    assert type(result) is type(like)
    assert result.dtype == like.dtype
    assert tuple(result.shape) == tuple(expected.shape)
    np.testing.assert_array_equal(as_numpy(result), expected.astype(as_numpy(like).dtype))


REDUCERS = {"sum": np.add, "max": np.maximum, "min": np.minimum}


def reduced(group, dtype, shape, op):
    wide = {"bool": bool, "float64": np.float64}.get(dtype, np.float64 if "float" in dtype else np.int64)
    parts = [held_by(rank, dtype, shape).astype(wide) for rank in range(group.world_size)]
    total = parts[0]
    for part in parts[1:]:
        total = REDUCERS["sum" if op == "mean" else op](total, part)
    return np.asarray(total / group.world_size if op == "mean" else total)


every_array = pytest.mark.parametrize("kind", KINDS)
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
every_type = pytest.mark.parametrize("dtype", TYPES)


@every_array
@every_shape
@every_type
def test_reductions_of_every_type_and_shape_match_numpy(group, dtype, shape, kind):
    x = as_kind(held_by(group.rank, dtype, shape), kind)
    for op in ["sum", "max", "min"] + (["mean"] if dtype in FLOATS else []):
        expected = reduced(group, dtype, shape, op)
        check(group.all_reduce(x, op), expected, x)
        result = group.reduce(x, dst=group.world_size - 1, op=op)
        assert (result is None) == (group.rank != group.world_size - 1)
        if result is not None:
            check(result, expected, x)


@every_array
@every_shape
@every_type
def test_broadcast_gather_and_scatter_move_every_type_and_shape(group, dtype, shape, kind):
    n, last = group.world_size, group.world_size - 1
    x = as_kind(held_by(group.rank, dtype, shape), kind)
    check(group.broadcast(x, src=last), held_by(last, dtype, shape), x)
    for rank, part in enumerate(group.all_gather(x)):
        check(part, held_by(rank, dtype, shape), x)
    gathered = group.gather(x, dst=last)
    assert (gathered is None) == (group.rank != last)
    if gathered is not None:
        check(gathered[0], held_by(0, dtype, shape), x)
    everything = [as_kind(held_by(10 + rank, dtype, shape), kind) for rank in range(n)]
    check(
        group.scatter(everything if group.rank == last else None, src=last), held_by(10 + group.rank, dtype, shape), x
    )


@every_array
@every_type
def test_reduce_scatter_of_every_type_matches_numpy(group, dtype, kind):
    shape = (group.world_size, 2)
    x = as_kind(held_by(group.rank, dtype, shape), kind)
    for op in ["sum", "max", "min"] + (["mean"] if dtype in FLOATS else []):
        check(group.reduce_scatter(x, op), reduced(group, dtype, shape, op)[group.rank], x)


@every_array
@every_shape
@every_type
def test_send_and_recv_move_every_type_and_shape(group, dtype, shape, kind):
    x = as_kind(held_by(group.rank, dtype, shape), kind)
    if group.world_size == 1:
        with pytest.raises(ValueError, match="dst must be another rank"):
            group.send(x, dst=0)
        return
    right, left = (group.rank + 1) % group.world_size, (group.rank - 1) % group.world_size
    if group.library_without(Operation.MESSAGES):
        with pytest.raises(NotImplementedError, match="the mpi backend has them, on CPU: mindnlp-dp run"):
            group.send(x, dst=right)
        with pytest.raises(NotImplementedError, match=f"recv on rank {group.rank}: MindSpore's CPU library"):
            group.recv(x, src=left)
        return
    if group.rank == 0:
        group.send(x, dst=right)
        received = group.recv(x, src=left)
    else:
        received = group.recv(x, src=left)
        group.send(x, dst=right)
    check(received, held_by(left, dtype, shape), x)


@pytest.mark.parametrize("dtype", [*INTEGERS, "bool"])
def test_the_mean_of_integers_is_refused(group, dtype):
    with pytest.raises(TypeError, match=f"the mean of {dtype} would be rounded"):
        group.all_reduce(held_by(0, dtype, (2,)), "mean")


def test_a_numpy_number_is_an_array_without_dimensions(group):
    result = group.all_reduce(np.float32(group.rank), "max")
    assert isinstance(result, np.ndarray)
    assert (result.shape, result.dtype, float(result)) == ((), np.float32, group.world_size - 1)


def test_float64_keeps_all_of_its_digits(group):
    """MCCL's own float64 reduction is silently wrong, and float32 would lose the small part."""
    x = np.array([1.0 + group.rank * 2.0**-50])
    n = group.world_size
    assert group.all_reduce(x)[0] == n + n * (n - 1) / 2 * 2.0**-50


@pytest.mark.core
@pytest.mark.parametrize(("dtype", "big"), [("int64", 2**60), ("int32", 2**28)])
def test_integers_keep_all_of_their_digits(group, dtype, big):
    """MindSpore 2.7's MCCL reduces int64 in floating point, which loses digits."""
    n = group.world_size
    x = np.array([big + group.rank, -big - group.rank], dtype)
    assert group.all_reduce(x, "max").tolist() == [big + n - 1, -big]
    assert group.all_reduce(x).tolist() == [n * big + n * (n - 1) // 2, -n * big - n * (n - 1) // 2]


@pytest.mark.core
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_are_summed_in_float32_and_rounded_once(group, dtype):
    """The sum 256 + 1 + 1 + ... in bfloat16 would stay 256."""
    big = {"float16": 2048, "bfloat16": 256}[dtype]
    x = np.array([big if group.rank == 0 else 1]).astype(numpy_type(dtype))
    expected = np.float32(big + group.world_size - 1).astype(numpy_type(dtype))
    assert group.all_reduce(x)[0] == expected


# Lengths around the widths of vector registers (16, 32 and 64 bytes), and one large enough for shared memory.
LENGTHS = [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 1000, 70_001]


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"])
def test_integers_wrap_around_as_numpys_do_at_every_length(group, dtype):
    """OpenMPI's vector code saturates but its tail loop wraps around, so one array could contain both."""
    info = np.iinfo(dtype)
    for length in LENGTHS:
        parts = [
            np.random.default_rng([length, rank]).integers(info.min, info.max, length, dtype, endpoint=True)
            for rank in range(group.world_size)
        ]
        parts[0][-1] = parts[-1][-1] = info.max
        for op, function in REDUCERS.items():
            expected = functools.reduce(function, parts)
            np.testing.assert_array_equal(group.all_reduce(parts[group.rank], op), expected, err_msg=f"{op} {length}")


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_reductions_of_floats_match_numpy_at_every_length(group, dtype):
    for length in LENGTHS:
        parts = [
            np.random.default_rng([length, rank]).standard_normal(length).astype(dtype)
            for rank in range(group.world_size)
        ]
        parts[-1][-1] = np.inf
        mine = parts[group.rank]
        for op, function in {"max": np.maximum, "min": np.minimum}.items():
            np.testing.assert_array_equal(group.all_reduce(mine, op), functools.reduce(function, parts))
        expected = np.sum([part.astype(np.float64) for part in parts], axis=0)
        tolerance = {"float16": 2e-3, "float32": 1e-6, "float64": 1e-14}[dtype]
        np.testing.assert_allclose(group.all_reduce(mine), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.core
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("length", [1, 9, 100, 70_001])
def test_a_nan_of_any_rank_reaches_all_ranks(group, dtype, length):
    for holder in range(group.world_size):
        x = np.full(length, group.rank, dtype)
        if group.rank == holder:
            x[length // 2] = np.nan
        for op in REDUCERS:
            result = group.all_reduce(x, op)
            assert np.flatnonzero(np.isnan(result)).tolist() == [length // 2], (holder, op)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@every_array
def test_the_mean_of_halves_does_not_overflow(group, dtype, kind):
    largest = {"float16": 65504.0, "bfloat16": 3e37}[dtype]
    x = as_kind(np.full(5, largest).astype(numpy_type(dtype)), kind)
    check(group.all_reduce(x, "mean"), as_numpy(x), x)
    rows = as_kind(np.full((group.world_size, 3), largest).astype(numpy_type(dtype)), kind)
    check(group.reduce_scatter(rows, "mean"), as_numpy(rows)[0], rows)


@pytest.mark.parametrize("dtype", [">f4", ">f8", ">f2", ">i2", ">i8", ">u4"])
def test_collectives_accept_big_endian_arrays(group, dtype):
    x = (np.arange(6).reshape(2, 3) + group.rank).astype(dtype)
    n, last = group.world_size, group.world_size - 1
    for result, expected in [
        (group.all_reduce(x), np.arange(6).reshape(2, 3) * n + n * (n - 1) // 2),
        (group.broadcast(x, src=last), np.arange(6).reshape(2, 3) + last),
        (group.all_gather(x)[last], np.arange(6).reshape(2, 3) + last),
    ]:
        assert result.dtype == x.dtype
        np.testing.assert_array_equal(result, expected)


def test_inputs_of_unsupported_types_are_refused(group):
    with pytest.raises(TypeError, match=r"expected a NumPy array or a MindSpore tensor of float64, .*; got complex64"):
        group.all_reduce(np.zeros(2, np.complex64))
    with pytest.raises(TypeError, match="got list on rank"):
        group.broadcast([1, 2])
