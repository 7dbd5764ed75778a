"""The cross-entropy of rows of logits with a class each, in blocks of rows that stay in a core's cache."""

from __future__ import annotations

import numpy as np

from .memory import empty
from .workers import in_blocks


def losses(logits: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Minus the logarithm of the softmax of each row at its class.

    ``logits``: (N, C), ``classes``: (N,), in ``range(C)``. Comes out: (N,).
    """
    rows, columns = logits.shape
    out = np.empty(rows, np.float32)

    def block(at: slice) -> None:
        centred = logits[at] - logits[at].max(1, keepdims=True)
        own = np.take_along_axis(centred, classes[at, None], 1)[:, 0]
        np.subtract(np.log(np.exp(centred, out=centred).sum(1)), own, out=out[at])

    in_blocks(block, rows, columns)
    return out


def backward(gradients: np.ndarray, logits: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """The gradient of the logits, of shape (N, C), from those of the losses, of shape (N,).

    The softmax is computed once more: to keep it would take as much memory as the logits.
    """
    rows, columns = logits.shape
    out = empty(rows, columns)

    def block(at: slice) -> None:
        of_logits, g = out[at], gradients[at]
        np.subtract(logits[at], logits[at].max(1, keepdims=True), out=of_logits)
        np.exp(of_logits, out=of_logits)
        of_logits *= (g / of_logits.sum(1))[:, None]
        of_logits[np.arange(len(g)), classes[at]] -= g

    in_blocks(block, rows, columns)
    return out
