"""The cross-entropy of rows of logits with a class each, in blocks of rows that stay in a core's cache."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .memory import empty
from .workers import in_parts

# Elements of a block of rows.
BLOCK = 1 << 15
# What is worth a second core.
SMALLEST_PART = 1 << 17


def losses(logits: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Minus the logarithm of the softmax of each row at its class.

    ``logits``: (N, C), ``classes``: (N,), in ``range(C)``. Comes out: (N,).
    """
    rows, columns = logits.shape
    out = np.empty(rows, np.float32)

    def part(first: int, last: int) -> None:
        for at in _blocks(first, last, columns):
            block = logits[at] - logits[at].max(1, keepdims=True)
            own = np.take_along_axis(block, classes[at, None], 1)[:, 0]
            np.subtract(np.log(np.exp(block, out=block).sum(1)), own, out=out[at])

    _over_rows(part, rows, columns)
    return out


def backward(gradients: np.ndarray, logits: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """The gradient of the logits, of shape (N, C), from those of the losses, of shape (N,).

    The softmax is computed once more: to keep it would take as much memory as the logits.
    """
    rows, columns = logits.shape
    out = empty(rows, columns)

    def part(first: int, last: int) -> None:
        for at in _blocks(first, last, columns):
            block, g = out[at], gradients[at]
            np.subtract(logits[at], logits[at].max(1, keepdims=True), out=block)
            np.exp(block, out=block)
            block *= (g / block.sum(1))[:, None]
            block[np.arange(len(block)), classes[at]] -= g

    _over_rows(part, rows, columns)
    return out


def _blocks(first: int, last: int, columns: int) -> list[slice]:
    size = max(1, BLOCK // columns)
    return [slice(begin, min(begin + size, last)) for begin in range(first, last, size)]


def _over_rows(part: Callable[[int, int], None], rows: int, columns: int) -> None:
    in_parts(part, rows, max(1, BLOCK // columns), SMALLEST_PART // columns + 1)
