"""Finds the best schedule of a resharding by depth-first search.

:func:`~mindnlp_dp.planner.schedule_tasks` calls it with a schedule to improve on.
"""

from __future__ import annotations

from typing import Any

from mindnlp_dp.schedules.resharding_jobs import ROUNDING, Jobs, Steps


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
