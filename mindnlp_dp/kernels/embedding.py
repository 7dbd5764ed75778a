"""The gradient of rows that were looked up in a table."""

from __future__ import annotations

import numpy as np

from .memory import empty


def scatter_rows(rows: np.ndarray, ids: np.ndarray, num_rows: int) -> np.ndarray:
    """A table of ``num_rows`` rows of zeros, to row ``ids[i]`` of which ``rows[i]`` was added, in the order of ``i``.

    ``rows``: (N, D), ``ids``: (N,), in ``range(num_rows)``. Comes out: (num_rows, D).
    """
    table = empty(num_rows, rows.shape[1])
    table[...] = 0
    if not len(ids):
        return table
    order = np.argsort(ids, kind="stable")
    in_order = ids[order]
    begins = np.flatnonzero(np.r_[True, in_order[1:] != in_order[:-1]])
    table[in_order[begins]] = np.add.reduceat(rows[order], begins, axis=0)
    return table
