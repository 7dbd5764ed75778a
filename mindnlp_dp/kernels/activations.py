"""This module computes GELU and its derivative, in blocks that stay in a core's cache; functions.py calls it.

Each function returns the values, and the derivative if asked. The graph saves the derivative, so that the backward pass
is one multiplication.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Optional

import numpy as np

from mindnlp_dp.kernels.memory import empty
from mindnlp_dp.kernels.workers import parallel_for_blocks

# For z >= 0, the upper tail of the normal distribution is exp(-z^2 / 2) times a polynomial in t = 1 / (1 + P z) without
# a constant term: Hastings' form (Abramowitz and Stegun, Handbook of Mathematical Functions, 26.2.17) with one more
# term, fitted by iteratively reweighted least squares to an error of 5e-9. The resolution of float32 there is 6e-8.
P = 0.275
TAIL = (0.11780930135, 0.04211119462, 0.33393296881, -0.33099419878, 0.45199917651, -0.11485843776)
DENSITY_AT_ZERO = 0.3989422804
# The argument of tanh is TANH_SLOPE (x + TANH_CUBE x^3).
TANH_SLOPE, TANH_CUBE = 0.7978845608, 0.044715

_Block = Callable[[np.ndarray, np.ndarray, Optional[np.ndarray], list[np.ndarray]], None]


def gelu(x: np.ndarray, derivative: bool) -> tuple[np.ndarray, Optional[np.ndarray]]:
    """Return ``x Phi(x)``, Phi being the normal distribution function, and its derivative (Hendrycks, Gimpel, 2016)."""
    return _computed(_gelu, x, derivative, 3)


def gelu_tanh(x: np.ndarray, derivative: bool) -> tuple[np.ndarray, Optional[np.ndarray]]:
    """Return GELU with Phi(x) approximated by ``(1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2``."""
    return _computed(_gelu_tanh, x, derivative, 2)


def gelu_quick(x: np.ndarray, derivative: bool) -> tuple[np.ndarray, Optional[np.ndarray]]:
    """Return GELU with Phi(x) approximated by ``sigmoid(1.702 x)``."""
    return _computed(_gelu_quick, x, derivative, 1)


def backward(gradient: np.ndarray, slope: np.ndarray) -> np.ndarray:
    """Return the gradient of an activation's input: the output's gradient times the derivative."""
    out = empty(*slope.shape)
    g, dy, of_x = np.ascontiguousarray(gradient).reshape(-1), slope.reshape(-1), out.reshape(-1)
    parallel_for_blocks(lambda at: np.multiply(g[at], dy[at], out=of_x[at]), g.size)
    return out


def _computed(
    block: _Block, x: np.ndarray, derivative: bool, num_scratch: int
) -> tuple[np.ndarray, Optional[np.ndarray]]:
    out = empty(*x.shape)
    slope = empty(*x.shape) if derivative else None
    x, y, dy = np.ascontiguousarray(x).reshape(-1), out.reshape(-1), None if slope is None else slope.reshape(-1)

    def compute(at: slice) -> None:
        scratch = np.empty((num_scratch, at.stop - at.start), np.float32)
        block(x[at], y[at], None if dy is None else dy[at], list(scratch))

    parallel_for_blocks(compute, x.size)
    return out, slope


def _gelu(x: np.ndarray, y: np.ndarray, dy: Optional[np.ndarray], scratch: list[np.ndarray]) -> None:
    e, t, q = scratch
    np.multiply(x, x, out=e)
    e *= np.float32(-0.5)
    np.exp(e, out=e)
    np.abs(x, out=t)
    t *= np.float32(P)
    t += np.float32(1)
    np.divide(np.float32(1), t, out=t)
    np.multiply(t, np.float32(TAIL[-1]), out=q)
    for coefficient in TAIL[-2::-1]:
        q += np.float32(coefficient)
        q *= t
    q *= e
    # Phi(x) is the tail where x is negative, else 1 minus the tail.
    np.subtract(np.float32(0.5), q, out=q)
    np.copysign(q, x, out=q)
    q += np.float32(0.5)
    np.multiply(x, q, out=y)
    if dy is not None:
        e *= x
        e *= np.float32(DENSITY_AT_ZERO)
        np.add(q, e, out=dy)


def _gelu_tanh(x: np.ndarray, y: np.ndarray, dy: Optional[np.ndarray], scratch: list[np.ndarray]) -> None:
    square, e = scratch
    # Phi is (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)); computing 1 - Phi as exp(-2 u) Phi avoids cancellation.
    np.multiply(x, x, out=square)
    np.multiply(square, np.float32(-2 * TANH_SLOPE * TANH_CUBE), out=e)
    e += np.float32(-2 * TANH_SLOPE)
    e *= x
    np.exp(e, out=e)
    np.add(e, np.float32(1), out=y)
    np.divide(np.float32(1), y, out=y)
    if dy is not None:
        # Phi + x Phi (1 - Phi) times the derivative of 2 u
        square *= np.float32(6 * TANH_SLOPE * TANH_CUBE)
        square += np.float32(2 * TANH_SLOPE)
        square *= x
        # infinity times 0 would be NaN
        np.minimum(e, np.finfo(np.float32).max, out=e)
        e *= y
        square *= e
        square *= y
        np.add(square, y, out=dy)
    y *= x


def _gelu_quick(x: np.ndarray, y: np.ndarray, dy: Optional[np.ndarray], scratch: list[np.ndarray]) -> None:
    (s,) = scratch
    np.multiply(x, np.float32(-1.702), out=s)
    np.exp(s, out=s)
    s += np.float32(1)
    np.divide(np.float32(1), s, out=s)
    if dy is not None:
        # s (1 + 1.702 x (1 - s))
        np.subtract(np.float32(1), s, out=dy)
        dy *= x
        dy *= np.float32(1.702)
        dy += np.float32(1)
        dy *= s
    np.multiply(x, s, out=y)
