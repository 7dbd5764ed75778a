"""Layer and RMS normalisation of matrices, row by row, in blocks that stay in a core's cache.

Sums over the rows are taken block by block and then added up, so that their error does not grow with their number;
blocks are the same whatever the number of cores.
"""

from __future__ import annotations

from typing import Optional

import numpy as np

from .memory import empty
from .workers import in_blocks, rows_of_a_block

Weight = Optional[np.ndarray]
# Columns: the mean of every row in two parts, which are taken off one after the other, and one over its standard
# deviation.
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
    mean, scale = np.zeros((rows, 2), np.float32), np.empty((rows, 1), np.float32)

    def block(at: slice) -> None:
        y = out[at]
        y[...] = x[at]
        if centred:
            _take_off_mean(y, mean[at])
        variance = np.einsum("ij,ij->i", y, y) / np.float32(columns)
        if not np.isfinite(variance).all():
            # Squares that float32 cannot hold, or rows that are no numbers.
            variance = np.einsum("ij,ij->i", y, y, dtype=np.float64) / columns
        scale[at, 0] = 1 / np.sqrt(variance + variance.dtype.type(epsilon))
        y *= scale[at]
        if weight is not None:
            y *= weight
        if bias is not None:
            y += bias

    in_blocks(block, rows, columns)
    return out, (mean, scale)


def normalize_backward(
    gradient: np.ndarray, x: np.ndarray, weight: Weight, statistics: Statistics, centred: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The gradients of ``x``, of ``weight`` and of ``bias``, of shapes (M, N), (N,) and (N,)."""
    (rows, columns), (mean, scale) = x.shape, statistics
    of_x = empty(rows, columns)
    size = rows_of_a_block(columns)
    sums = np.empty((2, -(-rows // size), columns), np.float32)

    def block(at: slice) -> None:
        out = of_x[at]
        # Row by row, as NumPy adds up most exactly.
        g, normalized = np.ascontiguousarray(gradient[at]), np.array(x[at], order="C")
        if centred:
            normalized -= mean[at, :1]
            normalized -= mean[at, 1:]
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

    in_blocks(block, rows, columns)
    of_weight, of_bias = sums.sum(1)
    return of_x, of_weight, of_bias


def _take_off_mean(rows: np.ndarray, mean: np.ndarray) -> None:
    """Subtract its mean from each row, twice: what float32 rounds off a large one is most of a small variance."""
    for part in range(2):
        np.mean(rows, axis=1, out=mean[:, part])
        if not np.isfinite(mean[:, part]).all():
            mean[:, part] = np.mean(rows, axis=1, dtype=np.float64)
        rows -= mean[:, part : part + 1]
