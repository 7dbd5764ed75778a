"""Matrix products of arrays of any rank and any strides.

Transposed and sliced matrices are handed to BLAS as they lie in memory. Products are oneDNN's, in tiles of rows, or
matrix by matrix where there are many; a rank's cores share the tiles. In which order oneDNN adds up depends on the
number of rows, otherwise on every kind of core, so tiles are the same however many cores there are. Without oneDNN
products are NumPy's, which has threads of its own.
"""

from __future__ import annotations

import math
from typing import Optional

import numpy as np

from . import onednn
from .memory import ITEM_BYTES, empty, empty_like
from .workers import in_parts

# Tiles that are smaller by half take 2 % more of a step, larger ones leave cores without work.
ROWS_OF_A_TILE = 256
# Multiplications that are worth a second core: about 0.1 ms of one.
WORK_OF_A_PART = 1 << 22
ROWS_OF_A_SUM = 64


def product(a: np.ndarray, b: np.ndarray, bias: Optional[np.ndarray] = None) -> np.ndarray:
    """``a @ b``, plus ``bias`` in every row: matrices of shape (M, K) and (K, N) to a new one of shape (M, N)."""
    (rows, inner), columns = a.shape, b.shape[1]
    out = empty(rows, columns)
    if bias is not None or not inner:
        out[...] = 0 if bias is None else bias
    if not out.size or not inner:
        return out
    if not onednn.is_there():
        return np.matmul(a, b, out=out) if bias is None else np.add(np.matmul(a, b), out, out=out)
    a, b = _for_blas(a), _for_blas(b)
    at_a, at_b, at_out = a.ctypes.data, b.ctypes.data, out.ctypes.data
    layouts = _layout(a), _layout(b), columns
    a_row, out_row = a.strides[0], out.strides[0]

    num_tiles = max(1, rows // ROWS_OF_A_TILE)

    def part(first: int, last: int) -> None:
        # The last tile takes what is left over.
        begins = [number * ROWS_OF_A_TILE for number in range(first, last)]
        ends = [*begins[1:], last * ROWS_OF_A_TILE if last < num_tiles else rows]
        for begin, end in zip(begins, ends):
            multiply = onednn.multiplication((end - begin, inner, columns), *layouts, add=bias is not None)
            multiply(at_a + begin * a_row, at_b, at_out + begin * out_row)

    in_parts(part, num_tiles, 1, WORK_OF_A_PART // (ROWS_OF_A_TILE * inner * columns) + 1)
    return out


def matmul(a: np.ndarray, b: np.ndarray, like: Optional[np.ndarray] = None) -> np.ndarray:
    """``a @ b`` as ``np.matmul`` defines it, of ranks from 2 on: the dimensions before the last two are broadcast.

    The result's dimensions lie in memory in the order of those of ``like``, which has as many.

    Raises:
        ValueError: the shapes do not fit.
    """
    (rows, inner), columns = a.shape[-2:], b.shape[-1]
    if inner != b.shape[-2]:
        raise ValueError(f"matmul: shapes {a.shape} and {b.shape} do not fit: {inner} columns, {b.shape[-2]} rows")
    if b.ndim == 2 and like is None:
        return product(a.reshape(math.prod(a.shape[:-1]), inner), b).reshape(*a.shape[:-1], columns)
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    shape = (*batch, rows, columns)
    out = empty(*shape) if like is None else empty_like(shape, like)
    if not out.size or not inner:
        out[...] = 0
        return out
    a, b = (np.broadcast_to(_for_blas(x), batch + x.shape[-2:]) for x in (a, b))
    if not onednn.is_there():
        return np.matmul(a, b, out=out)
    if out.strides[-1] == ITEM_BYTES:
        _one_by_one(a, b, out)
    elif out.strides[-2] == ITEM_BYTES:
        # (a b)' = b' a', whose rows lie in one piece.
        _one_by_one(b.swapaxes(-1, -2), a.swapaxes(-1, -2), out.swapaxes(-1, -2))
    else:
        out[...] = matmul(a, b)
    return out


def column_sums(x: np.ndarray) -> np.ndarray:
    """The sum of a matrix's rows, of shape (N,): of blocks of them, then of those sums, which keeps more digits."""
    blocks = range(0, max(1, len(x)), ROWS_OF_A_SUM)
    return np.stack([x[begin : begin + ROWS_OF_A_SUM].sum(0) for begin in blocks]).sum(0)


def _one_by_one(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """The product of each pair of matrices, shared out among the cores; the dimensions before are equal."""
    (rows, inner), columns = a.shape[-2:], b.shape[-1]
    addresses = list(zip(_addresses(a), _addresses(b), _addresses(out)))
    _, out_stride = _layout(out)

    def part(first: int, last: int) -> None:
        multiply = onednn.multiplication((rows, inner, columns), _layout(a), _layout(b), out_stride, add=False)
        for pair in addresses[first:last]:
            multiply(*pair)

    in_parts(part, len(addresses), 1, WORK_OF_A_PART // (rows * inner * columns) + 1)


def _addresses(x: np.ndarray) -> list[int]:
    """Where each matrix of an array begins."""
    offsets = np.zeros(x.shape[:-2], np.int64)
    for axis, (length, stride) in enumerate(zip(x.shape[:-2], x.strides)):
        offsets += (np.arange(length) * stride).reshape([-1 if other == axis else 1 for other in range(x.ndim - 2)])
    return (x.ctypes.data + offsets).ravel().tolist()


def _for_blas(x: np.ndarray) -> np.ndarray:
    """Matrices that lie in memory row by row, or column by column: as they are, or else copied."""
    return x if _lies_in_rows(x) or _lies_in_rows(x.swapaxes(-1, -2)) else np.ascontiguousarray(x)


def _lies_in_rows(x: np.ndarray) -> bool:
    """Whether each row is in one piece, and behind the one before."""
    rows, columns = x.shape[-2:]
    by_row, by_column = x.strides[-2:]
    return (by_column == ITEM_BYTES or columns == 1) and (by_row >= columns * ITEM_BYTES or rows == 1)


def _layout(x: np.ndarray) -> onednn.Layout:
    """How BLAS is told of a matrix that :func:`_for_blas` lets pass."""
    transposed = not _lies_in_rows(x)
    by_row, columns = (x.strides[-1], x.shape[-2]) if transposed else (x.strides[-2], x.shape[-1])
    return b"T" if transposed else b"N", max(by_row // ITEM_BYTES, columns)
