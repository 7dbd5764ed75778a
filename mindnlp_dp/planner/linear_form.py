"""Builds the matrices of the integer program for SciPy's solver (HiGHS).

:mod:`~mindnlp_dp.planner.integer_program` calls it. Columns stand for strategies and for pairs of strategies, and
equations tie the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import numpy as np

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
        for (u, v), whole in edges.items():
            matrix = whole[np.ix_(self._allowed[u], self._allowed[v])]
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
        """Solve the program; with ``least_excess``, minimise the largest excess over an ``at_most`` limit instead."""
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
