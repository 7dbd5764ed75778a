"""This module computes GELU and SiLU and their gradients; functions.py calls it.

oneDNN's primitives compute them in one pass over the memory, and the gradient from the input. Where they are missing,
or slow on this core, or the values are not finite, NumPy computes them in blocks that stay in a core's cache, together
with the derivative, so that the backward pass is one multiplication.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Optional

import numpy as np

from mindnlp_dp.kernels import onednn
from mindnlp_dp.kernels.memory_pool import ITEM_BYTES, empty
from mindnlp_dp.kernels.workers import SMALLEST_PART, parallel_for, parallel_for_blocks

# For z >= 0, the upper tail of the normal distribution is exp(-z^2 / 2) times a polynomial in t = 1 / (1 + P z) without
# a constant term: Hastings' form (Abramowitz and Stegun, Handbook of Mathematical Functions, 26.2.17) with one more
# term, fitted by iteratively reweighted least squares to an error of 5e-9. The resolution of float32 there is 6e-8.
P = 0.275
TAIL = (0.11780930135, 0.04211119462, 0.33393296881, -0.33099419878, 0.45199917651, -0.11485843776)
DENSITY_AT_ZERO = 0.3989422804
# The argument of tanh is TANH_SLOPE (x + TANH_CUBE x^3).
TANH_SLOPE, TANH_CUBE = 0.7978845608, 0.044715

# Parts of an array begin at multiples of a cache line, and so of a vector register.
ALIGNED = 16

_Block = Callable[[np.ndarray, np.ndarray, Optional[np.ndarray], list[np.ndarray]], None]


def forward(name: str, x: np.ndarray, derivative: bool) -> tuple[np.ndarray, Optional[np.ndarray]]:
    """Return an activation of ``x``, and its derivative if asked and if :func:`backward` needs it.

    * "gelu": ``x Phi(x)``, Phi being the normal distribution function (Hendrycks, Gimpel, 2016).
    * "gelu_tanh": GELU with Phi(x) approximated by ``(1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2``.
    * "gelu_quick": GELU with Phi(x) approximated by ``sigmoid(1.702 x)``.
    * "silu": ``x sigmoid(x)``.
    """
    if not _has_primitive(name, x):
        return _computed(name, x, derivative)
    out = empty(*x.shape)
    x = np.ascontiguousarray(x)
    at_x, at_y = x.ctypes.data, out.ctypes.data

    def part(first: int, last: int) -> None:
        run = onednn.activation(name, last - first)
        run(at_x + first * ITEM_BYTES, at_y + first * ITEM_BYTES)

    parallel_for(part, x.size, ALIGNED, SMALLEST_PART)
    return out, None


def backward(name: str, gradient: np.ndarray, x: np.ndarray, slope: Optional[np.ndarray]) -> np.ndarray:
    """Return the gradient of an activation's input from that of its output, the input, and the derivative, if kept."""
    out = empty(*x.shape)
    g = np.ascontiguousarray(gradient)
    if slope is None:
        x = np.ascontiguousarray(x)
        at_x, at_g, at_out = x.ctypes.data, g.ctypes.data, out.ctypes.data

        def part(first: int, last: int) -> None:
            run = onednn.activation_backward(name, last - first)
            run(*(at + first * ITEM_BYTES for at in (at_x, at_g, at_out)))

        parallel_for(part, x.size, ALIGNED, SMALLEST_PART)
        # This is also infinite for large finite gradients; NumPy then computes them again.
        if np.isfinite(np.dot(out.reshape(-1), out.reshape(-1))):
            return out
        # Where the input is infinite, oneDNN returns NaN instead of the limit, 0 or 1 times the gradient.
        _, slope = _computed(name, x, True)
        assert slope is not None, "asked for"
    g, dy, of_x = g.reshape(-1), slope.reshape(-1), out.reshape(-1)
    parallel_for_blocks(lambda at: np.multiply(g[at], dy[at], out=of_x[at]), g.size)
    return out


def _has_primitive(name: str, x: np.ndarray) -> bool:
    is_fast = onednn.has_fast_exponentials() if name == "gelu_tanh" else onednn.has_primitives()
    return is_fast and x.size > 0


def _computed(name: str, x: np.ndarray, derivative: bool) -> tuple[np.ndarray, Optional[np.ndarray]]:
    block, num_scratch = _BLOCKS[name]
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
    _swish(x, y, dy, scratch, 1.702)


def _silu(x: np.ndarray, y: np.ndarray, dy: Optional[np.ndarray], scratch: list[np.ndarray]) -> None:
    _swish(x, y, dy, scratch, 1.0)


def _swish(x: np.ndarray, y: np.ndarray, dy: Optional[np.ndarray], scratch: list[np.ndarray], slope: float) -> None:
    (s,) = scratch
    np.multiply(x, np.float32(-slope), out=s)
    np.exp(s, out=s)
    s += np.float32(1)
    np.divide(np.float32(1), s, out=s)
    if dy is not None:
        # s (1 + slope x (1 - s))
        np.subtract(np.float32(1), s, out=dy)
        dy *= x
        dy *= np.float32(slope)
        dy += np.float32(1)
        dy *= s
    np.multiply(x, s, out=y)


# For each activation, the function that computes a block, and the number of scratch arrays that it needs.
_BLOCKS: dict[str, tuple[_Block, int]] = {
    "gelu": (_gelu, 3),
    "gelu_tanh": (_gelu_tanh, 2),
    "gelu_quick": (_gelu_quick, 1),
    "silu": (_silu, 1),
}
