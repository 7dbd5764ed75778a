"""Groups operators into layers, between which a pipeline may be cut.

:func:`~mindnlp_dp.planner.stage_costs.layers_of` calls it. The rule is that of Zheng et al., *Alpa* (OSDI 2022),
section 5.2: minimise the largest activation that crosses a cut, where no layer's work exceeds the average by more than
a given fraction; of equal solutions, take the most even one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .operators import Graph


def crossing(graph: Graph) -> np.ndarray:
    """Return (operators + 1,) values per sample that are computed before each place and used after it."""
    places = {operator.name: v for v, operator in enumerate(graph.operators)}
    last_use = [v for v, _ in enumerate(graph.operators)]
    for v, operator in enumerate(graph.operators):
        for source in operator.inputs:
            last_use[places[source]] = max(last_use[places[source]], v)
    values = np.zeros(len(graph.operators) + 1)
    for v, operator in enumerate(graph.operators):
        values[v + 1 : last_use[v] + 1] += operator.num_out
    return values


def cluster_layers(work: Any, across: Any, num_layers: int, *, slack: float = 0.5, cuts: Any = None) -> list[int]:
    """Group n operators into layers; return the first operator of each.

    Args:
        work: (n,) the work of each operator.
        across: (n + 1,) the values that cross the place before each operator; those at both ends do not count.
        slack: fraction by which a layer may exceed the average work; more if a single operator exceeds it.
        cuts: places where a cut is allowed; all by default.

    >>> cluster_layers([1, 1, 1, 1], [0, 5, 1, 5, 0], 2)
    [0, 2]
    """
    n = len(work)
    places = [0, *sorted(set(range(1, n) if cuts is None else cuts)), n]
    if not 1 <= num_layers <= len(places) - 1:
        raise ValueError(f"{n} operators with {len(places) - 2} cuts cannot be {num_layers} layers")
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(work, np.float64))])[places]
    price = np.asarray(across, np.float64)[places]
    limit = max((1 + slack) * sums[-1] / num_layers, _least_largest(sums, num_layers)) * (1 + 1e-12)
    num = len(places)
    # best[j]: (largest crossing, sum of squares) of the operators before place j in so many layers.
    crossed, squares = np.full(num, np.inf), np.full(num, np.inf)
    crossed[0], squares[0] = 0.0, 0.0
    before: list[np.ndarray] = []
    for layer in range(num_layers):
        new_crossed, new_squares, source = np.full(num, np.inf), np.full(num, np.inf), np.zeros(num, np.int64)
        for j in range(layer + 1, num):
            share = sums[j] - sums[:j]
            here = np.where(share <= limit, np.maximum(crossed[:j], np.where(np.arange(j) > 0, price[:j], 0.0)), np.inf)
            evenness = squares[:j] + share**2
            i = int(np.lexsort((evenness, here))[0])
            new_crossed[j], new_squares[j], source[j] = here[i], evenness[i], i
        before.append(source)
        crossed, squares = new_crossed, new_squares
    firsts, at = [], num - 1
    for source in reversed(before):
        at = int(source[at])
        firsts.append(places[at])
    return firsts[::-1]


def _least_largest(sums: np.ndarray, num_layers: int) -> float:
    """Return the smallest possible work of the largest layer, for ``num_layers`` layers."""
    largest = sums[1:] - sums[0]
    for layer in range(1, num_layers):
        new = np.full(len(largest), np.inf)
        for j in range(layer, len(largest)):
            new[j] = np.maximum(largest[layer - 1 : j], sums[j + 1] - sums[layer : j + 1]).min()
        largest = new
    return float(largest[-1])
