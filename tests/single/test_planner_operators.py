"""Compares the cost of operators on a mesh with published objectives and with closed forms."""

from __future__ import annotations

import itertools

import pytest

from mindnlp_dp.planner.cost_model.sharding_strategies import DeviceGroup, DeviceRates, choose_shardings
from mindnlp_dp.planner.profiles.cluster_profile import Link, all_reduce
from mindnlp_dp.planner.profiles.operator_graph import Graph, Operator

# Alpa adds these costs to an all-reduce, an all-gather and an all-to-all.
TIES = (0.01, 0.1, 0.001)
COMMUNICATION_ONLY = DeviceRates(bytes_per_value=4)


def mlp(num_layers, width):
    operators, before = [], ()
    for number in range(num_layers):
        operators.append(
            Operator(f"dense{number}", "matmul", before, width_in=width, width_out=width, parameters=width * width)
        )
        operators.append(Operator(f"relu{number}", "elementwise", (f"dense{number}",), 1, width, width))
        before = (f"relu{number}",)
    return Graph(operators)


def mesh_of(shape, beta):
    return DeviceGroup(shape, (Link(1.0, beta[0]), Link(1.0, beta[1])), TIES)


ONE, TWO = (1.0, 1.0), (1.0, 0.01)


@pytest.mark.parametrize(
    ("num_layers", "batch", "width", "shape", "beta", "objective"),
    [
        (2, 1024, 128, (4, 1), ONE, 196610.02),
        (2, 1024, 128, (1, 4), ONE, 196610.02),
        (2, 128, 1024, (4, 1), ONE, 786433.01),
        (2, 128, 1024, (1, 4), ONE, 786433.01),
        (12, 1024, 128, (4, 1), ONE, 1179660.12),
        (12, 128, 1024, (1, 4), ONE, 8650763.11),
        (2, 1024, 128, (4, 8), TWO, 26872.03),
        (2, 1024, 128, (8, 4), TWO, 58330.03),
        (2, 1024, 128, (3, 4), TWO, 46314.03),
        (12, 1024, 128, (4, 8), TWO, 172702.23),
        (12, 1024, 128, (8, 4), TWO, 354900.23),
        (12, 1024, 128, (3, 4), TWO, 290994.23),
    ],
)
def test_costs_match_the_published_objectives(num_layers, batch, width, shape, beta, objective):  # noqa: PLR0917
    choice, _ = choose_shardings(
        mlp(num_layers, width), mesh_of(shape, beta), COMMUNICATION_ONLY, batch, redundant=False
    )
    assert choice.is_optimal
    assert choice.cost == pytest.approx(objective, rel=1e-3)


def test_model_parallel_layers_alternate_column_and_row_shards():
    graph = mlp(6, 1024)
    choice, roles = choose_shardings(graph, mesh_of((1, 4), ONE), COMMUNICATION_ONLY, 128, redundant=False)
    assert choice.cost == pytest.approx(5 * (all_reduce(4, 128 * 1024 * 4, Link(1.0, 1.0)) + 0.01), rel=1e-9)
    cuts = [roles[f"dense{number}"][1] for number in range(6)]
    assert all(a != b for a, b in itertools.pairwise(cuts))
    assert set(cuts) == {"column", "row"}
