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

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np

from mindnlp_dp.pipeline_schedules.resharding_layouts import UnitTask

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


# Relative difference between sums of the same durations in another order.
ROUNDING = 1e-9

# (job, sender, begin) of each step.
Steps = list[tuple[int, int, float]]


class Jobs:
    """Holds the tasks of a resharding, with their hosts as numbers."""

    def __init__(self, tasks: Sequence[Any]) -> None:
        given = [_as_tuple(task, number) for number, task in enumerate(tasks)]
        self.sender_names = _names(host for senders, _, _ in given for host in senders)
        receiver_names = _names(host for _, receivers, _ in given for host in receivers)
        self.num_senders, self.num_receivers = len(self.sender_names), len(receiver_names)
        sender = {name: number for number, name in enumerate(self.sender_names)}
        receiver = {name: number for number, name in enumerate(receiver_names)}
        self.senders = [sorted({sender[host] for host in senders}) for senders, _, _ in given]
        self.receivers = [sorted({receiver[host] for host in receivers}) for _, receivers, _ in given]
        self.times = [float(time) for _, _, time in given]

    def in_order(self, senders: Sequence[int], order: Optional[Sequence[int]] = None) -> Steps:
        """Return the schedule in which each task begins as early as possible after those before it."""
        send, receive, plan = [0.0] * self.num_senders, [0.0] * self.num_receivers, []
        for job in order or range(len(self.times)):
            begin = max(send[senders[job]], *(receive[r] for r in self.receivers[job]))
            plan.append((job, senders[job], begin))
            send[senders[job]] = begin + self.times[job]
            for r in self.receivers[job]:
                receive[r] = begin + self.times[job]
        return plan

    def balanced(self) -> list[int]:
        load, chosen = [0.0] * self.num_senders, []
        for senders, time in zip(self.senders, self.times):
            sender = min(senders, key=lambda s: load[s])
            load[sender] += time
            chosen.append(sender)
        return chosen

    def length(self, plan: Steps) -> float:
        return max((begin + self.times[job] for job, _, begin in plan), default=0.0)

    def lower_bound(self, send: Sequence[float], receive: Sequence[float], left: Any) -> float:
        """Return a lower bound on all schedules of the tasks left, given the times when hosts are free again."""
        waiting = list(receive)
        by_senders: dict[tuple[int, ...], float] = {}
        for job in left:
            key = tuple(self.senders[job])
            by_senders[key] = by_senders.get(key, 0.0) + self.times[job]
            for r in self.receivers[job]:
                waiting[r] += self.times[job]
        bound = max([*waiting, *send], default=0.0)
        # A group of hosts divides, at best evenly, the tasks that only they may send.
        for hosts in [*by_senders, tuple(range(self.num_senders))]:
            if hosts:
                among = set(hosts)
                work = sum(time for senders, time in by_senders.items() if among.issuperset(senders))
                bound = max(bound, (sum(send[s] for s in hosts) + work) / len(hosts))
        for job in left:
            begin = max(min(send[s] for s in self.senders[job]), *(receive[r] for r in self.receivers[job]))
            bound = max(bound, begin + self.times[job])
        return bound


def _as_tuple(task: Any, number: int) -> tuple[Sequence[Hashable], Sequence[Hashable], float]:
    if isinstance(task, UnitTask):
        return task.sender_hosts, task.receiver_hosts, task.size
    senders, receivers, duration = task
    if not senders or not receivers or not 0 <= duration < np.inf:
        raise ValueError(
            f"task {number} must have a sender, a receiver and a duration of at least 0; got {senders}, {receivers}, "
            f"{duration}"
        )
    return list(senders), list(receivers), duration


def _names(hosts: Any) -> list[Hashable]:
    """Return each host once, in an order independent of the tasks: numbers by size, others as text."""
    found = list(dict.fromkeys(hosts))
    return sorted(found, key=lambda host: (0, host, "") if isinstance(host, int) else (1, 0, str(host)))


class Search:
    """Searches (task, sender) in the order of start times, and prunes what cannot improve on the best schedule."""

    def __init__(self, jobs: Jobs, plan: Steps, node_limit: int) -> None:
        self._jobs, self._best = jobs, plan
        self._length = jobs.length(plan)
        self._nodes_left = node_limit
        self._seen: set[tuple[Any, ...]] = set()

    def run(self) -> tuple[Steps, bool]:
        """Return the best schedule, and whether the search was complete."""
        jobs = self._jobs
        num = len(jobs.times)
        bound = jobs.lower_bound([0.0] * jobs.num_senders, [0.0] * jobs.num_receivers, range(num))
        # The depth is the number of tasks, which may exceed Python's recursion limit, so the stack is explicit.
        free = ((0.0,) * jobs.num_senders, (0.0,) * jobs.num_receivers)
        stack = [iter([(0.0, *free, frozenset(range(num)), (), bound)])]
        while stack and self._length > bound * (1 + ROUNDING):
            state = next(stack[-1], None)
            if state is None:
                stack.pop()
            elif state[5] >= self._length * (1 - ROUNDING):
                continue
            elif not state[3]:
                plan = _unlinked(state[4])
                if jobs.length(plan) < self._length:
                    self._best, self._length = plan, jobs.length(plan)
            else:
                self._nodes_left -= 1
                if self._nodes_left < 0:
                    return self._best, False
                stack.append(iter(self._children(state)))
        return self._best, True

    def _children(self, state: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        now, send, receive, left, path, _ = state
        key = (left, tuple(max(t, now) for t in send), tuple(max(t, now) for t in receive))
        if key in self._seen:
            return []
        self._seen.add(key)
        jobs = self._jobs
        children = []
        tried = set()
        for job in sorted(left):
            ready = max(now, *(receive[r] for r in jobs.receivers[job]))
            for s in jobs.senders[job]:
                begin = max(ready, send[s])
                # Tasks with equal senders, receivers and time are interchangeable: try one of them.
                alike = (tuple(jobs.senders[job]), tuple(jobs.receivers[job]), jobs.times[job], s)
                if alike in tried:
                    continue
                tried.add(alike)
                end = begin + jobs.times[job]
                rest = left - {job}
                # Tasks are started in order of time, so all later ones begin at ``begin`` or after.
                new_send = tuple(end if i == s else t for i, t in enumerate(send))
                mine = set(jobs.receivers[job])
                new_receive = tuple(end if i in mine else t for i, t in enumerate(receive))
                bound = jobs.lower_bound(
                    [max(t, begin) for t in new_send] if rest else new_send,
                    [max(t, begin) for t in new_receive] if rest else new_receive,
                    rest,
                )
                if bound < self._length * (1 - ROUNDING):
                    new_path = ((job, s, begin), path)
                    children.append((bound, begin, (begin, new_send, new_receive, rest, new_path, bound)))
        children.sort(key=lambda child: child[:2])
        return [child for _, _, child in children]


def _unlinked(path: Any) -> Steps:
    plan: Steps = []
    while path:
        step, path = path
        plan.append(step)
    return plan[::-1]
