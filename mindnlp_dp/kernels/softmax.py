"""This module computes the softmax of a matrix's rows and its gradient; functions.py calls it."""

from __future__ import annotations

import numpy as np

from mindnlp_dp.kernels import onednn
from mindnlp_dp.kernels.memory_pool import ITEM_BYTES, empty
from mindnlp_dp.kernels.workers import SMALLEST_PART, parallel_for, parallel_for_blocks


def softmax_of_rows(x: np.ndarray) -> np.ndarray:
    """Return the softmax of each row, of shape (M, N) like ``x``."""
    rows, columns = x.shape
    out = empty(rows, columns)
    if onednn.has_primitives() and out.size:
        x = np.ascontiguousarray(x)
        at_x, at_out, row = x.ctypes.data, out.ctypes.data, columns * ITEM_BYTES

        def part(first: int, last: int) -> None:
            onednn.softmax(last - first, columns)(at_x + first * row, at_out + first * row)

        parallel_for(part, rows, 1, SMALLEST_PART // columns + 1)
        return out

    def block(at: slice) -> None:
        y = np.subtract(x[at], x[at].max(1, keepdims=True), out=out[at])
        np.exp(y, out=y)
        y /= y.sum(1, keepdims=True)

    if out.size:
        parallel_for_blocks(block, rows, columns)
    return out


def softmax_backward(gradient: np.ndarray, result: np.ndarray) -> np.ndarray:
    """Return the gradient of the input from that of the output and the output, all of shape (M, N)."""
    rows, columns = result.shape
    out = empty(rows, columns)
    if onednn.has_fast_exponentials() and out.size:
        g, y = np.ascontiguousarray(gradient), np.ascontiguousarray(result)
        at_g, at_y, at_out, row = g.ctypes.data, y.ctypes.data, out.ctypes.data, columns * ITEM_BYTES

        def part(first: int, last: int) -> None:
            onednn.softmax_backward(last - first, columns)(*(at + first * row for at in (at_y, at_g, at_out)))

        parallel_for(part, rows, 1, SMALLEST_PART // columns + 1)
        return out

    def block(at: slice) -> None:
        g, y, of_x = gradient[at], result[at], out[at]
        along = np.einsum("ij,ij->i", g, y)
        np.subtract(g, along[:, None], out=of_x)
        of_x *= y

    if out.size:
        parallel_for_blocks(block, rows, columns)
    return out
