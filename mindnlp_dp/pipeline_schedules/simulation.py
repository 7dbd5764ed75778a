"""Simulates a pipeline event by event: when each stage runs each forward and backward pass.

The planner ranks candidates with it, and the report draws the ideal pipeline. It uses no cost formula: a stage runs the
actions of its schedule one after another, each as soon as its input has arrived. A link carries one message at a time
in each direction, while the stages continue to compute; with messages ``in_order``, as on devices, a link carries them
one after another in the order of ``link_order`` (schedules.py), each when its receiver waits for
it.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Optional, Union

import numpy as np

from mindnlp_dp.pipeline_schedules.schedules import BACKWARD, FORWARD, actions, check_schedule, link_order


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
    *,
    in_order: bool = False,
) -> Timeline:
    """Simulate one update of a pipeline.

    Args:
        forward: time of a micro-batch's forward pass, by stage.
        backward: time of its backward pass, by stage.
        schedule: "gpipe", "1f1b" or "eager-1f1b" (:mod:`~mindnlp_dp.pipeline_schedules.schedules`).
        transfer: time of a message between two stages, one number for all boundaries or one for each.
        in_order: whether messages are matched in order, and begin when their receiver waits for them.

    On a device, a message takes the time of its transfer in every pass, so that "eager-1f1b" saves nothing there:

    >>> for schedule in ("gpipe", "1f1b", "eager-1f1b"):
    ...     host = simulate_pipeline([1.0] * 4, [2.0] * 4, 16, schedule, 0.1)
    ...     device = simulate_pipeline([1.0] * 4, [2.0] * 4, 16, schedule, 0.1, in_order=True)
    ...     print(f"{schedule} {host.bubble:.3f} {device.bubble:.3f}")
    gpipe 0.167 0.208
    1f1b 0.197 0.226
    eager-1f1b 0.167 0.225
    """
    by_stage: list[list[Event]] = [[] for _ in forward]

    def record(stage: int, kind: str, number: int, began: float, ended: float) -> None:
        by_stage[stage].append(Event(stage, kind, number, began, ended))

    makespan = _play(forward, backward, num_microbatches, schedule, transfer, in_order=in_order, record=record)
    flat = [event for of_stage in by_stage for event in of_stage]
    return Timeline(makespan, [_in_flight(of_stage) for of_stage in by_stage], flat)


def pipeline_makespan(
    forward: Sequence[float],
    backward: Sequence[float],
    num_microbatches: int,
    schedule: str = "gpipe",
    transfer: Union[float, Sequence[float]] = 0.0,
    *,
    in_order: bool = False,
) -> float:
    """Return the makespan that :func:`simulate_pipeline` finds, in half of its time."""
    return _play(forward, backward, num_microbatches, schedule, transfer, in_order=in_order)


def _play(
    forward: Sequence[float], backward: Sequence[float], num_microbatches: int, schedule: str, transfer: Any, *,
    in_order: bool = False, record: Optional[Callable[..., None]] = None,
) -> float:  # fmt: skip
    """Return the time at which the last pass ends; call ``record`` with the fields of each :class:`Event`."""
    check_schedule(schedule)
    num_stages = len(forward)
    ways = _ways(transfer, num_stages)
    if not num_stages or len(backward) != num_stages or num_microbatches < 1:
        raise ValueError(
            f"forward and backward must have an entry for each stage, and num_microbatches be at least 1; got "
            f"{num_stages}, {len(backward)}, {num_microbatches}"
        )
    times = {FORWARD: _times(forward, "forward"), BACKWARD: _times(backward, "backward")}
    orders = [actions(schedule, stage, num_stages, num_microbatches) for stage in range(num_stages)]
    done = [0] * num_stages
    # When each micro-batch arrives at each stage; None before it has been sent.
    never: list[Optional[float]] = [None] * num_microbatches
    arrived = {kind: [never.copy() for _ in range(num_stages)] for kind in (FORWARD, BACKWARD)}
    arrived[FORWARD][0] = arrived[BACKWARD][-1] = [0.0] * num_microbatches
    # When each stage is free again, and each link, identified by its lower stage and its direction.
    free = [0.0] * num_stages
    link = {kind: [0.0] * num_stages for kind in (FORWARD, BACKWARD)}
    # With messages in order: what each link carries next, and when it is free.
    due = [deque(link_order(schedule, stage, num_stages, num_microbatches)) for stage in range(num_stages - 1)]
    idle = [0.0] * num_stages
    ready = list(range(num_stages))
    while ready:
        stage = ready.pop()
        order, at, now = orders[stage], done[stage], free[stage]
        while at < len(order):
            kind, number = order[at]
            arrival = arrived[kind][stage][number]
            place = stage - 1 if kind == FORWARD else stage
            if arrival is None or (in_order and 0 <= place < num_stages - 1 and due[place][0] != (kind, number)):
                break
            if in_order and 0 <= place < num_stages - 1:
                due[place].popleft()
                arrival = idle[place] = max(arrival, now, idle[place]) + ways[place]
                ready.append(place + (kind == BACKWARD))
            at += 1
            began = max(now, arrival)
            now = began + times[kind][stage]
            if record is not None:
                record(stage, kind, number, began, now)
            to = stage + 1 if kind == FORWARD else stage - 1
            if 0 <= to < num_stages:
                place = min(stage, to)
                sent = link[kind][place] = now if in_order else max(link[kind][place], now) + ways[place]
                arrived[kind][to][number] = sent
                ready.append(to)
        done[stage], free[stage] = at, now
    return max(free)


def _in_flight(events: Sequence[Event]) -> int:
    steps = [1 if event.kind == FORWARD else -1 for event in events]
    return max(itertools.accumulate(steps))


def _ways(transfer: Any, num_stages: int) -> list[float]:
    if np.ndim(transfer) == 0:
        transfer = [transfer] * max(0, num_stages - 1)
    if len(transfer) != max(0, num_stages - 1):
        raise ValueError(f"transfer must be one time, or {num_stages - 1}, one per boundary; got {len(transfer)}")
    return _times(transfer, "transfer")


def _times(values: Sequence[float], name: str) -> list[float]:
    times = [float(value) for value in values]
    if not all(0 <= time < np.inf for time in times):
        raise ValueError(f"{name} must be finite times of at least 0, got {times}")
    return times
