"""Compares the planner's integer program and its slicing with brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mindnlp_dp.planner.integer_program import InfeasibleError, choose_strategies
from mindnlp_dp.planner.stage_partition import slice_stages


def brute_force_choice(costs, edges, usages, lifetimes, limit, follow, alias):  # noqa: PLR0917
    """Return the least cost over all choices, or inf if no choice satisfies all constraints."""
    best = np.inf
    times = sorted({first for first, last in lifetimes if last > first})
    for choice in itertools.product(*(range(len(c)) for c in costs)):
        if any(leader is not None and choice[v] != choice[leader] for v, leader in enumerate(follow)):
            continue
        if any(matrix[choice[u], choice[v]] for u, v, matrix in alias):
            continue
        used = [
            sum(usages[v][choice[v]] for v, (first, last) in enumerate(lifetimes) if first <= time < last)
            for time in times
        ]
        if max(used, default=0) > limit:
            continue
        cost = sum(c[s] for c, s in zip(costs, choice)) + sum(m[choice[u], choice[v]] for u, v, m in edges)
        best = min(best, cost)
    return best


def random_program(rng):
    num = int(rng.integers(1, 6))
    sizes = rng.integers(1, 5, num)
    follow = [None] * num
    for v in range(num):
        if v and rng.random() < 0.25:
            leader = int(rng.integers(v))
            follow[v], sizes[v] = leader, sizes[leader]
    # The same program may have seconds, microseconds or bytes as its unit.
    scale = float(rng.choice([1e-6, 1.0, 1e9]))

    def numbers(*shape):
        array = scale * np.round(rng.random(shape) * 10, int(rng.integers(0, 4)))
        array[rng.random(shape) < 0.12] = np.inf
        return array

    def pair():
        u, v = rng.integers(num, size=2)
        return int(u), int(v)

    costs = [numbers(k) for k in sizes]
    edges = [(u, v, numbers(sizes[u], sizes[v])) for u, v in (pair() for _ in range(rng.integers(0, 7)))]
    alias = [(u, v, rng.random((sizes[u], sizes[v])) < 0.2) for u, v in (pair() for _ in range(rng.integers(0, 3)))]
    usages = [rng.integers(0, 10, k).astype(float) for k in sizes]
    lifetimes = [(int(a), int(b)) for a, b in rng.integers(0, 6, (num, 2))]
    return costs, edges, usages, lifetimes, float(rng.integers(0, 30)), follow, alias


def test_integer_programs_equal_brute_force():
    rng = np.random.default_rng(0)
    outcomes = {"feasible": 0, "infeasible": 0}
    for _ in range(1000):
        costs, edges, usages, lifetimes, limit, follow, alias = program = random_program(rng)
        wanted = brute_force_choice(*program)
        given = {"usages": usages, "lifetimes": lifetimes, "limit": limit, "follow": follow, "alias": alias}
        if np.isinf(wanted):
            outcomes["infeasible"] += 1
            with pytest.raises(InfeasibleError):
                choose_strategies(costs, edges, **given)
            continue
        outcomes["feasible"] += 1
        choice = choose_strategies(costs, edges, **given)
        assert choice.is_optimal
        assert choice.cost == pytest.approx(wanted, rel=1e-9)
        assert choice.bound == pytest.approx(wanted, rel=1e-9)
        fixed = [np.where(np.arange(len(c)) == s, c, np.inf) for c, s in zip(costs, choice.strategies)]
        # The chosen strategies are allowed, and have the reported cost.
        assert brute_force_choice(fixed, *program[1:]) == pytest.approx(choice.cost, rel=1e-12)
    assert min(outcomes.values()) > 150


def test_an_infeasible_program_names_the_time_and_the_missing_bytes():
    with pytest.raises(InfeasibleError, match="at time 2, the 2 nodes.*need at least 12 bytes, and 10.*2 are missing"):
        choose_strategies([[0.0], [0.0]], [], usages=[[5], [7]], lifetimes=[(0, 3), (2, 4)], limit=10)
    # Each node alone could choose its smaller strategy, but both together may not.
    forbidden = np.array([[True, False], [False, False]])
    with pytest.raises(InfeasibleError, match="at time 0, .* need at least 11 bytes, and 9 are allowed: 2 are missing"):
        choose_strategies([[0, 0], [0, 0]], [], usages=[[4, 6], [5, 9]], limit=9, alias=[(0, 1, forbidden)])
    with pytest.raises(InfeasibleError, match="node 1 has no strategy left"):
        choose_strategies([[0.0], [np.inf]], [])
    odd = np.array([[np.inf, 0], [0, np.inf]])
    with pytest.raises(InfeasibleError, match="no choice avoids all forbidden pairs"):
        choose_strategies([[0, 0]] * 3, [(0, 1, odd), (1, 2, odd), (2, 0, odd)])


def test_the_memory_limit_is_exact_to_one_byte():
    limit = 16 * 2**30
    choice = choose_strategies([[0.0, 1.0]], [], usages=[[limit + 1, limit]], limit=limit)
    assert choice.strategies == [1]
    with pytest.raises(InfeasibleError, match="1 are missing"):
        choose_strategies([[0.0]], [], usages=[[101]], limit=100)
    assert choose_strategies([[0.0, 1.0]], [], usages=[[1, 0]], limit=0).strategies == [1]


def test_programs_with_no_node_or_one_node_are_solved():
    assert choose_strategies([], []).cost == 0
    assert choose_strategies([[3.0, 2.0]], []).strategies == [1]
    # The diagonal of a node's edge to itself is added to the costs of its strategies.
    assert choose_strategies([[0.0, 1.0]], [(0, 0, [[5.0, 0.0], [0.0, 1.0]])]).strategies == [1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[]], []), "costs\\[0\\] must be an array"),
        (([[np.nan]], []), "must be numbers"),
        (([[1.0]], [(0, 1, [[1.0]])]), "nodes are 0 to 0"),
        (([[1.0], [1.0, 2.0]], [(0, 1, [[1.0]])]), "must be an array \\(1, 2\\)"),
    ],
)
def test_invalid_programs_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        choose_strategies(*arguments)


def test_invalid_options_of_programs_are_refused():
    with pytest.raises(ValueError, match="usages and limit go together"):
        choose_strategies([[1.0]], [], usages=[[1.0]])
    with pytest.raises(ValueError, match="follows itself"):
        choose_strategies([[1.0], [1.0]], [], follow=[1, 0])
    with pytest.raises(ValueError, match="node 1 has 2 strategies and follows node 0, which has 1"):
        choose_strategies([[1.0], [1.0, 2.0]], [], follow=[None, 0])
    with pytest.raises(ValueError, match="usages\\[0\\] must be numbers of at least 0"):
        choose_strategies([[1.0]], [], usages=[[-1.0]], limit=3)


def brute_force_slicing(cost, allowed, sizes, num_devices, num_microbatches, boundary):  # noqa: PLR0917
    """Return the least T over all slicings."""
    num_layers = len(cost)
    best = np.inf
    for num_stages in range(1, num_layers + 1):
        for cuts in itertools.combinations(range(1, num_layers), num_stages - 1):
            bounds = [0, *cuts, num_layers]
            for meshes in itertools.product(range(len(sizes)), repeat=num_stages):
                if sum(sizes[m] for m in meshes) != num_devices:
                    continue
                options = []
                for stage, mesh in enumerate(meshes):
                    first, last = bounds[stage], bounds[stage + 1] - 1
                    fits = allowed[first, last, mesh] >= num_stages - 1 - stage
                    time = cost[first, last, mesh][fits]
                    way = boundary[first] if first else 0.0
                    options.append(time.min(initial=np.inf) + way)
                if np.isfinite(sum(options)):
                    best = min(best, sum(options) + (num_microbatches - 1) * max(options))
    return best


def test_stage_slicings_equal_brute_force():
    rng = np.random.default_rng(1)
    outcomes = {"feasible": 0, "infeasible": 0}
    for _ in range(500):
        num_layers, num_submeshes, configurations = (int(n) for n in rng.integers(1, [6, 4, 3]))
        sizes = [int(n) for n in rng.integers(1, 4, num_submeshes)]
        num_devices = int(rng.integers(1, 7))
        cost = np.round(rng.random((num_layers, num_layers, num_submeshes, configurations)), int(rng.integers(1, 9)))
        cost[rng.random(cost.shape) < 0.1] = np.inf
        allowed = rng.integers(-1, 5, cost.shape) if rng.random() < 0.7 else np.full(cost.shape, 99)
        boundary = rng.random(num_layers) * rng.choice([0.0, 0.3])
        num_microbatches = int(rng.integers(1, 20))
        wanted = brute_force_slicing(cost, allowed, sizes, num_devices, num_microbatches, boundary)
        given = (cost, allowed, sizes, num_devices, num_microbatches)
        if np.isinf(wanted):
            outcomes["infeasible"] += 1
            with pytest.raises(InfeasibleError):
                slice_stages(*given, boundary=boundary)
            continue
        outcomes["feasible"] += 1
        found = slice_stages(*given, boundary=boundary)
        assert found.total == pytest.approx(wanted, rel=1e-12)
        assert [stage[0] for stage in found.stages[1:]] == [stage[1] + 1 for stage in found.stages[:-1]]
        assert found.stages[0][0] == 0
        assert found.stages[-1][1] == num_layers - 1
        assert sum(sizes[stage[2]] for stage in found.stages) == num_devices
        for place, stage in enumerate(found.stages):
            assert allowed[stage] >= len(found.stages) - 1 - place
        times = [cost[s] + (boundary[s[0]] if s[0] else 0) for s in found.stages]
        assert found.slowest == max(times)
        assert found.total == pytest.approx(sum(times) + (num_microbatches - 1) * max(times))
    assert min(outcomes.values()) > 100


def test_the_stage_slicing_equals_the_published_one():
    cost = np.random.RandomState(42).rand(8, 8, 4, 5)
    found = slice_stages(cost, None, [1, 2, 4, 8], 8, 16)
    assert found.total == pytest.approx(0.295285058257, abs=1e-12)
    assert [stage[:3] for stage in found.stages] == [(0, 3, 2), (4, 7, 2)]


def test_infeasible_slicings_are_refused_with_the_reason():
    cost = np.ones((3, 3, 1, 1))
    with pytest.raises(InfeasibleError, match="uses exactly 3 devices in submeshes of \\[2\\]"):
        slice_stages(cost, None, [2], 3, 4)
    none_fits = np.zeros(cost.shape)
    none_fits[:, :, 0, 0][np.ix_(range(2), range(1, 3))] = -1
    with pytest.raises(InfeasibleError, match="no stage can have layer 1: no submesh has enough memory for it"):
        slice_stages(cost, none_fits, [1], 3, 4)
    broken = cost.copy()
    broken[:2, 1:] = np.inf
    with pytest.raises(InfeasibleError, match="no stage can have layer 1: its cost is inf"):
        slice_stages(broken, None, [1], 3, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cost": np.ones((2, 3, 1, 1))}, "cost must be an array"),
        ({"cost": -np.ones((2, 2, 1, 1))}, "times of at least 0"),
        ({"submesh_sizes": [1, 2]}, "knows 1 submeshes"),
        ({"num_microbatches": 0}, "of at least 1"),
        ({"max_in_flight": np.ones((2, 2, 1, 2))}, "must have cost's shape"),
        ({"boundary": [1.0]}, "boundary must be times"),
    ],
)
def test_invalid_slicings_are_refused(change, message):
    given = {"cost": np.ones((2, 2, 1, 1)), "max_in_flight": None, "submesh_sizes": [1], "num_devices": 2}
    given = {**given, "num_microbatches": 1, **change}
    with pytest.raises(ValueError, match=message):
        slice_stages(**given)


def test_a_nearly_binding_memory_limit_is_solved_exactly():
    """Solve programs with usages near 1e9 bytes that differ by a few: an excess of one byte is below any tolerance."""
    rng = np.random.default_rng(3)
    for _ in range(20):
        num, k = 8, 3
        usages = [1e9 + rng.integers(0, 9, k) for _ in range(num)]
        costs = [rng.random(k) for _ in range(num)]
        limit = num * 1e9 + float(rng.integers(0, 40))
        given = (costs, [], usages, [(0, 1)] * num, limit, [None] * num, [])
        wanted = brute_force_choice(*given)
        if np.isinf(wanted):
            with pytest.raises(InfeasibleError, match="at least .* bytes"):
                choose_strategies(costs, [], usages=usages, limit=limit)
        else:
            assert choose_strategies(costs, [], usages=usages, limit=limit).cost == pytest.approx(wanted, rel=1e-9)


def test_costs_of_very_different_magnitudes_are_solved_exactly():
    assert choose_strategies([[1.0, 0.0], [0.0, 1e11]], []).strategies == [1, 0]
    rng = np.random.default_rng(4)
    for _ in range(100):
        sizes = rng.integers(2, 4, 4)
        costs = [rng.random(k) * 10.0 ** rng.integers(-6, 13, k) for k in sizes]
        edges = [(v, v + 1, rng.random((sizes[v], sizes[v + 1])) * 10.0 ** rng.integers(-6, 13)) for v in range(3)]
        wanted = brute_force_choice(costs, edges, [np.zeros(k) for k in sizes], [(0, 0)] * 4, 0, [None] * 4, [])
        assert choose_strategies(costs, edges).cost == pytest.approx(wanted, rel=1e-9)


def test_infinite_memory_does_not_limit_the_choice():
    assert choose_strategies([[0.0, 1.0]], [], usages=[[1e30, 0]], limit=np.inf).strategies == [0]
