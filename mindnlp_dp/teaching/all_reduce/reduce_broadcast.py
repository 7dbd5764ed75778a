"""This module implements Reduce, Broadcast, and AllReduce as Reduce followed by Broadcast (a star topology).

::

    Reduce (sum to rank 0)          Broadcast (from rank 0)
      1 ──┐                           ┌──▶ 1
      2 ──┼──▶ 0                  0 ──┼──▶ 2
      3 ──┘                           └──▶ 3

The MPI standard defines the three operations (MPI Forum, "MPI: A Message-Passing Interface Standard", version 4.1,
chapter 6). Rank 0 sends and receives K bytes for every other rank: its traffic grows with the number of ranks.
"""

from __future__ import annotations

from typing import Optional

import numpy as np

from .endpoint import Endpoint


def reduce(endpoint: Endpoint, array: np.ndarray, dst: int = 0) -> Optional[np.ndarray]:
    """Return the sum over the ranks, added in rank order, on rank ``dst``; None on the others."""
    if endpoint.rank != dst:
        endpoint.send(array, dst, "reduce")
        return None
    parts = [array if src == dst else endpoint.recv(array, src) for src in range(endpoint.world_size)]
    total = parts[0].copy()
    for part in parts[1:]:
        total = total + part
    return total


def broadcast(endpoint: Endpoint, array: np.ndarray, src: int = 0) -> np.ndarray:
    """Return rank ``src``'s array on every rank; on the others, ``array`` only gives the length and the type."""
    if endpoint.rank != src:
        return endpoint.recv(array, src)
    for dst in range(endpoint.world_size):
        if dst != src:
            endpoint.send(array, dst, "broadcast")
    return array.copy()


def all_reduce(endpoint: Endpoint, array: np.ndarray) -> np.ndarray:
    """Return the sum over the ranks, on every rank: Reduce to rank 0, then Broadcast from it."""
    total = reduce(endpoint, array)
    return broadcast(endpoint, array if total is None else total)
