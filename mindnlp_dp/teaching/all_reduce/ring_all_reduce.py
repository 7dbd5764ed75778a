"""Ring all-reduce: every rank sends to its right neighbour only, and all of them send at once.

The array is cut into N chunks. In the scatter-reduce, a chunk goes round and every rank adds its own to it; after N-1
messages each rank holds the whole sum of one chunk. In the all-gather these go round once more::

    N = 3        chunk 0   chunk 1   chunk 2            chunk 0   chunk 1   chunk 2
    rank 0         a0        a1        a2     ───▶                  Σ1
    rank 1         b0        b1        b2    scatter-                         Σ2        ───▶   Σ0  Σ1  Σ2
    rank 2         c0        c1        c2    reduce        Σ0                         all-gather  on all

Each rank sends 2(N-1) messages of a N-th of the array each: 2(N-1)K/N bytes, whatever N. Patarasuk and Yuan, "Bandwidth
optimal all-reduce algorithms for clusters of workstations", Journal of Parallel and Distributed Computing, 2009.
"""

from __future__ import annotations

from typing import Callable

import numpy as np

from .endpoint import Endpoint, parts_of


def ring_all_reduce(endpoint: Endpoint, array: np.ndarray) -> np.ndarray:
    """The sum over the ranks, for every rank."""
    result = array.copy()
    chunks = parts_of(result, endpoint.world_size)
    scatter_reduce(endpoint, chunks)
    all_gather(endpoint, chunks)
    return result


def scatter_reduce(endpoint: Endpoint, chunks: list[np.ndarray]) -> None:
    """Leave the whole sum of chunk ``rank + 1`` (modulo N) on every rank, in place; the others are sums of some."""
    _go_round(endpoint, chunks, endpoint.rank, "scatter-reduce", np.add)


def all_gather(endpoint: Endpoint, chunks: list[np.ndarray]) -> None:
    """Take the whole sums round, in place."""
    _go_round(endpoint, chunks, endpoint.rank + 1, "all-gather", lambda mine, received: received)


def _go_round(
    endpoint: Endpoint, chunks: list[np.ndarray], first: int, phase: str, combine: Callable[..., np.ndarray]
) -> None:
    """N-1 times, send a chunk to the right, from ``first`` on, and combine one with the left neighbour's."""
    rank, size = endpoint.rank, endpoint.world_size
    for step in range(size - 1):
        sent, received = (first - step) % size, (first - step - 1) % size
        incoming = endpoint.sendrecv(
            chunks[sent], (rank + 1) % size, chunks[received], (rank - 1) % size,
            phase=f"{phase} {step + 1} of {size - 1}", part=f"chunk {sent}",
        )  # fmt: skip
        chunks[received][:] = combine(chunks[received], incoming)
