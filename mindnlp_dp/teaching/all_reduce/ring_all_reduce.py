"""This module implements ring all-reduce: every rank sends only to its right neighbour, all ranks at once.

The array is split into N chunks. In the scatter-reduce, each chunk travels round the ring and every rank adds its own
values; after N-1 steps each rank holds the full sum of one chunk. In the all-gather, these sums travel round again::

    N = 3        chunk 0   chunk 1   chunk 2            chunk 0   chunk 1   chunk 2
    rank 0         a0        a1        a2     ───▶                  Σ1
    rank 1         b0        b1        b2    scatter-                         Σ2        ───▶   Σ0  Σ1  Σ2
    rank 2         c0        c1        c2    reduce        Σ0                         all-gather  on all

Each rank sends 2(N-1) messages of 1/N of the array each: 2(N-1)K/N bytes, less than 2K for any N. Patarasuk and Yuan,
"Bandwidth optimal all-reduce algorithms for clusters of workstations", Journal of Parallel and Distributed Computing,
2009.
"""

from __future__ import annotations

from typing import Callable

import numpy as np

from .endpoint import Endpoint, parts_of


def ring_all_reduce(endpoint: Endpoint, array: np.ndarray) -> np.ndarray:
    """Return the sum over the ranks, on every rank."""
    result = array.copy()
    chunks = parts_of(result, endpoint.world_size)
    scatter_reduce(endpoint, chunks)
    all_gather(endpoint, chunks)
    return result


def scatter_reduce(endpoint: Endpoint, chunks: list[np.ndarray]) -> None:
    """Compute the full sum of chunk ``rank + 1`` (modulo N) on every rank, in place; other chunks hold partial sums."""
    _go_round(endpoint, chunks, endpoint.rank, "scatter-reduce", np.add)


def all_gather(endpoint: Endpoint, chunks: list[np.ndarray]) -> None:
    """Distribute the full sums of all chunks to every rank, in place."""
    _go_round(endpoint, chunks, endpoint.rank + 1, "all-gather", lambda mine, received: received)


def _go_round(
    endpoint: Endpoint, chunks: list[np.ndarray], first: int, phase: str, combine: Callable[..., np.ndarray]
) -> None:
    """N-1 times, send a chunk to the right, beginning with ``first``, and combine the one received from the left."""
    rank, size = endpoint.rank, endpoint.world_size
    for step in range(size - 1):
        sent, received = (first - step) % size, (first - step - 1) % size
        incoming = endpoint.sendrecv(
            chunks[sent], (rank + 1) % size, chunks[received], (rank - 1) % size,
            phase=f"{phase} {step + 1} of {size - 1}", part=f"chunk {sent}",
        )  # fmt: skip
        chunks[received][:] = combine(chunks[received], incoming)
