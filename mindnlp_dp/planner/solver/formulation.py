"""Validates the input of the integer program, and builds its matrices for SciPy's solver (HiGHS).

:mod:`~mindnlp_dp.planner.solver.integer_program` calls it with the user's arrays. Columns stand for strategies and for
pairs of strategies, and equations tie the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import numpy as np


def vector(values: Any, name: str, least: float = -np.inf) -> np.ndarray:
    """Return a flat float array of costs; raise ValueError if a value is NaN or below ``least``."""
    array = np.asarray(values, np.float64)
    if array.ndim != 1 or not len(array):
        raise ValueError(f"{name} must be an array (k,) of at least one strategy, got shape {array.shape}")
    if np.isnan(array).any() or (array == -np.inf).any() or (array < least).any():
        raise ValueError(f"{name} must be numbers{' of at least 0' if least == 0 else ''}, or inf; got {array}")
    return array


def edge(edge: Any, sizes: Sequence[int], name: str, *, boolean: bool = False) -> tuple[int, int, np.ndarray]:
    """Return an edge's two nodes and its cost matrix; raise ValueError if its shape is wrong."""
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
        raise ValueError(f"limit must be a number of bytes of at least 0, got {limit}")
    spans = [(0.0, 1.0)] * num_nodes if lifetimes is None else [(float(a), float(b)) for a, b in lifetimes]
    if np.isnan(spans).any():
        raise ValueError(f"lifetimes must be pairs of numbers, got {lifetimes}")
    times = sorted({first for first, last in spans if first < last})
    sets = {frozenset(v for v, (a, b) in enumerate(spans) if a <= time < b): time for time in reversed(times)}
    return sorted(
        ((time, live) for live, time in sets.items() if not any(live < other for other in sets)), key=lambda x: x[0]
    )


# Objectives are scaled to this size, because the solver's tolerances (1e-6 and finer) are absolute.
_LARGEST = 1e4


class LinearForm:
    """Holds the matrices that SciPy's milp (HiGHS) takes, and solves them.

    Attributes:
        constant: the sum of the least costs of all nodes and edges, a lower bound on every choice.
        largest: the largest cost above these least costs.
        num_strategies: number of columns for strategies.
        num_columns: number of all columns.
    """

    def __init__(
        self, costs: dict[int, np.ndarray], edges: dict[tuple[int, int], np.ndarray], allowed: dict[int, np.ndarray]
    ) -> None:
        from scipy import sparse

        self._allowed = {v: np.flatnonzero(mask) for v, mask in allowed.items()}
        self._first, at = {}, 0
        parts: list[np.ndarray] = []
        self.constant = 0.0
        for v, kept in self._allowed.items():
            self._first[v] = at
            parts.append(self._above_least(costs[v][kept]))
            at += len(kept)
        self.num_strategies = at
        rows: list[np.ndarray] = []
        columns: list[np.ndarray] = []
        values: list[np.ndarray] = []
        right: list[float] = []

        def equation(places: Sequence[np.ndarray], factors: Sequence[float], to: float) -> None:
            for place, factor in zip(places, factors):
                rows.append(np.full(len(place), len(right)))
                columns.append(place)
                values.append(np.full(len(place), factor))
            right.append(to)

        for v in self._allowed:
            equation([self.columns_of(v)], [1.0], 1.0)
        for (u, v), matrices in edges.items():
            matrix = matrices[np.ix_(self._allowed[u], self._allowed[v])]
            is_pair = np.isfinite(matrix)
            if is_pair.all() and not (matrix - matrix.flat[0]).any():
                self.constant += float(matrix.flat[0])
                continue
            number = np.full(matrix.shape, -1)
            number[is_pair] = at + np.arange(is_pair.sum())
            parts.append(self._above_least(matrix[is_pair]))
            at += int(is_pair.sum())
            for node, lines in ((u, number), (v, number.T)):
                for line, column in zip(lines, self.columns_of(node)):
                    equation([line[line >= 0], np.array([column])], [1.0, -1.0], 0.0)
        self.num_columns = at
        objective = np.concatenate(parts)
        self.largest = float(objective.max(initial=0.0))
        self._scale = _LARGEST / self.largest if self.largest else 1.0
        self._objective = objective * self._scale
        shape = (len(right), at)
        place = (np.concatenate(rows), np.concatenate(columns))
        self._equations = sparse.csr_matrix((np.concatenate(values), place), shape=shape)
        self._right = np.array(right)

    def _above_least(self, costs: np.ndarray) -> np.ndarray:
        least = float(costs.min())
        self.constant += least
        return costs - least

    def columns_of(self, node: int) -> np.ndarray:
        return self._first[node] + np.arange(len(self._allowed[node]))

    def unscaled(self, objective: Optional[float]) -> float:
        return -np.inf if objective is None else objective / self._scale + self.constant

    def choice(self, x: np.ndarray) -> dict[int, int]:
        return {v: int(kept[np.argmax(x[self.columns_of(v)])]) for v, kept in self._allowed.items()}

    def not_all(self, strategies: dict[int, int]) -> tuple[np.ndarray, float]:
        """Return a row that forbids choosing all of these together."""
        row = np.zeros(self.num_columns)
        if not all(strategy in self._allowed[node] for node, strategy in strategies.items()):
            return row, 0.0
        for node, strategy in strategies.items():
            row[self._first[node] + int(np.searchsorted(self._allowed[node], strategy))] = 1.0
        return row, len(strategies) - 1.0

    def solve(
        self, at_most: Sequence[tuple[np.ndarray, float]], time_limit: float, gap: float, *, least_excess: bool = False
    ) -> Any:
        """Solve the program; with ``least_excess``, minimize the largest excess over an ``at_most`` limit instead."""
        from scipy import sparse
        from scipy.optimize import Bounds, LinearConstraint, milp

        extra = int(least_excess)
        objective = np.append(np.zeros(self.num_columns), 1.0) if least_excess else self._objective
        equations = sparse.hstack([self._equations, sparse.csr_matrix((len(self._right), extra))], format="csr")
        constraints = [LinearConstraint(equations, self._right, self._right)]
        if at_most:
            rows = np.array([np.append(row, [-1.0] * extra) for row, _ in at_most])
            upper = np.array([limit for _, limit in at_most])
            constraints.append(LinearConstraint(sparse.csr_matrix(rows), -np.inf, upper))
        integrality = np.zeros(self.num_columns + extra)
        integrality[: self.num_strategies] = 1
        upper = np.ones(self.num_columns + extra)
        upper[self.num_columns :] = np.inf
        options = {"time_limit": time_limit, "mip_rel_gap": gap}
        return milp(
            objective, integrality=integrality, bounds=Bounds(0, upper), constraints=constraints, options=options
        )
