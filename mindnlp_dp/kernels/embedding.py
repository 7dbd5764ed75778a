"""This module computes the gradient of an embedding table; functions.py calls it."""

from __future__ import annotations

import numpy as np

from mindnlp_dp.kernels.memory_pool import empty


def scatter_rows(rows: np.ndarray, ids: np.ndarray, num_rows: int) -> np.ndarray:
    """Add each ``rows[i]`` to row ``ids[i]`` of a table of zeros, in the order of ``i``, and return the table.

    ``rows``: (N, D). ``ids``: (N,), with values in ``range(num_rows)``. The table has the shape (num_rows, D).
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
