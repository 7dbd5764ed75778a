"""Simulates a candidate: its pipeline event by event, and its memory with the micro-batches in flight.

:func:`~mindnlp_dp.planner.plan` and :func:`~mindnlp_dp.planner.predict` call it to turn a candidate into a plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Optional

from mindnlp_dp.pipeline_schedules.schedules import most_in_flight
from mindnlp_dp.pipeline_schedules.simulation import pipeline_makespan, simulate_pipeline
from mindnlp_dp.planner.candidates import Candidate, Candidates
from mindnlp_dp.planner.cost_model.stage_costs import GRADIENT_BYTES, StageParallelism
from mindnlp_dp.planner.plan import Plan, StagePlan

# A long pipeline is extrapolated from two simulations: of at least this many micro-batches, and of twice as many.
_PLAYED_MICRO_BATCHES = 256


def simulate_step(search: Candidates, candidate: Candidate, below: float = math.inf) -> Optional[Plan]:
    """Return the plan with its timeline; None if its micro-batches in flight do not fit into memory, or it is too slow.

    It is too slow if an update takes ``below`` seconds or more.
    """
    stages = [_stage(search, candidate, place) for place in range(len(candidate.slices))]
    if max(stage.memory.total for stage in stages) > search.room:
        return None
    pp, num, schedule = len(stages), candidate.num_micro_batches, candidate.schedule or "1f1b"
    forward, backward = [s.forward for s in stages], [s.backward for s in stages]
    gradients, optimizer = _update(search, candidate)
    if (least_makespan(forward, backward, num) + gradients + optimizer) * (1 - 1e-9) >= below:
        return None
    transfers = _transfers(search, candidate)
    in_order = search.cluster.device != "CPU"
    makespan = _makespan(forward, backward, num, schedule, transfers, in_order=in_order)
    if makespan + gradients + optimizer >= below:
        return None
    timeline = simulate_pipeline(forward, backward, min(num, 2 * _few(pp)), schedule, transfers, in_order=in_order)
    at_once = _makespan(forward, backward, num, schedule, 0.0, in_order=in_order) if pp > 1 else makespan
    slowest = max(stages, key=lambda s: s.forward + s.backward)
    busy = num * (slowest.forward + slowest.backward)
    parts = {
        "compute": busy - num * slowest.collectives,
        "collectives": num * slowest.collectives,
        "transfers": max(0.0, makespan - at_once),
        "bubble": max(0.0, at_once - busy),
        "gradients": gradients,
        "optimizer": optimizer,
    }
    seconds = makespan + gradients + optimizer
    alone = _one_device(search, candidate)
    # An update would take the average compute time of a device if communication were free and no stage idle.
    work = sum(s.sharing.num_devices * num * (s.forward + s.backward - s.collectives) for s in stages)
    least = work / sum(s.sharing.num_devices for s in stages) + optimizer
    return Plan(
        stages, candidate.micro_batches[0], num, candidate.schedule, candidate.recompute, candidate.zero_stage, seconds,
        parts, search.cluster.memory, alone / seconds, alone / least, timeline,
    )  # fmt: skip


def least_makespan(forward: Sequence[float], backward: Sequence[float], num: int) -> float:
    """Return a lower bound: each stage waits for the first micro-batch, and the stages before it for its last one."""
    before, least = 0.0, 0.0
    for ahead, back in zip(forward, backward):
        least = max(least, before + num * (ahead + back))
        before += ahead + back
    return least


def _makespan(
    forward: Sequence[float], backward: Sequence[float], num: int, schedule: str, transfer: Any, *, in_order: bool
) -> float:
    """Return the time of ``num`` micro-batches; once a pipeline is full, each further one takes the same time."""
    few = _few(len(forward))
    if num <= 2 * few:
        return pipeline_makespan(forward, backward, num, schedule, transfer, in_order=in_order)
    shorter, longer = (
        pipeline_makespan(forward, backward, n, schedule, transfer, in_order=in_order) for n in (few, 2 * few)
    )
    return longer + (num - 2 * few) * (longer - shorter) / few


def _few(num_stages: int) -> int:
    """Return half of the micro-batches that are simulated at most."""
    return max(_PLAYED_MICRO_BATCHES, 8 * num_stages)


def _stage(search: Candidates, candidate: Candidate, place: int) -> StagePlan:
    (first, last, sharing), micro_batch = candidate.slices[place], candidate.micro_batches[place]
    costs = search.costs(sharing, candidate.firsts)
    pp, num = len(candidate.slices), candidate.num_micro_batches
    in_flight = most_in_flight(candidate.schedule, place, pp, num) if pp > 1 else 1
    t = costs.times(first, last, micro_batch)
    gathers = costs.gathers(first, last, candidate.zero_stage)
    ahead = float(t.forward + t.forward_collectives) + gathers[0]
    again, collectives_again = costs.again(first, last, micro_batch) if candidate.recompute else (0.0, 0.0)
    collectives = float(t.forward_collectives + t.backward_collectives + collectives_again) + sum(gathers)
    bounds = [*candidate.firsts, len(search.model.graph.operators)]
    operators = (bounds[first], bounds[last + 1] - 1)
    memory = costs.memory(
        first, last, micro_batch, in_flight=in_flight, zero_stage=candidate.zero_stage, recompute=candidate.recompute
    )
    backward = float(t.backward + t.backward_collectives + again + collectives_again) + gathers[1]
    return StagePlan(operators, _blocks(search, *operators), sharing, ahead, backward, collectives, memory)


def _blocks(search: Candidates, first: int, last: int) -> Optional[tuple[int, int]]:
    model = search.model
    if not model.blocks:
        return None
    places = [0, *model.split_points, len(model.graph.operators)]
    return model.blocks[places.index(first)], model.blocks[places.index(last + 1)]


def _transfers(search: Candidates, candidate: Candidate) -> list[float]:
    """Return the seconds of a micro-batch's transfer across each boundary."""
    seconds, first_device = [], 0
    for place, ((_, _, before), (first, _, sharing)) in enumerate(zip(candidate.slices, candidate.slices[1:])):
        boundary = search.boundaries.between((before.dp, before.tp), (sharing.dp, sharing.tp), first_device)
        entering = float(search.costs(sharing, candidate.firsts).entering[first])
        seconds.append(boundary.time(candidate.micro_batches[place + 1] * sharing.dp * entering))
        first_device += before.num_devices
    return seconds


def _update(search: Candidates, candidate: Candidate) -> tuple[float, float]:
    """Return the seconds of the gradient exchange and of the optimizer, each of the slowest stage."""
    exchanges, optimizers, tied = [], [], 0.0
    for first, last, sharing in candidate.slices:
        costs = search.costs(sharing, candidate.firsts)
        exchange, optimizer = costs.update(first, last, candidate.zero_stage)
        exchanges.append(exchange)
        optimizers.append(optimizer)
        tied = max(tied, costs.tied_parameters(first, last))
    cluster = search.cluster
    link = cluster.between if cluster.num_hosts > 1 else cluster.inside
    # Two stages with the same weights sum up their gradients.
    of_tied = link.alpha + link.beta * GRADIENT_BYTES * tied if tied else 0.0
    return max(exchanges) + of_tied, max(optimizers)


def _one_device(search: Candidates, candidate: Candidate) -> float:
    """Return the seconds of an update on one device with the same micro-batches and unlimited memory."""
    costs = search.costs(StageParallelism(), candidate.firsts)
    last, micro_batch = len(candidate.firsts) - 1, candidate.micro_batches[0]
    num = search.batch // micro_batch
    return num * float(costs.times(0, last, micro_batch).total) + sum(costs.update(0, last, 0))
