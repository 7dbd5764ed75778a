"""This module computes what the algorithms cost: the exact bytes and messages, and the time by a model.

``algorithms.py`` calls it. The time of a message of n bytes is ``latency + n / bandwidth`` (Hockney's model: "The
communication challenge for MPP", Parallel Computing, 1994), fitted to a short measurement; the time of the additions,
at a measured rate per byte, is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from theory.endpoint import bounds_of


@dataclass(frozen=True)
class Traffic:
    """The bytes and messages that one rank sends."""

    num_bytes: int
    num_messages: int


def traffic(algorithm: str, rank: int, world_size: int, length: int, item_bytes: int = 4) -> Traffic:
    """Return what ``rank`` sends in one all-reduce of ``length`` items.

    ==================  ===================================  =============================
    algorithm           rank 0 sends                         any other rank sends
    ==================  ===================================  =============================
    reduce_broadcast    (N-1) K bytes in N-1 messages        K bytes in one
    data_parallel       the same                             the same
    parameter_server    (N-1) K, one server                  K
    ring                2(N-1) K/N bytes in 2(N-1)           the same
    ==================  ===================================  =============================

    >>> traffic("ring", 0, 4, 1000), traffic("reduce_broadcast", 0, 4, 1000)
    (Traffic(num_bytes=6000, num_messages=6), Traffic(num_bytes=12000, num_messages=3))
    """
    whole = length * item_bytes
    if algorithm == "ring":
        bounds = bounds_of(length, world_size)
        chunks = [end - begin for begin, end in zip(bounds, bounds[1:])]
        # This rank sends every chunk in each of the two rounds, except the one that ends at this rank.
        items = sum(chunks) - chunks[(rank + 1) % world_size] + sum(chunks) - chunks[(rank + 2) % world_size]
        return Traffic(items * item_bytes, 2 * (world_size - 1)) if world_size > 1 else Traffic(0, 0)
    if algorithm in ("reduce_broadcast", "data_parallel", "parameter_server"):
        if rank == 0:
            return Traffic((world_size - 1) * whole, world_size - 1)
        return Traffic(whole, 1)
    raise ValueError(f"unknown algorithm {algorithm!r}")


@dataclass(frozen=True)
class CostModel:
    """The cost of communication: seconds per message, per transferred byte and per added byte."""

    latency: float
    seconds_per_byte: float
    seconds_per_added_byte: float = 0.0

    def message(self, num_bytes: float) -> float:
        return self.latency + num_bytes * self.seconds_per_byte

    def predict(self, algorithm: str, world_size: int, num_bytes: float) -> float:
        """Return the seconds of one all-reduce: its consecutive messages and the additions between them.

        Star and server: rank 0 handles 2(N-1) full arrays. Ring: 2(N-1) rounds of 1/N of the array, all ranks at once.
        """
        others = world_size - 1
        if algorithm == "ring":
            part = num_bytes / world_size
            return 2 * others * self.message(part) + others * part * self.seconds_per_added_byte
        if algorithm in ("reduce_broadcast", "data_parallel", "parameter_server"):
            return 2 * others * self.message(num_bytes) + others * num_bytes * self.seconds_per_added_byte
        raise ValueError(f"unknown algorithm {algorithm!r}")


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Fit latency and seconds per byte to the times of messages of several sizes; minimize the squared relative error.

    >>> latency, per_byte = fit([0, 1000, 100000], [2e-6, 3e-6, 102e-6])
    >>> round(latency * 1e6, 3), round(per_byte * 1e9, 3)
    (2.0, 1.0)
    """
    times = np.asarray(seconds, float)
    columns = np.stack([np.ones(len(times)), np.asarray(sizes, float)], axis=1) / times[:, None]
    latency, per_byte = np.linalg.lstsq(columns, np.ones(len(times)), rcond=None)[0]
    return max(float(latency), 0.0), max(float(per_byte), 0.0)
