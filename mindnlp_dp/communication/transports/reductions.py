"""This module reduces arrays by NumPy where a library cannot, or gives other results; the transports call it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np

REDUCTIONS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "sum": np.add,
    "max": np.maximum,
    "min": np.minimum,
}


def reduce_arrays(arrays: Sequence[np.ndarray], op: str) -> np.ndarray:
    """Reduce ``arrays`` in rank order, so that every rank computes the same bits."""
    return functools.reduce(REDUCTIONS[op], arrays)
