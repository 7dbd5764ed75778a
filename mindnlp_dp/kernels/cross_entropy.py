"""The cross-entropy of rows of logits with a class each, in blocks of rows that stay in a core's cache."""

from __future__ import annotations

import numpy as np

from .memory import empty
from .workers import in_parts

# Elements of a block of rows.
BLOCK = 1 << 15
# What is worth a second core.
SMALLEST_PART = 1 << 17


def losses(logits: np.ndarray, classes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Minus the logarithm of the softmax of each row at its class, and the softmax.

    ``logits``: (N, C), ``classes``: (N,), in ``range(C)``. Comes out: (N,) and (N, C).
    """
    rows, columns = logits.shape
    shares, out = empty(rows, columns), np.empty(rows, np.float32)

    def part(first: int, last: int) -> None:
        for begin in range(first, last, size):
            at = slice(begin, min(begin + size, last))
            block = shares[at]
            np.subtract(logits[at], logits[at].max(1, keepdims=True), out=block)
            own = np.take_along_axis(block, classes[at, None], 1)[:, 0]
            np.exp(block, out=block)
            total = block.sum(1, keepdims=True)
            block /= total
            np.subtract(np.log(total[:, 0]), own, out=out[at])

    size = max(1, BLOCK // columns)
    in_parts(part, rows, size, SMALLEST_PART // columns + 1)
    return out, shares


def backward(gradients: np.ndarray, shares: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """The gradient of the logits, of shape (N, C), from those of the losses, of shape (N,)."""
    rows, columns = shares.shape
    out = empty(rows, columns)

    def part(first: int, last: int) -> None:
        np.multiply(shares[first:last], gradients[first:last, None], out=out[first:last])
        out[np.arange(first, last), classes[first:last]] -= gradients[first:last]

    in_parts(part, rows, 1, SMALLEST_PART // columns + 1)
    return out
