"""Represents the tasks of a resharding with numbered hosts, and bounds the length of their schedules.

The greedy algorithm and the search both work on :class:`Jobs`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Optional

import numpy as np

from mindnlp_dp.schedules.resharding import UnitTask

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
            f"task {number} must have a sender, a receiver and a duration from 0 on; got {senders}, {receivers}, "
            f"{duration}"
        )
    return list(senders), list(receivers), duration


def _names(hosts: Any) -> list[Hashable]:
    """Return each host once, in an order independent of the tasks: numbers by size, others as text."""
    found = list(dict.fromkeys(hosts))
    return sorted(found, key=lambda host: (0, host, "") if isinstance(host, int) else (1, 0, str(host)))
