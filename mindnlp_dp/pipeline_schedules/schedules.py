"""Defines the order in which a pipeline stage runs the forward and backward passes of its micro-batches.

The pipeline (:mod:`mindnlp_dp.parallel.pipeline_parallel.runner`) runs these actions, and the planner simulates them.
With S stages and B micro-batches that all take the same time, S - 1 of B + S - 1 steps are idle: the bubble.

* GPipe (Huang et al., 2019): all forward, then all backward; B micro-batches are in flight.
* 1F1B (Narayanan et al., PipeDream-flush, 2021): the same bubble, and at most S - s in flight on stage s, from 0 on.
* eager 1F1B (Zhuang et al., On Optimizing the Communication of Model Parallelism, 2023): 2 (S - s) - 1 in flight, so
  that a message has the time of a micro-batch to arrive.
"""

from __future__ import annotations

FORWARD, BACKWARD = "forward", "backward"

SCHEDULES = ("gpipe", "1f1b", "eager-1f1b")

Action = tuple[str, int]


def actions(schedule: str, stage: int, num_stages: int, num_micro_batches: int) -> list[Action]:
    """Return the passes of ``stage`` in order: forward or backward, with the number of the micro-batch.

    >>> " ".join(f"{kind[0]}{number}" for kind, number in actions("1f1b", 0, 2, 4))
    'f0 f1 b0 f2 b1 f3 b2 b3'
    >>> " ".join(f"{kind[0]}{number}" for kind, number in actions("gpipe", 0, 2, 2))
    'f0 f1 b0 b1'
    """
    ahead = most_in_flight(schedule, stage, num_stages, num_micro_batches)
    order: list[Action] = [(FORWARD, number) for number in range(ahead)]
    for number in range(num_micro_batches):
        order.append((BACKWARD, number))
        if number + ahead < num_micro_batches:
            order.append((FORWARD, number + ahead))
    return order


def link_order(schedule: str, stage: int, num_stages: int, num_micro_batches: int) -> list[Action]:
    """Return the messages between ``stage`` and the next one, in the order in which the next one passes them.

    They are activations ("forward") and gradients ("backward"). A library that matches messages in the order in which
    they are issued, and runs them one after another, needs the same order on both stages, or both wait for ever: in
    1F1B a stage makes the second micro-batch's activations before it receives the first one's gradients, and the next
    stage receives them after it has sent these gradients. Every stage can follow the next one's order, because it
    has at least as many micro-batches in flight, so that what the next one receives is made by then.

    >>> " ".join(f"{kind[0]}{number}" for kind, number in link_order("1f1b", 0, 2, 3))
    'f0 b0 f1 b1 f2 b2'
    """
    return actions(schedule, stage + 1, num_stages, num_micro_batches)


def most_in_flight(schedule: str, stage: int, num_stages: int, num_micro_batches: int) -> int:
    """Return how many micro-batches a stage has between their forward and their backward pass, at most.

    >>> [most_in_flight("1f1b", stage, 4, 8) for stage in range(4)]
    [4, 3, 2, 1]
    """
    check_schedule(schedule)
    left = num_stages - stage
    return min(num_micro_batches, {"gpipe": num_micro_batches, "1f1b": left, "eager-1f1b": 2 * left - 1}[schedule])


def ideal_bubble(num_stages: int, num_micro_batches: int) -> float:
    """Return the idle fraction of a pipeline whose stages take equal time and whose messages take none.

    >>> ideal_bubble(2, 3)
    0.25
    """
    return (num_stages - 1) / (num_micro_batches + num_stages - 1)


def check_schedule(schedule: str) -> str:
    """Return ``schedule``, or raise a ValueError if it is unknown."""
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}")
    return schedule
