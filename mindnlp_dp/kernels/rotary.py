"""This module rotates queries and keys by their positions (RoFormer, arXiv 2104.09864); functions.py calls it.

Pairs are (x[i], x[i + D / 2]), as in Llama, not (x[2 i], x[2 i + 1]) as in the paper.
"""

from __future__ import annotations

import numpy as np

from mindnlp_dp.kernels.memory_pool import empty_like


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Return ``x * cos + rotate_half(x) * sin``, of the shape (batch, heads, length, D) of ``x``.

    ``cos`` and ``sin`` have the shape (batch or 1, 1, length, D), and ``rotate_half(x)`` is ``(-x_2, x_1)`` for the
    halves of the last dimension.
    """
    return _turn(x, cos, sin, -1)


def rotate_backward(gradient: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Return the gradient of ``x`` from that of the result; all shapes are those of :func:`rotate`."""
    half = sin.shape[-1] // 2
    swapped = np.concatenate([sin[..., half:], sin[..., :half]], axis=-1)
    return _turn(gradient, cos, swapped, 1)


def _turn(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, sign: int) -> np.ndarray:
    """Return ``x * cos + (sign * x_2, -sign * x_1) * sin``."""
    out = empty_like(x.shape, x)
    half = x.shape[-1] // 2
    first, second = slice(0, half), slice(half, None)
    with np.errstate(all="ignore"):
        # One sample at a time: its arrays stay in the cache.
        for sample in range(len(x)):
            of_x, of_out = x[sample], out[sample]
            c, s = (each[sample if len(each) > 1 else 0] for each in (cos, sin))
            np.multiply(of_x, c, out=of_out)
            add, subtract = (np.add, np.subtract) if sign > 0 else (np.subtract, np.add)
            add(of_out[..., first], of_x[..., second] * s[..., first], out=of_out[..., first])
            subtract(of_out[..., second], of_x[..., first] * s[..., second], out=of_out[..., second])
    return out
