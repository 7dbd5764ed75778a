"""Reduce, Broadcast, and AllReduce as the one behind the other: the star that everyone draws first.

::

    Reduce (sum to rank 0)          Broadcast (from rank 0)
      1 ──┐                           ┌──▶ 1
      2 ──┼──▶ 0                  0 ──┼──▶ 2
      3 ──┘                           └──▶ 3

What they compute is defined in the MPI standard (MPI Forum, "MPI: A Message-Passing Interface Standard", version 4.1,
chapter 6). Rank 0 sends and receives K bytes for every other rank: its traffic grows with the number of ranks.
"""

from __future__ import annotations

from typing import Optional

import numpy as np

from .endpoint import Endpoint


def reduce(endpoint: Endpoint, array: np.ndarray, dst: int = 0) -> Optional[np.ndarray]:
    """The sum over the ranks, for rank ``dst``; None for the others. Added in rank order."""
    if endpoint.rank != dst:
        endpoint.send(array, dst, "reduce")
        return None
    parts = [array if src == dst else endpoint.recv(array, src) for src in range(endpoint.world_size)]
    total = parts[0].copy()
    for part in parts[1:]:
        total = total + part
    return total


def broadcast(endpoint: Endpoint, array: np.ndarray, src: int = 0) -> np.ndarray:
    """Rank ``src``'s array, for every rank; the others say with theirs how long it is, and of which type."""
    if endpoint.rank != src:
        return endpoint.recv(array, src)
    for dst in range(endpoint.world_size):
        if dst != src:
            endpoint.send(array, dst, "broadcast")
    return array.copy()


def all_reduce(endpoint: Endpoint, array: np.ndarray) -> np.ndarray:
    """The sum over the ranks, for every rank: Reduce to rank 0, then Broadcast from it."""
    total = reduce(endpoint, array)
    return broadcast(endpoint, array if total is None else total)
