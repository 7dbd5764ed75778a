"""Validates the input of the integer program: returns float64 arrays of the right shapes, or raises a ValueError.

:mod:`~mindnlp_dp.planner.integer_program` calls it with the user's arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def vector(values: Any, name: str, least: float = -np.inf) -> np.ndarray:
    array = np.asarray(values, np.float64)
    if array.ndim != 1 or not len(array):
        raise ValueError(f"{name} must be an array (k,) of one strategy at least, got shape {array.shape}")
    if np.isnan(array).any() or (array == -np.inf).any() or (array < least).any():
        raise ValueError(f"{name} must be numbers{' from 0 on' if least == 0 else ''}, or inf; got {array}")
    return array


def edge(edge: Any, sizes: Sequence[int], name: str, *, boolean: bool = False) -> tuple[int, int, np.ndarray]:
    u, v, matrix = edge
    if not all(isinstance(node, (int, np.integer)) for node in (u, v)):
        raise ValueError(f"{name} has an edge ({u!r}, {v!r}), and nodes are whole numbers")
    u, v = int(u), int(v)
    for node in (u, v):
        if not 0 <= node < len(sizes):
            raise ValueError(f"{name} has an edge ({u}, {v}), and nodes are 0 to {len(sizes) - 1}")
    if boolean:
        matrix = np.where(np.asarray(matrix, bool), np.inf, 0.0)
    matrix = np.asarray(matrix, np.float64)
    if matrix.shape != (sizes[u], sizes[v]):
        raise ValueError(
            f"{name} ({u}, {v}) must be an array ({sizes[u]}, {sizes[v]}), as many strategies as they have; got "
            f"{matrix.shape}"
        )
    if np.isnan(matrix).any() or (matrix == -np.inf).any():
        raise ValueError(f"{name} ({u}, {v}) must be numbers or inf; got {matrix}")
    return u, v, matrix


def roots(follow: Any, sizes: Sequence[int]) -> list[int]:
    """Return, for each node, the node at the end of the chain that it follows."""
    if follow is None:
        return list(range(len(sizes)))
    if len(follow) != len(sizes):
        raise ValueError(f"follow has {len(follow)} entries for {len(sizes)} nodes")
    roots = []
    for v in range(len(sizes)):
        node, seen = v, {v}
        while follow[node] is not None and follow[node] != node:
            node = follow[node]
            if not 0 <= node < len(sizes):
                raise ValueError(f"node {v} follows node {node}, and nodes are 0 to {len(sizes) - 1}")
            if node in seen:
                raise ValueError(f"node {v} follows itself, by {sorted(seen)}")
            seen.add(node)
        if sizes[node] != sizes[v]:
            raise ValueError(f"node {v} has {sizes[v]} strategies and follows node {node}, which has {sizes[node]}")
        roots.append(node)
    return roots


def live_sets(usages: Any, lifetimes: Any, limit: Any, num_nodes: int) -> list[tuple[float, frozenset[int]]]:
    """Return (time, nodes) for each set of nodes live at the same time, without sets that are part of another one."""
    if (usages is None) != (limit is None):
        raise ValueError("usages and limit go together: one of them is missing")
    if usages is None or limit == np.inf:
        return []
    if len(usages) != num_nodes or (lifetimes is not None and len(lifetimes) != num_nodes):
        raise ValueError(f"usages and lifetimes must have {num_nodes} entries, one for each node")
    if not limit >= 0:
        raise ValueError(f"limit must be a number of bytes from 0 on, got {limit}")
    spans = [(0.0, 1.0)] * num_nodes if lifetimes is None else [(float(a), float(b)) for a, b in lifetimes]
    if np.isnan(spans).any():
        raise ValueError(f"lifetimes must be pairs of numbers, got {lifetimes}")
    times = sorted({first for first, last in spans if first < last})
    sets = {frozenset(v for v, (a, b) in enumerate(spans) if a <= time < b): time for time in reversed(times)}
    return sorted(
        ((time, live) for live, time in sets.items() if not any(live < other for other in sets)), key=lambda x: x[0]
    )
