"""Chooses one strategy for each operator at the least total cost of operators and edges, within a memory limit.

:func:`~mindnlp_dp.planner.cost_model.sharding_strategies.choose_shardings` calls it. The choice is proven to be optimal
unless time runs out.

The program is the intra-operator one of Zheng et al., *Alpa* (OSDI 2022), section 4.2, with a tight linearisation of
edges: for the matrix e of an edge (u, v), sums over a row equal u's choice and sums over a column v's. Then e need not
be integer, because a 0/1 choice of the rows and columns leaves it only one value.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np

# Forbid large costs if the largest is this many times the excess of a known choice over the least costs: they belong to
# no better choice, and they make the scaling of the program worse.
_FAR = 100.0

# Objectives are scaled to this size, because the solver's tolerances (1e-6 and finer) are absolute.
_LARGEST = 1e4


class InfeasibleError(ValueError):
    """Signals that no choice satisfies all constraints; the message says what prevents it."""


@dataclass(frozen=True)
class Choice:
    """Holds the choice that :func:`choose_strategies` found.

    Attributes:
        strategies: index of the chosen strategy of each node.
        cost: cost of nodes and edges together, in the unit of the costs.
        is_optimal: whether it is proven that no choice costs less (by more than the allowed gap).
        bound: lower bound on the cost of every choice.
    """

    strategies: list[int]
    cost: float
    is_optimal: bool
    bound: float


def choose_strategies(
    costs: Sequence[Any],
    edges: Sequence[tuple[int, int, Any]],
    *,
    usages: Optional[Sequence[Any]] = None,
    lifetimes: Optional[Sequence[tuple[float, float]]] = None,
    limit: Optional[float] = None,
    follow: Optional[Sequence[Optional[int]]] = None,
    alias: Sequence[tuple[int, int, Any]] = (),
    time_limit: float = 60.0,
    gap: float = 0.0,
) -> Choice:
    """Choose a strategy for every node at the least cost.

    Args:
        costs: an array (k_v,) for each node v; inf forbids a strategy.
        edges: (u, v, array (k_u, k_v)), the cost between the choices of u and v; inf forbids a pair.
        usages: an array (k_v,) for each node: bytes that a strategy uses while the node is live. Needs ``limit``.
        lifetimes: (first, last) for each node: it is live at times first <= t < last, and never if last <= first. By
            default, all nodes are live together.
        limit: bytes that may be in use at any time.
        follow: for each node, the node whose choice it shares, or None.
        alias: (u, v, boolean array (k_u, k_v)), True where the two must not be chosen together.
        time_limit: seconds for the solver, which may exceed them.
        gap: relative amount by which the cost may exceed the bound.

    Raises:
        InfeasibleError: No choice satisfies all constraints; the message says where, and for memory at which time and
            how many bytes are missing.
        TimeoutError: The time ended before any choice was found.
        ValueError: Shapes do not fit together, or numbers are invalid.
    """
    if not time_limit > 0 or not 0 <= gap < 1:
        raise ValueError(
            f"time_limit must be seconds above 0, and gap of at least 0 and below 1; got {time_limit}, {gap}"
        )
    problem = _Problem(costs, edges, usages=usages, lifetimes=lifetimes, limit=limit, follow=follow, alias=alias)
    return problem.solve(time_limit, gap)


class _Problem:
    """Solves a simplified problem: one node per group that follows, no forbidden strategies, one edge per pair."""

    def __init__(
        self, costs: Any, edges: Any, *, usages: Any, lifetimes: Any, limit: Any, follow: Any, alias: Any
    ) -> None:
        self._original = [_vector(cost, f"costs[{v}]") for v, cost in enumerate(costs)]
        sizes = [len(cost) for cost in self._original]
        self._root = _roots(follow, sizes)
        self._given_edges = [_edge(edge, sizes, "edges") for edge in edges]
        aliases = [_edge(edge, sizes, "alias", boolean=True) for edge in alias]
        self._costs = {v: np.zeros(sizes[v]) for v in sorted(set(self._root))}
        for v, cost in enumerate(self._original):
            self._costs[self._root[v]] += cost
        self._edges: dict[tuple[int, int], np.ndarray] = {}
        for u, v, matrix in [*self._given_edges, *aliases]:
            self._add_edge(self._root[u], self._root[v], matrix)
        self._limit, self._live = limit, _live_sets(usages, lifetimes, limit, len(sizes))
        self._usages = [] if usages is None else [_vector(x, f"usages[{v}]", least=0.0) for v, x in enumerate(usages)]
        if usages is not None and [len(x) for x in self._usages] != sizes:
            raise ValueError(f"usages must have the shapes of costs, {sizes}; got {[len(x) for x in self._usages]}")
        self._allowed = {v: np.isfinite(cost) for v, cost in self._costs.items()}
        for _, live in self._live:
            for v in live:
                self._allowed[self._root[v]] &= np.isfinite(self._usages[v])
        self._drop_what_cannot_be()

    def _add_edge(self, u: int, v: int, matrix: np.ndarray) -> None:
        if u == v:
            self._costs[u] = self._costs[u] + np.diagonal(matrix)
            return
        if u > v:
            u, v, matrix = v, u, matrix.T
        known = self._edges.get((u, v))
        self._edges[u, v] = matrix if known is None else known + matrix

    def _drop_what_cannot_be(self) -> None:
        """Forbid each strategy that is forbidden together with every strategy of a neighbor, until nothing changes."""
        changed = True
        while changed:
            changed = False
            for v, allowed in self._allowed.items():
                if not allowed.any():
                    raise InfeasibleError(
                        f"node {v} has no strategy left: each of its {len(allowed)} costs or uses inf, or is forbidden "
                        "with all that a neighbor may choose"
                    )
            for (u, v), matrix in self._edges.items():
                finite = np.isfinite(matrix)
                for node, fits in (
                    (u, finite[:, self._allowed[v]].any(axis=1)),
                    (v, finite[self._allowed[u]].any(axis=0)),
                ):
                    left = self._allowed[node] & fits
                    changed |= bool((left != self._allowed[node]).any())
                    self._allowed[node] = left

    # Columns of the program: the allowed strategies of each node, then the allowed pairs of each edge.

    def solve(self, time_limit: float, gap: float) -> Choice:
        if not self._original:
            return Choice([], 0.0, True, 0.0)
        self._check_memory_alone()
        deadline = time.monotonic() + time_limit
        together: list[dict[int, int]] = []
        while True:
            program = _LinearForm(self._costs, self._edges, self._allowed)
            rows = [self._memory_row(program, live) for _, live in self._live]
            rows += [program.not_all(chosen) for chosen in together]
            result = program.solve(rows, max(0.01, deadline - time.monotonic()), gap)
            if result.x is None:
                if result.status == 1:
                    raise TimeoutError(f"no choice was found within {time_limit} s; allow more")
                self._explain(program, time_limit)
            chosen = program.choice(result.x)
            strategies = [chosen[root] for root in self._root]
            # The solver tolerates a relative excess of 1e-6 in a row; a choice that exceeds the limit is not valid.
            over = [live for _, live in self._live if self._is_over(self._usage(live, strategies))]
            if over:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no choice within {self._limit:.6g} bytes was found within {time_limit} s")
                together += [{self._root[v]: strategies[v] for v in live} for live in over]
                continue
            cost = self._cost(strategies)
            if result.status != 0 or not self._drop_far_ones(chosen, program.largest):
                break
        is_optimal = result.status == 0
        bound = cost if is_optimal and gap == 0 else min(cost, program.unscaled(result.mip_dual_bound))
        return Choice(strategies, cost, is_optimal, bound)

    def _drop_far_ones(self, chosen: dict[int, int], largest: float) -> bool:
        """Forbid each cost that alone exceeds the total excess of a known choice; return whether it was necessary.

        Where the largest cost is far above that, the solver's tolerances may have hidden the differences that matter.
        """
        above = {v: cost - cost[self._allowed[v]].min() for v, cost in self._costs.items()}
        between = {}
        for (u, v), matrix in self._edges.items():
            inside = matrix[np.ix_(self._allowed[u], self._allowed[v])]
            between[u, v] = matrix - inside[np.isfinite(inside)].min()
        # Sum term by term, because a difference of large sums loses small terms.
        excess = sum(float(x[chosen[v]]) for v, x in above.items())
        excess += sum(float(x[chosen[u], chosen[v]]) for (u, v), x in between.items())
        if excess <= 0 or largest <= _FAR * excess:
            return False
        for v, x in above.items():
            self._allowed[v] = self._allowed[v] & (x <= excess)
        for pair, x in between.items():
            self._edges[pair] = np.where(x <= excess, self._edges[pair], np.inf)
        return True

    def _cost(self, strategies: Sequence[int]) -> float:
        nodes = sum(float(cost[s]) for cost, s in zip(self._original, strategies))
        return nodes + sum(float(matrix[strategies[u], strategies[v]]) for u, v, matrix in self._given_edges)

    def _is_over(self, usage: float) -> bool:
        """Return whether a usage exceeds the limit by more than the rounding error of a sum."""
        return bool(usage > self._limit * (1 + 1e-12))

    def _usage(self, live: frozenset[int], strategies: Sequence[int]) -> float:
        return float(sum(self._usages[v][strategies[v]] for v in sorted(live)))

    def _memory_row(
        self, program: _LinearForm, live: frozenset[int], scale: Optional[float] = None
    ) -> tuple[np.ndarray, float]:
        """Return the memory row, above each node's minimum so that the solver's tolerance applies to differences."""
        row, room = np.zeros(program.num_columns), float(self._limit)
        for v in sorted(live):
            usage = self._usages[v][self._allowed[self._root[v]]]
            row[program.columns_of(self._root[v])] += usage - usage.min()
            room -= float(usage.min())
        scale = scale or max(room, float(row.max(initial=0.0)), 1e-300)
        return row / scale, room / scale

    def _check_memory_alone(self) -> None:
        """Raise an error if even the strategies with the least memory exceed the limit; this needs no solver."""
        for at, live in self._live:
            least = sum(float(self._usages[v][self._allowed[self._root[v]]].min()) for v in sorted(live))
            if self._is_over(least):
                raise InfeasibleError(_missing(at, least, self._limit, len(live)))

    def _explain(self, program: _LinearForm, time_limit: float) -> None:
        """Raise an error with the reason: the least memory that a choice needs, or choices that exclude each other."""
        if self._live and program.solve([], time_limit, 1.0).x is not None:
            scale = max(float(self._limit), 1.0)
            rows = [self._memory_row(program, live, scale) for _, live in self._live]
            result = program.solve(rows, time_limit, 0.0, least_excess=True)
            if result.x is not None:
                chosen = program.choice(result.x)
                strategies = [chosen[root] for root in self._root]
                usage, at, num = max((self._usage(live, strategies), t, len(live)) for t, live in self._live)
                raise InfeasibleError(_missing(at, usage, self._limit, num))
        raise InfeasibleError("no choice avoids all forbidden pairs (inf in edges, True in alias)")


def _missing(at: float, usage: float, limit: float, num: int) -> str:
    return (
        f"at time {at:g}, the {num} nodes that are live need at least {usage:.6g} bytes, and {limit:.6g} are "
        f"allowed: {usage - limit:.6g} are missing"
    )


class _LinearForm:
    """Holds the matrices that SciPy's milp (HiGHS) takes, and solves them.

    Columns stand for the allowed strategies and for pairs of them, and equations tie the two.

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


def _vector(values: Any, name: str, least: float = -np.inf) -> np.ndarray:
    """Return a flat float array of costs; raise ValueError if a value is NaN or below ``least``."""
    array = np.asarray(values, np.float64)
    if array.ndim != 1 or not len(array):
        raise ValueError(f"{name} must be an array (k,) of at least one strategy, got shape {array.shape}")
    if np.isnan(array).any() or (array == -np.inf).any() or (array < least).any():
        raise ValueError(f"{name} must be numbers{' of at least 0' if least == 0 else ''}, or inf; got {array}")
    return array


def _edge(edge: Any, sizes: Sequence[int], name: str, *, boolean: bool = False) -> tuple[int, int, np.ndarray]:
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


def _roots(follow: Any, sizes: Sequence[int]) -> list[int]:
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


def _live_sets(usages: Any, lifetimes: Any, limit: Any, num_nodes: int) -> list[tuple[float, frozenset[int]]]:
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
