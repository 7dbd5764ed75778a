"""This module applies dropout masks to arrays; functions.py calls it."""

from __future__ import annotations

import numpy as np

from mindnlp_dp.kernels.memory_pool import empty
from mindnlp_dp.kernels.workers import parallel_for_blocks


def masked(x: np.ndarray, keep: np.ndarray, scale: float) -> np.ndarray:
    """Return ``x * keep * scale``, in the shape of ``x``; ``keep`` is flat."""
    out = empty(*x.shape)
    x, y = np.ascontiguousarray(x).reshape(-1), out.reshape(-1)

    def block(at: slice) -> None:
        np.multiply(keep[at], np.float32(scale), out=y[at])
        y[at] *= x[at]

    parallel_for_blocks(block, x.size)
    return out
