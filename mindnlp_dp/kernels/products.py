"""Matrix products of arrays of any rank and any strides.

Transposed and sliced matrices are handed to BLAS as they lie in memory. Large products are oneDNN's, cut by rows among
this rank's cores; many small ones are one call of NumPy's ``matmul``, which costs less than a call each. How many cores
share the work does not change a bit of it.
"""

from __future__ import annotations

import math
from typing import Optional

import numpy as np

from .memory import ITEM_BYTES, empty, empty_like
from .onednn import Sgemm, sgemm
from .workers import in_parts

# A part has so many rows at least: below 16, oneDNN takes another kernel, which adds up in another order.
ROWS_OF_A_PART = 64
# What is worth a second core: about 0.1 ms of one.
WORK_OF_A_PART = 1 << 22
# Up to this number of multiplications, one call of NumPy's for all matrices is faster than oneDNN's for each, and
# OpenBLAS stays on the thread that called it.
SMALL = 1 << 18
ROWS_OF_A_SUM = 64


def product(a: np.ndarray, b: np.ndarray, bias: Optional[np.ndarray] = None) -> np.ndarray:
    """``a @ b``, plus ``bias`` in every row: matrices of shape (M, K) and (K, N) to a new one of shape (M, N)."""
    (rows, inner), columns = a.shape, b.shape[1]
    out = empty(rows, columns)
    if bias is not None:
        out[...] = bias
    if not out.size or not inner:
        return out if bias is not None else np.zeros_like(out)
    run = sgemm()
    if run is None:
        return np.matmul(a, b) if bias is None else np.add(np.matmul(a, b), out, out=out)
    a, b = _for_blas(a), _for_blas(b)
    beta = 0.0 if bias is None else 1.0

    (a_transposed, a_stride), (b_transposed, b_stride) = _layout(a), _layout(b)
    at_a, at_b, at_out = a.ctypes.data, b.ctypes.data, out.ctypes.data
    a_row, out_row = a.strides[0], out.strides[0]

    def part(first: int, last: int) -> None:
        _check(run(
            a_transposed, b_transposed, last - first, columns, inner, 1.0, at_a + first * a_row, a_stride,
            at_b, b_stride, beta, at_out + first * out_row, columns,
        ), a, b)  # fmt: skip

    in_parts(part, rows, ROWS_OF_A_PART, WORK_OF_A_PART // (inner * columns) + 1)
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
    whole = out = empty(*shape) if like is None else empty_like(shape, like)
    if not out.size or not inner:
        out[...] = 0
        return out
    if out.strides[-1] != ITEM_BYTES:
        # (a b)' = b' a', whose rows lie in one piece.
        a, b, out = b.swapaxes(-1, -2), a.swapaxes(-1, -2), out.swapaxes(-1, -2)
    # A single matrix is a batch of one.
    a, b, out = (
        x if batch else x[None] for x in (*(np.broadcast_to(_for_blas(x), batch + x.shape[-2:]) for x in (a, b)), out)
    )
    run, work = sgemm(), rows * columns * inner
    if run is None and work > SMALL:
        # NumPy's BLAS has threads of its own for these.
        np.matmul(a, b, out=out)
    elif run is None or work <= SMALL or out.strides[-1] != ITEM_BYTES:
        _in_one_call(a, b, out, work)
    else:
        _one_by_one(run, a, b, out, work)
    return whole


def column_sums(x: np.ndarray) -> np.ndarray:
    """The sum of a matrix's rows, of shape (N,): of blocks of them, then of those sums, which keeps more digits."""
    blocks = range(0, max(1, len(x)), ROWS_OF_A_SUM)
    return np.stack([x[begin : begin + ROWS_OF_A_SUM].sum(0) for begin in blocks]).sum(0)


def _in_one_call(a: np.ndarray, b: np.ndarray, out: np.ndarray, work: int) -> None:
    """NumPy's product of many matrices, shared out along their first dimension."""

    def part(first: int, last: int) -> None:
        np.matmul(a[first:last], b[first:last], out=out[first:last])

    in_parts(part, len(out), 1, WORK_OF_A_PART // (work * math.prod(out.shape[1:-2])) + 1)


def _one_by_one(run: Sgemm, a: np.ndarray, b: np.ndarray, out: np.ndarray, work: int) -> None:
    """oneDNN's product of each pair of matrices, shared out among the cores."""
    (rows, inner), columns = a.shape[-2:], b.shape[-1]
    out_stride = max(out.strides[-2] // ITEM_BYTES, columns)
    addresses = list(zip(_addresses(a), _addresses(b), _addresses(out)))
    (a_transposed, a_stride), (b_transposed, b_stride) = _layout(a), _layout(b)

    def part(first: int, last: int) -> None:
        for at_a, at_b, at_out in addresses[first:last]:
            _check(run(
                a_transposed, b_transposed, rows, columns, inner, 1.0, at_a, a_stride, at_b, b_stride,
                0.0, at_out, out_stride,
            ), a, b)  # fmt: skip

    in_parts(part, len(addresses), 1, WORK_OF_A_PART // work + 1)


def _addresses(x: np.ndarray) -> list[int]:
    """Where each matrix of an array begins."""
    offsets = np.zeros(x.shape[:-2], np.int64)
    for axis, (length, stride) in enumerate(zip(x.shape[:-2], x.strides)):
        offsets += (np.arange(length) * stride).reshape([-1 if other == axis else 1 for other in range(x.ndim - 2)])
    return (x.ctypes.data + offsets).ravel().tolist()


def _for_blas(x: np.ndarray) -> np.ndarray:
    """Matrices of which one dimension lies in one piece, and the other does not overlap it: as they are, or copied."""
    rows, columns = x.shape[-2:]
    by_row, by_column = x.strides[-2:]
    if (by_column == ITEM_BYTES or columns == 1) and (by_row >= columns * ITEM_BYTES or rows == 1):
        return x
    if (by_row == ITEM_BYTES or rows == 1) and (by_column >= rows * ITEM_BYTES or columns == 1):
        return x
    return np.ascontiguousarray(x)


def _layout(x: np.ndarray) -> tuple[bytes, int]:
    """How BLAS is told of a matrix: whether it is transposed, and the distance of what it takes for rows."""
    rows, columns = x.shape[-2:]
    by_row, by_column = x.strides[-2:]
    if (by_column == ITEM_BYTES or columns == 1) and (by_row >= columns * ITEM_BYTES or rows == 1):
        return b"N", max(by_row // ITEM_BYTES, columns)
    return b"T", max(by_column // ITEM_BYTES, rows)


def _check(status: int, a: np.ndarray, b: np.ndarray) -> None:
    if status:
        raise RuntimeError(f"oneDNN's product of shapes {a.shape} and {b.shape} ended with status {status}")
