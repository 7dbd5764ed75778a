"""Layer and RMS normalisation of matrices, row by row, in blocks that stay in a core's cache.

Sums over the rows are taken block by block and then added up, so that their error does not grow with their number;
blocks are the same whatever the number of cores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Optional

import numpy as np

from .memory import empty
from .workers import in_parts

# Elements of a block of rows.
BLOCK = 1 << 15
# What is worth a second core.
SMALLEST_PART = 1 << 17

Weight = Optional[np.ndarray]
# Two columns: the mean of every row, and one over its standard deviation.
Statistics = tuple[np.ndarray, np.ndarray]


def normalize(
    x: np.ndarray, weight: Weight, bias: Weight, epsilon: float, centred: bool
) -> tuple[np.ndarray, Statistics]:
    """``(x - mean) / sqrt(variance + epsilon)`` of every row of a matrix, times ``weight`` plus ``bias``.

    Not ``centred``, it is RMS normalisation: the mean is taken for zero. Comes out: the result, and what the
    backward pass needs.
    """
    rows, columns = x.shape
    out = empty(rows, columns)
    mean, scale = np.zeros((rows, 1), np.float32), np.empty((rows, 1), np.float32)

    def part(first: int, last: int) -> None:
        for at in _blocks(first, last, columns):
            block, y = x[at], out[at]
            if centred:
                np.mean(block, axis=1, keepdims=True, out=mean[at])
                np.subtract(block, mean[at], out=y)
            else:
                y[...] = block
            variance = np.einsum("ij,ij->i", y, y)[:, None] / np.float32(columns)
            np.divide(np.float32(1), np.sqrt(variance + np.float32(epsilon)), out=scale[at])
            y *= scale[at]
            if weight is not None:
                y *= weight
            if bias is not None:
                y += bias

    _over_rows(part, rows, columns)
    return out, (mean, scale)


def normalize_backward(
    gradient: np.ndarray, x: np.ndarray, weight: Weight, statistics: Statistics, centred: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The gradients of ``x``, of ``weight`` and of ``bias``, of shapes (M, N), (N,) and (N,)."""
    (rows, columns), (mean, scale) = x.shape, statistics
    of_x = empty(rows, columns)
    size = _rows_of_a_block(columns)
    sums = np.empty((2, -(-rows // size), columns), np.float32)

    def part(first: int, last: int) -> None:
        for at in _blocks(first, last, columns):
            g, out = gradient[at], of_x[at]
            normalized = x[at] - mean[at] if centred else x[at].copy()
            normalized *= scale[at]
            weighted = g * normalized
            np.sum(weighted, axis=0, out=sums[0, at.start // size])
            np.sum(g, axis=0, out=sums[1, at.start // size])
            # What is left of the gradient without its parts along (1, ..., 1) and along the normalised row itself.
            if weight is None:
                out[...] = g
            else:
                np.multiply(g, weight, out=out)
                weighted *= weight
            along = np.mean(weighted, axis=1, keepdims=True)
            if centred:
                out -= np.mean(out, axis=1, keepdims=True)
            normalized *= along
            out -= normalized
            out *= scale[at]

    _over_rows(part, rows, columns)
    of_weight, of_bias = sums.sum(1)
    return of_x, of_weight, of_bias


def _rows_of_a_block(columns: int) -> int:
    return max(1, BLOCK // max(1, columns))


def _blocks(first: int, last: int, columns: int) -> list[slice]:
    size = _rows_of_a_block(columns)
    return [slice(begin, min(begin + size, last)) for begin in range(first, last, size)]


def _over_rows(part: Callable[[int, int], None], rows: int, columns: int) -> None:
    in_parts(part, rows, _rows_of_a_block(columns), SMALLEST_PART // max(1, columns) + 1)
