"""Simulates a pipeline event by event: when each stage runs each forward and backward pass.

The planner ranks candidates with it, and the report draws the ideal pipeline. It uses no cost formula: a stage runs the
actions of its schedule one after another, each as soon as its input has arrived; a link carries one message at a time
in each direction, while the stages continue to compute.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Union

import numpy as np

from mindnlp_dp.schedules.pipeline import BACKWARD, FORWARD, Action, actions, check_schedule


@dataclass(frozen=True)
class Event:
    """Describes one pass of a stage: ``kind`` ("forward" or "backward") of a micro-batch, ``began`` and ``ended``."""

    stage: int
    kind: str
    number: int
    began: float
    ended: float


@dataclass(frozen=True)
class Timeline:
    """Holds the result of :func:`simulate_pipeline`.

    Attributes:
        makespan: time from the start of the first pass to the end of the last, in the unit of the given times.
        in_flight: largest number of micro-batches, by stage, between their forward and the end of their backward pass.
        events: all passes, by stage and in order.
    """

    makespan: float
    in_flight: list[int]
    events: list[Event]

    @property
    def bubble(self) -> float:
        """Return the fraction of the time that stages were idle."""
        busy = sum(event.ended - event.began for event in self.events)
        whole = len(self.in_flight) * self.makespan
        return 1 - busy / whole if whole else 0.0

    def of_stage(self, stage: int) -> list[Event]:
        return [event for event in self.events if event.stage == stage]


def simulate_pipeline(
    forward: Sequence[float],
    backward: Sequence[float],
    num_microbatches: int,
    schedule: str = "gpipe",
    transfer: Union[float, Sequence[float]] = 0.0,
) -> Timeline:
    """Simulate one update of a pipeline.

    Args:
        forward: time of a micro-batch's forward pass, by stage.
        backward: time of its backward pass, by stage.
        schedule: "gpipe", "1f1b" or "eager-1f1b" (:mod:`~mindnlp_dp.schedules.pipeline`).
        transfer: time of a message between two stages, one number for all boundaries or one for each.
    """
    check_schedule(schedule)
    num_stages = len(forward)
    ways = _ways(transfer, num_stages)
    if not num_stages or len(backward) != num_stages or num_microbatches < 1:
        raise ValueError(
            f"forward and backward must have an entry for each stage, and num_microbatches be from 1 on; got "
            f"{num_stages}, {len(backward)}, {num_microbatches}"
        )
    times = {FORWARD: _times(forward, "forward"), BACKWARD: _times(backward, "backward")}
    left = [actions(schedule, stage, num_stages, num_microbatches)[::-1] for stage in range(num_stages)]
    arrived: dict[tuple[int, Action], float] = {}
    # When each stage is free again, and each link, identified by its lower stage and its direction.
    free = [0.0] * num_stages
    link = dict.fromkeys(itertools.product(range(num_stages - 1), (FORWARD, BACKWARD)), 0.0)
    events: list[list[Event]] = [[] for _ in range(num_stages)]
    ready = list(range(num_stages))
    while ready:
        stage = ready.pop()
        while left[stage]:
            kind, number = left[stage][-1]
            begins = stage == 0 if kind == FORWARD else stage == num_stages - 1
            if not begins and (stage, (kind, number)) not in arrived:
                break
            left[stage].pop()
            began = max(free[stage], 0.0 if begins else arrived[stage, (kind, number)])
            free[stage] = began + times[kind][stage]
            events[stage].append(Event(stage, kind, number, began, free[stage]))
            to = stage + 1 if kind == FORWARD else stage - 1
            if 0 <= to < num_stages:
                place = (min(stage, to), kind)
                link[place] = max(link[place], free[stage]) + ways[place[0]]
                arrived[to, (kind, number)] = link[place]
                ready.append(to)
    flat = [event for of_stage in events for event in of_stage]
    return Timeline(max(event.ended for event in flat), [_in_flight(of_stage) for of_stage in events], flat)


def _in_flight(events: Sequence[Event]) -> int:
    steps = [1 if event.kind == FORWARD else -1 for event in events]
    return max(itertools.accumulate(steps))


def _ways(transfer: Any, num_stages: int) -> list[float]:
    if np.ndim(transfer) == 0:
        transfer = [transfer] * max(0, num_stages - 1)
    if len(transfer) != max(0, num_stages - 1):
        raise ValueError(f"transfer must be one time, or {num_stages - 1}, one a boundary; got {len(transfer)}")
    return _times(transfer, "transfer")


def _times(values: Sequence[float], name: str) -> list[float]:
    times = [float(value) for value in values]
    if not all(0 <= time < np.inf for time in times):
        raise ValueError(f"{name} must be finite times from 0 on, got {times}")
    return times
