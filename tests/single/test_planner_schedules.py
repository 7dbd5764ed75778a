"""Compares simulated pipelines and scheduled resharding with known results."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from mindnlp_dp.pipeline_schedules.resharding_layouts import parse_spec, tiles, unit_tasks
from mindnlp_dp.pipeline_schedules.resharding_schedule import schedule_tasks
from mindnlp_dp.pipeline_schedules.schedules import SCHEDULES, ideal_bubble, most_in_flight
from mindnlp_dp.pipeline_schedules.simulation import pipeline_makespan, simulate_pipeline
from mindnlp_dp.planner.simulate_step import least_makespan

# Pipelines.


@pytest.mark.core
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 1), (1, 5), (4, 8), (4, 2), (7, 3)])
def test_equal_stages_take_the_time_of_the_pipeline_formula(schedule, num_stages, num_microbatches):
    played = simulate_pipeline([1.0] * num_stages, [2.0] * num_stages, num_microbatches, schedule)
    assert played.makespan == (num_stages + num_microbatches - 1) * 3.0
    assert played.bubble == pytest.approx(ideal_bubble(num_stages, num_microbatches))
    expected = [most_in_flight(schedule, stage, num_stages, num_microbatches) for stage in range(num_stages)]
    assert played.in_flight == expected


def test_random_stages_take_at_most_the_time_of_the_gpipe_formula():
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(200):
        num_stages, num = int(rng.integers(1, 9)), int(rng.integers(1, 33))
        forward = rng.random(num_stages) + 0.05
        backward = forward * rng.choice([1.0, 2.0])
        gpipe = simulate_pipeline(forward, backward, num, "gpipe")
        one = simulate_pipeline(forward, backward, num, "1f1b")
        formula = (forward + backward).sum() + (num - 1) * (forward + backward).max()
        assert gpipe.makespan == pytest.approx(formula, rel=1e-12)
        assert one.makespan <= formula * (1 + 1e-12)
        assert pipeline_makespan(forward, backward, num, "1f1b") == one.makespan
        assert least_makespan(forward, backward, num) <= one.makespan * (1 + 1e-12)
        assert gpipe.in_flight == [num] * num_stages
        assert all(flight <= min(num, num_stages - stage) for stage, flight in enumerate(one.in_flight))
        ratios.append(one.makespan / formula)
    assert 0.95 < np.mean(ratios) < 1
    assert 0.75 < min(ratios) < 0.95


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_in_order_messages_are_never_faster_than_messages_in_any_order(schedule):
    for num_stages, num in itertools.product((1, 2, 5, 8), (1, 2, 7, 16)):
        forward, backward = [1.0 + stage / 7 for stage in range(num_stages)], [2.0] * num_stages
        for transfer in (0.0, 0.3):
            any_order, in_order = (
                simulate_pipeline(forward, backward, num, schedule, transfer, in_order=flag).makespan
                for flag in (False, True)
            )
            assert in_order >= any_order - 1e-9
            if schedule == "gpipe" and not transfer:
                assert in_order == pytest.approx(any_order)


def test_only_the_eager_schedule_hides_messages():
    stages, num = [1.0] * 8, 64
    formula = (8 + 64 - 1) * 3.0
    late = simulate_pipeline(stages, [2.0] * 8, num, "1f1b", transfer=0.3).makespan / formula
    eager = simulate_pipeline(stages, [2.0] * 8, num, "eager-1f1b", transfer=0.3).makespan / formula
    assert late == pytest.approx(1.10, abs=0.1)
    assert eager < 1.03
    assert eager < late


def test_every_pass_starts_after_its_inputs_have_arrived():
    rng = np.random.default_rng(1)
    for schedule in SCHEDULES:
        forward, backward, transfer = rng.random(4), rng.random(4), rng.random(3)
        played = simulate_pipeline(forward, backward, 6, schedule, transfer)
        at = {(event.stage, event.kind, event.number): event for event in played.events}
        assert len(at) == 2 * 4 * 6
        for (stage, kind, number), event in at.items():
            assert event.ended - event.began == pytest.approx((forward if kind == "forward" else backward)[stage])
            source = stage - 1 if kind == "forward" else stage + 1
            if 0 <= source < 4:
                way = transfer[min(stage, source)]
                assert event.began >= at[source, kind, number].ended + way - 1e-12
            if kind == "backward":
                assert event.began >= at[stage, "forward", number].ended - 1e-12
        for stage in range(4):
            passes = played.of_stage(stage)
            assert all(b.began >= a.ended - 1e-12 for a, b in itertools.pairwise(passes))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0], [1.0, 2.0], 1), "an entry for each stage"),
        (([1.0], [1.0], 0), "an entry for each stage"),
        (([-1.0], [1.0], 1), "forward must be finite times of at least 0"),
        (([1.0], [1.0], 1, "1b1f"), "schedule must be one of"),
        (([1.0] * 3, [1.0] * 3, 1, "gpipe", [0.1]), "transfer must be one time, or 2"),
    ],
)
def test_invalid_pipelines_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        simulate_pipeline(*arguments)


# Resharding.

TENSOR = (1024, 1024, 512)
CASES = [
    (((2, 4), "S0RR"), ((2, 4), "S0RR"), TENSOR, 2, 0.5, 0.5, 0.5),
    (((2, 4), "RRR"), ((2, 4), "S0RR"), TENSOR, 2, 1.0, 0.5, 0.5),
    (((2, 4), "RS0R"), ((2, 4), "S0RR"), TENSOR, 4, 0.75, 0.75, 0.5),
    (((2, 4), "RS01R"), ((2, 4), "S01RR"), TENSOR, 64, 0.9375, 0.9375, 0.5),
    (((2, 4), "S1RR"), ((2, 4), "S0RR"), TENSOR, 4, 1.0, 0.75, 0.5),
    (((2, 4), "S0RR"), ((3, 4), "S0RR"), (3072, 1024, 170), 4, 1.0, 1.0, 0.5),
    (((1, 4), "S1RR"), ((2, 4), "RRR"), TENSOR, 4, 1.0, 1.0, 1.0),
    (((2, 4), "RS0R"), ((2, 4), "RRS0"), TENSOR, 4, 0.75, 0.75, 0.5),
]


@pytest.mark.parametrize(("source", "destination", "shape", "num", "naive", "balance", "best"), CASES)
def test_resharding_schedules_match_the_published_times(source, destination, shape, num, naive, balance, best):  # noqa: PLR0917
    tasks = unit_tasks(shape, source, destination)
    assert len(tasks) == num
    assert sum(task.size for task in tasks) == math.prod(shape)
    expected = {"naive": naive, "balance": balance, "greedy": best, "search": best}
    for algorithm, wanted in expected.items():
        schedule = schedule_tasks(tasks, algorithm)
        assert schedule.makespan / math.prod(shape) == pytest.approx(wanted, abs=1e-3), algorithm
        check_schedule(tasks, schedule)
    assert schedule_tasks(tasks, "search").is_optimal


def check_schedule(tasks, schedule):
    """Check that every task runs once, from a host with its data, and that a host sends and receives one at a time."""
    assert sorted(schedule.order) == list(range(len(tasks)))
    spans = {}
    for number, task in enumerate(tasks):
        senders, receivers, time = as_tuple(task)
        assert schedule.senders[number] in senders
        span = (schedule.begins[number], schedule.begins[number] + time)
        for host in [("from", schedule.senders[number]), *(("to", host) for host in set(receivers))]:
            spans.setdefault(host, []).append(span)
    for busy in spans.values():
        busy.sort()
        assert all(b[0] >= a[1] - 1e-9 * a[1] for a, b in itertools.pairwise(busy))
    ends = [end for busy in spans.values() for _, end in busy]
    assert schedule.makespan == pytest.approx(max(ends, default=0.0))
    assert schedule.lower_bound <= schedule.makespan * (1 + 1e-9)


def as_tuple(task):
    return task if isinstance(task, tuple) else (task.sender_hosts, task.receiver_hosts, task.size)


def brute_force_schedule(tasks):
    """Return the least makespan over all orders of the tasks and all choices of senders; orders are vectorized."""
    orders = np.array(list(itertools.permutations(range(len(tasks)))))
    num_senders = 1 + max(s for senders, _, _ in tasks for s in senders)
    num_receivers = 1 + max(r for _, receivers, _ in tasks for r in receivers)
    times = np.array([time for _, _, time in tasks])
    wanted = np.array([[r in receivers for r in range(num_receivers)] for _, receivers, _ in tasks])
    lines = np.arange(len(orders))
    best = np.inf
    for senders in itertools.product(*(task[0] for task in tasks)):
        send = np.zeros((len(orders), num_senders))
        receive = np.zeros((len(orders), num_receivers))
        by = np.array(senders)
        for job in orders.T:
            begin = np.maximum(send[lines, by[job]], np.where(wanted[job], receive, 0).max(axis=1))
            end = begin + times[job]
            send[lines, by[job]] = end
            receive = np.where(wanted[job], end[:, None], receive)
        best = min(best, np.maximum(send.max(axis=1), receive.max(axis=1)).min())
    return best


def random_tasks(rng, most=6):
    num_senders, num_receivers = (int(n) for n in rng.integers(1, 4, 2))

    def some(n, most_of):
        return tuple(int(x) for x in rng.choice(n, int(rng.integers(1, min(n, most_of) + 1)), replace=False))

    return [
        (some(num_senders, 2), some(num_receivers, 3), float(rng.integers(1, 9)))
        for _ in range(int(rng.integers(1, most + 1)))
    ]


def test_random_reshardings_equal_brute_force():
    rng = np.random.default_rng(2)
    ratios = []
    for _ in range(500):
        tasks = random_tasks(rng)
        wanted = brute_force_schedule(tasks)
        found = {algorithm: schedule_tasks(tasks, algorithm) for algorithm in ("naive", "balance", "greedy", "search")}
        for schedule in found.values():
            check_schedule(tasks, schedule)
            assert schedule.makespan >= wanted - 1e-9
            assert schedule.lower_bound <= wanted + 1e-9
            assert not schedule.is_optimal or schedule.makespan == pytest.approx(wanted)
        assert found["search"].makespan == pytest.approx(wanted)
        assert found["search"].is_optimal
        ratios.append(found["greedy"].makespan / wanted)
    assert np.mean(ratios) < 1.05


@pytest.mark.slow
def test_resharding_schedules_are_deterministic_and_large_ones_end():
    rng = np.random.default_rng(3)
    tasks = [((0, 1), (int(rng.integers(4)),), float(rng.integers(1, 9))) for _ in range(200)]
    tasks += [((int(rng.integers(6)),), tuple({*rng.integers(0, 4, 2).tolist()}), 2.5) for _ in range(100)]
    first, second = (schedule_tasks(tasks, "search", seed=5, node_limit=50) for _ in range(2))
    assert first == second
    check_schedule(tasks, first)
    assert schedule_tasks([]).makespan == 0
    # Tasks with a duration of zero take no time, but are still scheduled.
    check_schedule(done := [((0,), (0,), 0.0)] * 3, schedule_tasks(done, "greedy"))


def test_hosts_of_resharding_tasks_may_be_strings():
    schedule = schedule_tasks([(["a"], ["x"], 1), (["a", "b"], ["y"], 1)], "search")
    assert schedule.senders == ["a", "b"]
    assert schedule.makespan == 1


def test_resharding_tasks_rebuild_the_tensor():
    """Check that, between any two meshes, the pieces fill each device's tile, and each element exactly once."""
    rng = np.random.default_rng(4)
    specs = ["RR", "S0R", "RS0", "S1R", "RS1", "S01R", "RS01", "S0S1", "S1S0", "S10R"]
    for _ in range(200):
        shape = tuple(int(n) for n in rng.integers(0 if rng.random() < 0.1 else 1, 9, 2))
        ends = [(tuple(int(n) for n in rng.integers(1, 4, 2)), str(rng.choice(specs))) for _ in range(2)]
        whole = rng.random(shape)
        tasks = unit_tasks(shape, *ends)
        have = {device: box for box, devices in tiles(shape, *ends[0]).items() for device in devices}
        for box, devices in tiles(shape, *ends[1]).items():
            for device in devices:
                filled = np.full(shape, np.nan)
                for task in tasks:
                    if device in task.receivers:
                        at = tuple(slice(*ends_) for ends_ in task.box)
                        assert np.isnan(filled[at]).all()
                        filled[at] = whole[at]
                        for sender in task.senders:
                            assert all(a <= c and d <= b for (a, b), (c, d) in zip(have[sender], task.box))
                tile = tuple(slice(*ends_) for ends_ in box)
                np.testing.assert_array_equal(filled[tile], whole[tile])
                assert np.isnan(filled).sum() == whole.size - whole[tile].size


@pytest.mark.parametrize("spec", ["R", "S0S0R", "S2RR", "xRR", "S0S01R", "RRRR"])
def test_invalid_layouts_are_refused(spec):
    with pytest.raises(ValueError, match="layout of 3 dimensions|shards at most one dimension"):
        parse_spec(spec, 3)


def test_invalid_resharding_tasks_are_refused():
    with pytest.raises(ValueError, match="task 1 must have a sender, a receiver"):
        schedule_tasks([([0], [0], 1), ([], [0], 1)])
    with pytest.raises(ValueError, match="algorithm must be one of"):
        schedule_tasks([], "best")
