"""This module multiplies arrays of any number of dimensions and any strides; functions.py calls it.

Transposed and sliced matrices go to BLAS without a copy. oneDNN computes a product in tiles of rows, or a batch matrix
by matrix, and the tiles are distributed over the rank's cores. oneDNN's summation order depends on the number of rows
(differently for each kind of core), so the tiles do not depend on the number of cores. Without oneDNN, NumPy computes
the products, with its own threads.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Optional, Union

import numpy as np

from mindnlp_dp.kernels import onednn
from mindnlp_dp.kernels.memory_pool import ITEM_BYTES, empty, empty_like
from mindnlp_dp.kernels.workers import parallel_for

# With tiles of half this size, oneDNN's kernels for AVX2 take up to twice as long for a weight's gradient; larger tiles
# leave cores idle.
ROWS_OF_A_TILE = 512

# The smallest number of multiplications that is worth a second core: about 0.1 ms on one core.
WORK_OF_A_PART = 1 << 22

ROWS_OF_A_SUM = 64

# Whether products are computed from factors rounded to bfloat16.
_uses_bfloat16 = False


def use_bfloat16(uses: bool) -> bool:
    """Make products round their factors to bfloat16, and sum in float32, if this core can; return whether they do."""
    global _uses_bfloat16
    _uses_bfloat16 = uses and onednn.has_bfloat16()
    return _uses_bfloat16


def uses_bfloat16() -> bool:
    """Return whether products round their factors to bfloat16."""
    return _uses_bfloat16


def product(a: np.ndarray, b: np.ndarray, bias: Optional[np.ndarray] = None) -> np.ndarray:
    """Return ``a @ b``, plus ``bias`` in every row, as a new (M, N) matrix; ``a`` is (M, K), ``b`` is (K, N)."""
    (rows, inner), columns = a.shape, b.shape[1]
    out = empty(rows, columns)
    if not out.size or not inner:
        out[...] = 0 if bias is None else bias
        return out
    if not onednn.is_available():
        return np.matmul(a, b, out=out) if bias is None else np.add(np.matmul(a, b), bias, out=out)
    if _uses_bfloat16:
        _by_tiles(_for_blas(a), _for_blas(b), bias, out)
        return out
    if bias is not None:
        out[...] = bias
    _by_sgemm(a, b, out, add=bias is not None)
    return out


def add_product(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """Add ``a @ b`` to ``out``, a contiguous (M, N) matrix, where oneDNN can without a matrix beside it."""
    if not onednn.is_available() or _uses_bfloat16:
        out += product(a, b)
        return
    _by_sgemm(a, b, out, add=True)


def _by_sgemm(a: np.ndarray, b: np.ndarray, out: np.ndarray, *, add: bool) -> None:
    """Multiply two matrices into ``out``, or add their product to it, in tiles of rows."""
    (rows, inner), columns = a.shape, b.shape[1]
    a, b = _for_blas(a), _for_blas(b)
    at_a, at_b, at_out = a.ctypes.data, b.ctypes.data, out.ctypes.data
    layouts = _layout(a), _layout(b), columns
    a_row, out_row = a.strides[0], out.strides[0]

    def tile(begin: int, end: int) -> None:
        multiply = onednn.multiplication((end - begin, inner, columns), *layouts, add=add)
        multiply(at_a + begin * a_row, at_b, at_out + begin * out_row)

    _for_tiles(tile, rows, inner * columns)


def _by_tiles(a: np.ndarray, b: np.ndarray, bias: Optional[np.ndarray], out: np.ndarray) -> None:
    """Multiply two matrices into ``out`` by oneDNN's primitive, from factors rounded to bfloat16."""
    row = [] if bias is None else [np.ascontiguousarray(bias)]

    def tile(begin: int, end: int) -> None:
        arrays = [a[begin:end], b, out[begin:end]]
        run = onednn.products(*map(onednn.strided, arrays), bias=bool(row), bfloat16=True)
        run(*(x.ctypes.data for x in [*arrays, *row]))

    _for_tiles(tile, len(out), b.size)


def _for_tiles(tile: Callable[[int, int], None], rows: int, work_of_a_row: int) -> None:
    """Call ``tile(begin, end)`` for tiles of rows, distributed over the cores; the last one takes the remainder."""
    num_tiles = max(1, rows // ROWS_OF_A_TILE)

    def part(first: int, last: int) -> None:
        begins = [number * ROWS_OF_A_TILE for number in range(first, last)]
        for begin, end in zip(begins, [*begins[1:], last * ROWS_OF_A_TILE if last < num_tiles else rows]):
            tile(begin, end)

    parallel_for(part, num_tiles, 1, WORK_OF_A_PART // (ROWS_OF_A_TILE * work_of_a_row) + 1)


def matmul(a: np.ndarray, b: np.ndarray, like: Optional[np.ndarray] = None) -> np.ndarray:
    """Return ``np.matmul(a, b)`` for arrays of two or more dimensions; all but the last two are broadcast.

    The result has the memory order of ``like``, an array with the same number of dimensions.

    Raises:
        ValueError: the shapes do not fit.
    """
    (rows, inner), columns = a.shape[-2:], b.shape[-1]
    if inner != b.shape[-2]:
        raise ValueError(f"matmul: shapes {a.shape} and {b.shape} do not fit: {inner} columns, {b.shape[-2]} rows")
    if b.ndim == 2 and like is None:
        return product(a.reshape(math.prod(a.shape[:-1]), inner), b).reshape(*a.shape[:-1], columns)
    of_a, of_b = a.shape[:-2], b.shape[:-2]
    batch = of_a if of_a == of_b else np.broadcast_shapes(of_a, of_b)
    shape = (*batch, rows, columns)
    out = empty(*shape) if like is None else empty_like(shape, like)
    if not out.size or not inner:
        out[...] = 0
        return out
    a, b = _for_blas(a), _for_blas(b)
    if of_a != of_b:
        a, b = (np.broadcast_to(x, batch + x.shape[-2:]) for x in (a, b))
    if not onednn.is_available():
        return np.matmul(a, b, out=out)
    if out.strides[-1] == ITEM_BYTES:
        _batched(a, b, out)
    elif out.strides[-2] == ITEM_BYTES:
        # (a b)' = b' a', whose rows are contiguous.
        _batched(b.swapaxes(-1, -2), a.swapaxes(-1, -2), out.swapaxes(-1, -2))
    else:
        out[...] = matmul(a, b)
    return out


def column_sums(x: np.ndarray) -> np.ndarray:
    """Return the sum of a matrix's rows, of shape (N,), summed first within blocks for less rounding error."""
    blocks = range(0, max(1, len(x)), ROWS_OF_A_SUM)
    return np.stack([x[begin : begin + ROWS_OF_A_SUM].sum(0) for begin in blocks]).sum(0)


def _batched(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """Multiply each pair of matrices into ``out``, one by one or in one call; the batch dimensions are equal."""
    (rows, inner), columns = a.shape[-2:], b.shape[-1]
    axis = _axis_to_split(out.shape, inner, a.strides, b.strides, out.strides)
    if axis is not None and onednn.has_primitives():
        _in_one_call(a, b, out, axis)
        return
    addresses = list(zip(_addresses(a), _addresses(b), _addresses(out)))
    _, out_stride = _layout(out)

    def part(first: int, last: int) -> None:
        multiply = onednn.multiplication((rows, inner, columns), _layout(a), _layout(b), out_stride, add=False)
        for pair in addresses[first:last]:
            multiply(*pair)

    parallel_for(part, len(addresses), 1, WORK_OF_A_PART // (rows * inner * columns) + 1)


# Cached: it takes as long as a small product.
@functools.lru_cache(maxsize=1024)
def _axis_to_split(shape: tuple[int, ...], inner: int, *strides: tuple[int, ...]) -> Optional[int]:
    """Return the batch dimension to distribute over the cores; None if oneDNN's batched product is wrong for this.

    See :func:`onednn.products`; ``strides`` are those of the factors and the result, whose ``shape`` this is.
    """
    longer_than_1 = [axis for axis, length in enumerate(shape[:-2]) if length > 1]
    is_right = (
        1 <= len(longer_than_1) <= 2
        and min(*shape[-2:], inner) > 1
        and all(min(each) >= 0 for each in strides)
        and _are_batches_in_order(strides, longer_than_1)
    )
    return max(longer_than_1, key=shape.__getitem__) if is_right else None


def _are_batches_in_order(strides: Sequence[tuple[int, ...]], axes: list[int]) -> bool:
    """Return whether oneDNN 3.10 takes these batch dimensions; with others it writes to other memory on some cores.

    It broadcasts one factor over one dimension. Two dimensions must be in their order in memory, and not broadcast.
    """
    steps = [[each[axis] for axis in axes] for each in strides]
    if len(axes) == 1:
        return steps[0] != [0] or steps[1] != [0]
    return all(first >= second > 0 for first, second in steps)


def _in_one_call(a: np.ndarray, b: np.ndarray, out: np.ndarray, axis: int) -> None:
    """Multiply as many matrices in one call as a core has to; batch dimensions of length 1 are left out.

    With two batch dimensions and gaps in memory, as in views of packed queries, keys and values, a call has the
    matrices of one index of ``axis``: oneDNN 3.10 confuses the strides of some sizes, such as a batch of three times as
    many samples as tokens, and reads and writes other memory.
    """
    index: list[Union[int, slice]] = [slice(None) if length > 1 else 0 for length in out.shape[:-2]]
    work = math.prod(out.shape) // out.shape[axis] * a.shape[-1]

    def part(first: int, last: int) -> None:
        arrays = matrices(slice(first, last))
        if out.ndim - 2 - index.count(0) == 1 or all(map(_is_compact, arrays)):
            _multiply(arrays)
            return
        for number in range(first, last):
            _multiply(matrices(number))

    def matrices(at: Union[int, slice]) -> list[np.ndarray]:
        place = (*index[:axis], at, *index[axis + 1 :])
        return [x[place] for x in (a, b, out)]

    parallel_for(part, out.shape[axis], 1, WORK_OF_A_PART // work + 1)


def _multiply(arrays: Sequence[np.ndarray]) -> None:
    # Always in float32: with AMX, oneDNN 3.10's batched products from bfloat16 leave out or overwrite memory.
    onednn.products(*map(onednn.strided, arrays))(*(x.ctypes.data for x in arrays))


def _is_compact(x: np.ndarray) -> bool:
    """Return whether there is no gap between the elements, in whatever order the dimensions lie in memory."""
    last = sum((length - 1) * stride for length, stride in zip(x.shape, x.strides))
    return bool(last == (x.size - 1) * ITEM_BYTES)


def _addresses(x: np.ndarray) -> list[int]:
    """Return the address of each matrix of an array."""
    offsets = np.zeros(x.shape[:-2], np.int64)
    for axis, (length, stride) in enumerate(zip(x.shape[:-2], x.strides)):
        offsets += (np.arange(length) * stride).reshape([-1 if other == axis else 1 for other in range(x.ndim - 2)])
    return (x.ctypes.data + offsets).ravel().tolist()


def _for_blas(x: np.ndarray) -> np.ndarray:
    """Return ``x`` if its matrices are row-major or column-major, else a row-major copy."""
    return x if _lies_in_rows(x) or _lies_in_rows(x.swapaxes(-1, -2)) else np.ascontiguousarray(x)


def _lies_in_rows(x: np.ndarray) -> bool:
    """Return whether each row is contiguous and begins after the end of the previous one."""
    rows, columns = x.shape[-2:]
    by_row, by_column = x.strides[-2:]
    return (by_column == ITEM_BYTES or columns == 1) and (by_row >= columns * ITEM_BYTES or rows == 1)


def _layout(x: np.ndarray) -> onednn.Layout:
    """Return BLAS's description of a matrix that :func:`_for_blas` has returned."""
    transposed = not _lies_in_rows(x)
    by_row, columns = (x.strides[-1], x.shape[-2]) if transposed else (x.strides[-2], x.shape[-1])
    return b"T" if transposed else b"N", max(by_row // ITEM_BYTES, columns)
