"""This module computes the cross-entropy of a linear layer's outputs without ever having all of them.

The rows are computed in chunks: logits, losses, and at once the gradients, so that no chunk's logits are kept for the
backward pass. The method is that of Wijmans et al., *Cut Your Losses in Large-Vocabulary Language Models* (2024), and
of Liger-Kernel's fused linear cross-entropy. functions.py calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Optional

import numpy as np

from mindnlp_dp.kernels.matmul import add_product, product
from mindnlp_dp.kernels.memory_pool import ITEM_BYTES, empty
from mindnlp_dp.kernels.workers import parallel_for_blocks

# The memory of a chunk's logits. Each chunk reads and writes the gradient of the weights once, so that smaller chunks
# are slower.
CHUNK_BYTES = 1 << 27


class Gradients(NamedTuple):
    """The gradients of the sum of the weighted losses; None for those that were not asked for."""

    of_x: Optional[np.ndarray]
    of_weight: Optional[np.ndarray]
    of_bias: Optional[np.ndarray]


def losses_and_gradients(
    x: np.ndarray,
    weight: np.ndarray,
    bias: Optional[np.ndarray],
    classes: np.ndarray,
    *,
    weights: np.ndarray,
    wanted: Sequence[bool],
) -> tuple[np.ndarray, Gradients]:
    """Return ``-log(softmax(x @ weight.T + bias)[class])`` of each row, (N,), and gradients.

    Args:
        x: (N, K).
        weight: (C, K).
        bias: (C,) or None.
        classes: (N,), with values in ``range(C)``.
        weights: (N,), the weight of each row's loss in the sum whose gradients are computed.
        wanted: whether to compute the gradients of ``x``, ``weight`` and ``bias``.
    """
    rows, inner = x.shape
    num_classes = weight.shape[0]
    losses = np.empty(rows, np.float32)
    of_x = empty(rows, inner) if wanted[0] else None
    of_weight = np.zeros(weight.shape, np.float32) if wanted[1] else None
    of_bias = np.zeros(num_classes, np.float32) if wanted[2] and bias is not None else None
    chunk = max(1, CHUNK_BYTES // (ITEM_BYTES * max(num_classes, 1)))
    for begin in range(0, rows, chunk):
        at = slice(begin, begin + chunk)
        logits = product(x[at], weight.T, bias)
        _in_place(logits, classes[at], weights[at], losses[at], any(wanted))
        if of_x is not None:
            of_x[at] = product(logits, weight)
        if of_weight is not None:
            add_product(logits.T, x[at], of_weight)
        if of_bias is not None:
            of_bias += logits.sum(0)
    return losses, Gradients(of_x, of_weight, of_bias)


def _in_place(
    logits: np.ndarray, classes: np.ndarray, weights: np.ndarray, losses: np.ndarray, has_gradient: bool
) -> None:
    """Write the losses of a chunk, and replace its logits by their gradients if ``has_gradient``."""

    def block(at: slice) -> None:
        x, own = logits[at], np.arange(len(logits[at]))
        x -= x.max(1, keepdims=True)
        of_class = x[own, classes[at]].copy()
        np.exp(x, out=x)
        sums = x.sum(1)
        np.subtract(np.log(sums), of_class, out=losses[at])
        if has_gradient:
            x *= (weights[at] / sums)[:, None]
            x[own, classes[at]] -= weights[at]

    parallel_for_blocks(block, *logits.shape)
