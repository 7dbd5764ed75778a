"""This module computes the cross-entropy of logits and its gradient, in blocks of rows that stay in a core's cache."""

from __future__ import annotations

from typing import NamedTuple, Optional

import numpy as np

from mindnlp_dp.kernels.memory_pool import empty
from mindnlp_dp.kernels.workers import parallel_for_blocks


class Softmax(NamedTuple):
    """The softmax of each row, not yet divided by the row's sum; kept for :func:`backward`, which has no logits."""

    exponentials: np.ndarray
    sums: np.ndarray


def losses(logits: np.ndarray, classes: np.ndarray, keep: bool = False) -> tuple[np.ndarray, Optional[Softmax]]:
    """Return ``-log(softmax(row)[class])`` for each row, and the softmax for :func:`backward`.

    Args:
        logits: array of shape (N, C).
        classes: array of shape (N,), with values in ``range(C)``.
        keep: whether to keep the softmax, which takes as much memory as the logits.

    Returns:
        The losses, of shape (N,), and the softmax if ``keep``, else None.
    """
    rows, columns = logits.shape
    out, sums = np.empty(rows, np.float32), np.empty(rows, np.float32)
    exponentials = empty(rows, columns) if keep else None

    def block(at: slice) -> None:
        centered = np.subtract(
            logits[at], logits[at].max(1, keepdims=True), out=None if exponentials is None else exponentials[at]
        )
        own = np.take_along_axis(centered, classes[at, None], 1)[:, 0]
        np.exp(centered, out=centered).sum(1, out=sums[at])
        np.subtract(np.log(sums[at]), own, out=out[at])

    parallel_for_blocks(block, rows, columns)
    return out, None if exponentials is None else Softmax(exponentials, sums)


def backward(gradients: np.ndarray, softmax: Softmax, classes: np.ndarray) -> np.ndarray:
    """Return the gradient of the logits, of shape (N, C), from the gradients of the losses, of shape (N,)."""
    rows, columns = softmax.exponentials.shape
    out = empty(rows, columns)

    def block(at: slice) -> None:
        of_logits, g = out[at], gradients[at]
        np.multiply(softmax.exponentials[at], (g / softmax.sums[at])[:, None], out=of_logits)
        of_logits[np.arange(len(g)), classes[at]] -= g

    parallel_for_blocks(block, rows, columns)
    return out
