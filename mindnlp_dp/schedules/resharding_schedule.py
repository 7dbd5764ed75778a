"""Schedules the messages of a resharding between two meshes so that it ends early: who sends which piece, and when.

Pipeline messages (:mod:`mindnlp_dp.parallel`) and the planner call it. A task occupies its sender and all its receivers
for its full time; a host sends and receives independently. This is the problem of Zhuang et al., *On Optimizing the
Communication of Model Parallelism* (MLSys 2023), section 3.2; the search uses another bound, because the one of the
paper is not a lower bound for every schedule.

* "naive": the sender with the lowest number, in the given order.
* "balance": the sender with the least to send so far, in the given order.
* "greedy": whenever hosts are free, the task with the busiest hosts, with random changes of which host counts as busy;
  the best of many attempts.
* "search": depth-first search that begins with the greedy schedule; optimal unless ``node_limit`` ends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindnlp_dp.schedules.resharding_jobs import ROUNDING, Jobs, Steps
from mindnlp_dp.schedules.resharding_search import Search

ALGORITHMS = ("naive", "balance", "greedy", "search")

# Number of attempts of the greedy algorithm; the time of an attempt grows with the square of the tasks.
_FEWEST_TRIES, _MOST_TRIES, _WORK = 8, 200, 1_000_000


@dataclass(frozen=True)
class Schedule:
    """Holds the schedule that :func:`schedule_tasks` found.

    Attributes:
        makespan: end of the last task. For unit tasks it is in elements: divide it by the elements per second of a
            host's link.
        lower_bound: lower bound on the makespan of every schedule.
        order: indices of the tasks, by start time.
        senders: the sending host of each task.
        begins: start time of each task.
        is_optimal: whether it is proven that no schedule is shorter.
    """

    makespan: float
    lower_bound: float
    order: list[int]
    senders: list[Any]
    begins: list[float]
    is_optimal: bool


def schedule_tasks(
    tasks: Sequence[Any], algorithm: str = "search", seed: int = 0, node_limit: int = 100_000
) -> Schedule:
    """Schedule unit tasks, or tuples (senders, receivers, duration) with hosts of any names.

    Args:
        algorithm: "naive", "balance", "greedy" or "search".
        seed: random seed of "greedy", and of the schedule that "search" begins with.
        node_limit: number of partial schedules that "search" tries; not a time, so that results are reproducible.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}, got {algorithm!r}")
    jobs = Jobs(tasks)
    bound = jobs.lower_bound([0.0] * jobs.num_senders, [0.0] * jobs.num_receivers, range(len(jobs.times)))
    proven = False
    if algorithm == "naive":
        plan = jobs.in_order([min(senders) for senders in jobs.senders])
    elif algorithm == "balance":
        plan = jobs.in_order(jobs.balanced())
    else:
        plan = _greedy(jobs, seed, bound)
        if algorithm == "search":
            plan, proven = Search(jobs, plan, node_limit).run()
    length = jobs.length(plan)
    is_optimal = proven or length <= bound * (1 + ROUNDING)
    begins = {job: begin for job, _, begin in plan}
    senders = {job: jobs.sender_names[sender] for job, sender, _ in plan}
    order = [job for job, _, begin in sorted(plan, key=lambda step: (step[2], step[0]))]
    numbers = range(len(jobs.times))
    return Schedule(
        length, length if proven else bound, order, [senders[j] for j in numbers], [begins[j] for j in numbers],
        is_optimal,
    )  # fmt: skip


def _greedy(jobs: Jobs, seed: int, bound: float) -> Steps:
    rng = np.random.default_rng(seed)
    best: Steps = []
    best_length = np.inf
    for senders in ([min(s) for s in jobs.senders], jobs.balanced()):
        plan = jobs.in_order(senders)
        if jobs.length(plan) < best_length:
            best, best_length = plan, jobs.length(plan)
    num_tries = min(_MOST_TRIES, max(_FEWEST_TRIES, _WORK // max(1, len(jobs.times) ** 2)))
    for attempt in range(num_tries):
        if best_length <= bound * (1 + ROUNDING):
            break
        plan = _one_try(jobs, rng, 0.0 if attempt == 0 else rng.choice([0.1, 0.3, 1.0]))
        if jobs.length(plan) < best_length:
            best, best_length = plan, jobs.length(plan)
    return best


def _one_try(jobs: Jobs, rng: np.random.Generator, noise: float) -> Steps:
    """Advance through time; whenever hosts are free, begin the tasks whose hosts have the most work left."""
    left = set(range(len(jobs.times)))
    send, receive, plan = [0.0] * jobs.num_senders, [0.0] * jobs.num_receivers, []
    now = 0.0
    to_receive = [0.0] * jobs.num_receivers
    to_send = [0.0] * jobs.num_senders
    for job in left:
        for r in jobs.receivers[job]:
            to_receive[r] += jobs.times[job]
        for s in jobs.senders[job]:
            to_send[s] += jobs.times[job] / len(jobs.senders[job])
    tiebreak = rng.random(len(jobs.times))
    while left:
        shaken = 1 + noise * rng.standard_normal(len(jobs.times))

        def urgency(job: int) -> tuple[float, float]:
            hosts = [to_receive[r] for r in jobs.receivers[job]]
            hosts += [max(to_send[s] for s in jobs.senders[job])]
            return -max(hosts) * shaken[job], tiebreak[job]  # noqa: B023

        began = False
        for job in sorted(left, key=urgency):
            free = [s for s in jobs.senders[job] if send[s] <= now]
            if not free or any(receive[r] > now for r in jobs.receivers[job]):
                continue
            # Prefer the sender with the least work left to send.
            sender = min(free, key=lambda s: (to_send[s], tiebreak[s % len(tiebreak)]))
            end = now + jobs.times[job]
            plan.append((job, sender, now))
            left.discard(job)
            send[sender] = end
            for r in jobs.receivers[job]:
                receive[r] = end
                to_receive[r] -= jobs.times[job]
            for s in jobs.senders[job]:
                to_send[s] -= jobs.times[job] / len(jobs.senders[job])
            began = True
        if left and not (began and min(jobs.times[j] for j in left) == 0):
            later = [time for time in (*send, *receive) if time > now]
            now = min(later) if later else now
    return plan
