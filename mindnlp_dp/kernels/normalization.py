"""This module computes layer and RMS normalization of a matrix's rows; functions.py calls it.

oneDNN's primitives do it in one pass over the memory. NumPy does it, in blocks that stay in a core's cache, where they
are missing, and for rows in which float32 needs care: values whose squares overflow, and a mean that is large compared
with the deviation. Sums over the rows are taken within blocks and then added up, so that the rounding error does not
grow with the number of rows; the blocks do not depend on the number of cores.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

import numpy as np

from mindnlp_dp.kernels import onednn
from mindnlp_dp.kernels.memory_pool import ITEM_BYTES, empty
from mindnlp_dp.kernels.workers import SMALLEST_PART, parallel_for, parallel_for_blocks, rows_of_a_block

Weight = Optional[np.ndarray]
# Rows whose gradients of weight and bias oneDNN sums one after the other.
ROWS_OF_A_SUM = 128
# Where a mean has more standard deviations than this, oneDNN's rounding of it would show in the result.
_MOST_DEVIATIONS = 4.0


class Statistics(NamedTuple):
    """What a backward pass needs to know of each of M rows.

    Attributes:
        mean: By oneDNN the mean, shape (M,); by NumPy the mean in two parts, which are subtracted one after the other,
            shape (M, 2).
        spread: By oneDNN the variance, shape (M,); by NumPy 1 / standard deviation, shape (M, 1).
        epsilon: What oneDNN adds to the variance; None: NumPy has computed these.
    """

    mean: np.ndarray
    spread: np.ndarray
    epsilon: Optional[float] = None


def normalize(
    x: np.ndarray, weight: Weight, bias: Weight, epsilon: float, centered: bool
) -> tuple[np.ndarray, Statistics]:
    """Normalize every row: ``(x - mean) / sqrt(variance + epsilon)``, times ``weight``, plus ``bias``.

    If not ``centered``, this is RMS normalization: the mean is taken to be 0.

    Returns:
        The result, and the statistics that the backward pass needs.
    """
    rows, columns = x.shape
    if onednn.has_primitives() and x.size:
        out, statistics = _by_onednn(np.ascontiguousarray(x), weight, bias, epsilon, centered)
        if _are_exact(statistics, centered):
            # oneDNN 3.10's gradient of RMS normalization subtracts a mean, as layer normalization's does.
            scale = None if centered else 1 / np.sqrt(statistics.spread[:, None] + np.float32(epsilon))
            return out, statistics if scale is None else Statistics(np.zeros((rows, 2), np.float32), scale)
    out = empty(rows, columns)
    mean, scale = np.zeros((rows, 2), np.float32), np.empty((rows, 1), np.float32)

    def block(at: slice) -> None:
        y = out[at]
        y[...] = x[at]
        if centered:
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
    return out, Statistics(mean, scale)


def _by_onednn(
    x: np.ndarray, weight: Weight, bias: Weight, epsilon: float, centered: bool
) -> tuple[np.ndarray, Statistics]:
    rows, columns = x.shape
    out, mean, variance = empty(rows, columns), np.zeros(rows, np.float32), np.empty(rows, np.float32)
    whole = [np.ascontiguousarray(each) for each in (weight, bias) if each is not None]
    by_row = [(x, columns), (out, columns), *[(mean, 1)] * centered, (variance, 1)]
    begins = [(array.ctypes.data, ITEM_BYTES * width) for array, width in by_row]

    def part(first: int, last: int) -> None:
        run = onednn.normalization(
            last - first, columns, epsilon, scale=weight is not None, shift=bias is not None, centered=centered
        )
        run(*(begin + first * width for begin, width in begins), *(each.ctypes.data for each in whole))

    parallel_for(part, rows, 1, SMALLEST_PART // columns + 1)
    return out, Statistics(mean, variance, epsilon)


def _are_exact(statistics: Statistics, centered: bool) -> bool:
    """Return whether float32 was enough for oneDNN's way: it rounds the mean once, and adds up squares."""
    mean, variance, _ = statistics
    if not np.isfinite(variance).all():
        return False
    return not centered or bool((np.abs(mean) <= _MOST_DEVIATIONS * np.sqrt(variance)).all())


def normalize_backward(
    gradient: np.ndarray, x: np.ndarray, weight: Weight, statistics: Statistics, centered: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the gradients of ``x``, ``weight`` and ``bias``, of shapes (M, N), (N,) and (N,)."""
    (rows, columns), (mean, scale, epsilon) = x.shape, statistics
    if epsilon is not None:
        return _backward_by_onednn(gradient, x, weight, statistics, epsilon)
    of_x = empty(rows, columns)
    size = rows_of_a_block(columns)
    sums = np.empty((2, -(-rows // size), columns), np.float32)

    def block(at: slice) -> None:
        out = of_x[at]
        # Row-major, because NumPy sums contiguous rows with the smallest error.
        g, normalized = np.ascontiguousarray(gradient[at]), np.array(x[at], order="C")
        if centered:
            normalized -= mean[at, :1]
            normalized -= mean[at, 1:]
        normalized *= scale[at]
        weighted = g * normalized
        np.sum(weighted, axis=0, out=sums[0, at.start // size])
        np.sum(g, axis=0, out=sums[1, at.start // size])
        # Subtract the gradient's components along (1, ..., 1) and along the normalized row.
        if weight is None:
            out[...] = g
        else:
            np.multiply(g, weight, out=out)
            weighted *= weight
        along = np.mean(weighted, axis=1, keepdims=True)
        if centered:
            out -= np.mean(out, axis=1, keepdims=True)
        normalized *= along
        out -= normalized
        out *= scale[at]

    parallel_for_blocks(block, rows, columns)
    of_weight, of_bias = sums.sum(1)
    return of_x, of_weight, of_bias


def _backward_by_onednn(
    gradient: np.ndarray, x: np.ndarray, weight: Weight, statistics: Statistics, epsilon: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    (rows, columns), (mean, variance, _) = x.shape, statistics
    g, x, of_x = np.ascontiguousarray(gradient), np.ascontiguousarray(x), empty(rows, columns)
    num_sums = -(-rows // ROWS_OF_A_SUM)
    of_weight, of_bias = np.zeros((2, num_sums, columns), np.float32)
    by_row = [(each.ctypes.data, ITEM_BYTES * width) for each, width in
              ((x, columns), (g, columns), (of_x, columns), (mean, 1), (variance, 1))]  # fmt: skip
    scale = None if weight is None else np.ascontiguousarray(weight)

    def part(first: int, last: int) -> None:
        for number in range(first, last):
            begin, end = number * ROWS_OF_A_SUM, min((number + 1) * ROWS_OF_A_SUM, rows)
            run = onednn.normalization_backward(end - begin, columns, epsilon, scale=scale is not None)
            of_scale = [] if scale is None else [scale.ctypes.data, of_weight[number].ctypes.data]
            run(*(at + begin * width for at, width in by_row), *of_scale, of_bias[number].ctypes.data)

    parallel_for(part, num_sums, 1, SMALLEST_PART // (ROWS_OF_A_SUM * columns) + 1)
    return of_x, of_weight.sum(0), of_bias.sum(0)


def _take_off_mean(rows: np.ndarray, mean: np.ndarray) -> None:
    """Subtract each row's mean, twice: the float32 rounding error of a large mean would dominate a small variance."""
    for part in range(2):
        np.mean(rows, axis=1, out=mean[:, part])
        if not np.isfinite(mean[:, part]).all():
            mean[:, part] = np.mean(rows, axis=1, dtype=np.float64)
        rows -= mean[:, part : part + 1]
