"""This module computes layer and RMS normalisation of a matrix's rows, in blocks that stay in a core's cache.

functions.py calls it. Sums over the rows are taken within blocks and then added up, so that the rounding error does not
grow with the number of rows; the blocks do not depend on the number of cores.
"""

from __future__ import annotations

from typing import Optional

import numpy as np

from mindnlp_dp.kernels.memory import empty
from mindnlp_dp.kernels.workers import parallel_for_blocks, rows_of_a_block

Weight = Optional[np.ndarray]
# For each row: its mean in two parts, shape (M, 2), which are subtracted one after the other; and 1 / standard
# deviation, shape (M, 1).
Statistics = tuple[np.ndarray, np.ndarray]


def normalize(
    x: np.ndarray, weight: Weight, bias: Weight, epsilon: float, centred: bool
) -> tuple[np.ndarray, Statistics]:
    """Normalise every row: ``(x - mean) / sqrt(variance + epsilon)``, times ``weight``, plus ``bias``.

    If not ``centred``, this is RMS normalisation: the mean is taken to be 0.

    Returns:
        The result, and the statistics that the backward pass needs.
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
            # The squares overflow float32, or a row contains NaN or infinity.
            variance = np.einsum("ij,ij->i", y, y, dtype=np.float64) / columns
        scale[at, 0] = 1 / np.sqrt(variance + variance.dtype.type(epsilon))
        y *= scale[at]
        if weight is not None:
            y *= weight
        if bias is not None:
            y += bias

    parallel_for_blocks(block, rows, columns)
    return out, (mean, scale)


def normalize_backward(
    gradient: np.ndarray, x: np.ndarray, weight: Weight, statistics: Statistics, centred: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the gradients of ``x``, ``weight`` and ``bias``, of shapes (M, N), (N,) and (N,)."""
    (rows, columns), (mean, scale) = x.shape, statistics
    of_x = empty(rows, columns)
    size = rows_of_a_block(columns)
    sums = np.empty((2, -(-rows // size), columns), np.float32)

    def block(at: slice) -> None:
        out = of_x[at]
        # Row-major, because NumPy sums contiguous rows with the smallest error.
        g, normalized = np.ascontiguousarray(gradient[at]), np.array(x[at], order="C")
        if centred:
            normalized -= mean[at, :1]
            normalized -= mean[at, 1:]
        normalized *= scale[at]
        weighted = g * normalized
        np.sum(weighted, axis=0, out=sums[0, at.start // size])
        np.sum(g, axis=0, out=sums[1, at.start // size])
        # Subtract the gradient's components along (1, ..., 1) and along the normalised row.
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

    parallel_for_blocks(block, rows, columns)
    of_weight, of_bias = sums.sum(1)
    return of_x, of_weight, of_bias


def _take_off_mean(rows: np.ndarray, mean: np.ndarray) -> None:
    """Subtract each row's mean, twice: the float32 rounding error of a large mean would dominate a small variance."""
    for part in range(2):
        np.mean(rows, axis=1, out=mean[:, part])
        if not np.isfinite(mean[:, part]).all():
            mean[:, part] = np.mean(rows, axis=1, dtype=np.float64)
        rows -= mean[:, part : part + 1]
