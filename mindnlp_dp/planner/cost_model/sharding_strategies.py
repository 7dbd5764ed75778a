"""Prices each role of an operator on a mesh, and chooses the roles of a graph by the integer program.

A role says how an operator is sharded over an axis of the mesh (:mod:`~mindnlp_dp.planner.profiles.operator_graph`).
:mod:`~mindnlp_dp.planner.cost_model.memory_cost` and :mod:`~mindnlp_dp.planner.cost_model.stage_costs` call it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np

from mindnlp_dp.planner.integer_program import Choice, choose_strategies
from mindnlp_dp.planner.profiles.cluster_profile import Link, all_gather, all_reduce, all_to_all
from mindnlp_dp.planner.profiles.operator_graph import (
    BATCH,
    COLUMN,
    EXPERT,
    FEATURE,
    NONE,
    ROLES,
    ROW,
    VOCABULARY,
    Graph,
    Operator,
)

# Operators that are too expensive to repeat on all devices: products, and tables that would be replicated.
_HEAVY = ("matmul", "embedding", "attention", "experts")

Roles = tuple[str, str]

Layout = tuple[str, str]


@dataclass(frozen=True)
class DeviceGroup:
    """Describes devices on two axes.

    Attributes:
        shape: (n0, n1).
        links: the link of each axis.
        tie_breakers: costs added to an all-reduce, an all-gather and an all-to-all, so that alternatives do not tie.
    """

    shape: tuple[int, int]
    links: tuple[Link, Link]
    tie_breakers: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def all_reduce(self, axis: int, b: float) -> float:
        return self._with_tie(all_reduce(self.shape[axis], b, self.links[axis]), 0)

    def all_gather(self, axis: int, b: float) -> float:
        return self._with_tie(all_gather(self.shape[axis], b, self.links[axis]), 1)

    def all_to_all(self, axis: int, b: float) -> float:
        return self._with_tie(all_to_all(self.shape[axis], b, self.links[axis]), 2)

    def _with_tie(self, cost: float, kind: int) -> float:
        return cost + self.tie_breakers[kind] if cost else 0.0


@dataclass(frozen=True)
class DeviceRates:
    """Holds the speed of a device: seconds per unit of work, and bytes per value.

    The units are a FLOP, a value moved, an attention score, a random number, an operator call, and a weight gradient
    that is computed and accumulated.
    """

    flop: float = 0.0
    value: float = 0.0
    score: float = 0.0
    draw: float = 0.0
    call: float = 0.0
    gradient: float = 0.0
    bytes_per_value: int = 4


@dataclass(frozen=True)
class Cost:
    """Holds the seconds of an operator: three terms per micro-batch, and ``update`` once per update."""

    compute: float
    collectives: float
    backward_collectives: float
    update: float


def strategies(
    operator: Operator, mesh: DeviceGroup, *, redundant: bool, axes_for: Sequence[Any] = (None, None)
) -> list[Roles]:
    """Return the pairs of roles that an operator may have.

    Args:
        redundant: whether all devices of an axis may repeat the same products.
        axes_for: the allowed roles of each axis; None allows all.
    """
    choices = []
    for axis in (0, 1):
        roles = list(operator.only or ROLES[operator.kind])
        if axes_for[axis] is not None:
            roles = [role for role in roles if role in axes_for[axis]]
        if mesh.shape[axis] == 1:
            roles = [NONE]
        elif not redundant and operator.kind in _HEAVY and len(roles) > 1:
            roles = [role for role in roles if role != NONE]
        choices.append(roles)
    return list(itertools.product(choices[0], choices[1]))


def layouts(operator: Operator, roles: Roles) -> tuple[Layout, Layout]:
    """Return the layouts, by axis, in which the operator needs its input and makes its output."""
    (a, c), (b, d) = (ROLES[operator.kind][role] for role in roles)
    return (a, b), (c, d)


def cost_of(
    operator: Operator, roles: Roles, mesh: DeviceGroup, rates: DeviceRates, samples: float, *,
    input_has_gradient: bool = True, backwards: bool = True,
) -> Cost:  # fmt: skip
    """Return the cost of a micro-batch of ``samples`` on the full mesh, with the communication of its roles.

    If both axes have the same role, they all-reduce one after another, each the full output, as Alpa prices it.
    """
    size = rates.bytes_per_value
    shares = dict.fromkeys((BATCH, COLUMN, ROW, VOCABULARY, EXPERT, FEATURE, NONE), 1)
    for role, n in zip(roles, mesh.shape):
        shares[role] *= n
    num_parts = int(np.prod([n for role, n in shares.items() if role != NONE]))
    # Calls are not divided: each device starts its own.
    # Frozen weights need no gradient.
    of_weights = operator.trained / operator.parameters if operator.parameters else 1.0
    passes = (2 if input_has_gradient else 1) + of_weights if backwards else 1
    compute = passes * samples * operator.flops / num_parts * rates.flop
    compute += samples * operator.masks / num_parts * rates.draw
    compute += (3 if backwards else 1) * (
        samples * (operator.traffic * rates.value + operator.scores * rates.score) / num_parts
        + operator.calls * rates.call
    )
    weights = operator.trained
    for role in (COLUMN, ROW, VOCABULARY, EXPERT):
        weights /= shares[role]
    # This term does not depend on the number of samples.
    compute += weights * rates.gradient if backwards else 0.0
    output = size * samples * operator.num_out / (shares[BATCH] * shares[COLUMN] * shares[EXPERT])
    inputs = size * samples * operator.num_in / (shares[BATCH] * shares[ROW] * shares[EXPERT])
    forward = backward = update = 0.0
    for axis, role in enumerate(roles):
        if role in (ROW, VOCABULARY):
            forward += mesh.all_reduce(axis, output)
        elif role == COLUMN and operator.kind == "experts":
            forward += mesh.all_reduce(axis, output * shares[COLUMN])
            backward += mesh.all_reduce(axis, inputs)
        elif role == COLUMN and operator.kind == "matmul" and input_has_gradient:
            backward += mesh.all_reduce(axis, inputs)
        elif role == EXPERT:
            # Tokens travel to the experts and back in each pass; the bytes are those of all devices of the axis.
            way = mesh.all_to_all(axis, inputs * mesh.shape[axis] * operator.copies)
            forward, backward = forward + 2 * way, backward + 2 * way
        elif role == FEATURE and operator.kind == "loss":
            # Each row exchanges its largest logit, the sum of all, and the label's logit.
            rows = operator.rows if operator.rows_out is None else operator.rows_out
            forward += mesh.all_reduce(axis, 3 * size * samples * rows / shares[BATCH])
        elif role == BATCH:
            update += mesh.all_reduce(axis, size * weights)
    if not backwards:
        backward = 0.0
    return Cost(compute, forward, backward, update)


def resharding(mesh: DeviceGroup, have: Layout, want: Layout, b: float) -> float:
    """Return the seconds to convert a tensor of b bytes from one layout to another, axis by axis."""
    cut = [n for n, lies in zip(mesh.shape, have) if lies != NONE]
    held = b / int(np.prod(cut)) if cut else b
    total = 0.0
    for axis, (before, after) in enumerate(zip(have, want)):
        n = mesh.shape[axis]
        if before == after or n == 1:
            continue
        if before == NONE:
            held /= n
        elif after == NONE:
            held *= n
            total += mesh.all_gather(axis, held)
        else:
            total += mesh.all_to_all(axis, held * n)
    return total


def choose_shardings(
    graph: Graph, mesh: DeviceGroup, rates: DeviceRates, samples: float, *, num_micro_batches: int = 1,
    redundant: bool = True, axes_for: Sequence[Any] = (None, None), entering: Optional[Mapping[str, Layout]] = None,
    leaving: Optional[Layout] = None, input_gradient: bool = False, time_limit: float = 60.0, gap: float = 0.0,
) -> tuple[Choice, dict[str, Roles]]:  # fmt: skip
    """Choose a pair of roles for each operator so that an update of ``num_micro_batches`` takes the fewest seconds.

    Args:
        samples: samples of a micro-batch, on the full mesh.
        redundant: whether all devices of an axis may repeat the same products, at their cost.
        entering: layouts of activations that come from outside of the graph, by the operator that receives them.
        leaving: the layout that the last operator's output must have.
        input_gradient: whether the graph's inputs have a gradient, that is, are activations.
    """
    places = {operator.name: v for v, operator in enumerate(graph.operators)}
    options = [strategies(o, mesh, redundant=redundant, axes_for=axes_for) for o in graph.operators]
    size = rates.bytes_per_value
    costs, edges = [], []
    for v, operator in enumerate(graph.operators):
        has_gradient = bool(operator.inputs) or (input_gradient and operator.kind != "embedding")
        row = []
        for roles in options[v]:
            cost = cost_of(operator, roles, mesh, rates, samples, input_has_gradient=has_gradient)
            seconds = cost.compute + cost.collectives + cost.backward_collectives
            if entering is not None and operator.name in entering:
                want = layouts(operator, roles)[0]
                b = size * samples * operator.num_in
                seconds += resharding(mesh, entering[operator.name], want, b)
                seconds += resharding(mesh, want, entering[operator.name], b) if input_gradient else 0.0
            if leaving is not None and v == len(graph.operators) - 1:
                have, b = layouts(operator, roles)[1], size * samples * operator.num_out
                seconds += resharding(mesh, have, leaving, b) + resharding(mesh, leaving, have, b)
            row.append(num_micro_batches * seconds + cost.update)
        costs.append(np.array(row))
        for source in operator.inputs:
            u = places[source]
            b = size * samples * graph.operators[u].num_out
            matrix = np.empty((len(options[u]), len(options[v])))
            for i, j in itertools.product(range(len(options[u])), range(len(options[v]))):
                have = layouts(graph.operators[u], options[u][i])[1]
                want = layouts(operator, options[v][j])[0]
                matrix[i, j] = resharding(mesh, have, want, b) + resharding(mesh, want, have, b)
            edges.append((u, v, num_micro_batches * matrix))
    choice = choose_strategies(costs, edges, time_limit=time_limit, gap=gap)
    return choice, {o.name: options[v][choice.strategies[v]] for o, v in zip(graph.operators, range(len(options)))}
