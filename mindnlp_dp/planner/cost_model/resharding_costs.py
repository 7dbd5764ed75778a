"""Prices the transfer of a micro-batch from one pipeline stage to the next.

The search for candidates and the simulation call it. A price is seconds per message and per byte, for a greedy schedule
of the resharding between the meshes of both stages, and for the layout in which the tensor arrives soonest.
"""

from __future__ import annotations

from dataclasses import dataclass

from mindnlp_dp.pipeline_schedules.resharding_layouts import unit_tasks
from mindnlp_dp.pipeline_schedules.resharding_schedule import schedule_tasks
from mindnlp_dp.planner.profiles.cluster_profile import Cluster, all_gather

# The two layouts in which a stage may receive a tensor: replicated over its tensor-parallel group, or sharded over it
# and then all-gathered.
WHOLE, SHARES = "S0R", "S0S1"


@dataclass(frozen=True)
class Boundary:
    """Holds the cost of a transfer from a stage of dp x tp devices to the next one.

    Attributes:
        source: (dp, tp) of the stage that sends.
        destination: (dp, tp) of the stage that receives.
        layout: layout on arrival: "S0R" replicated, "S0S1" sharded and then gathered.
        seconds: latency of a message.
        seconds_per_byte: seconds per byte of the micro-batch's hidden states, all samples together.
    """

    source: tuple[int, int]
    destination: tuple[int, int]
    layout: str
    seconds: float
    seconds_per_byte: float

    def time(self, num_bytes: float) -> float:
        return self.seconds + num_bytes * self.seconds_per_byte


class Boundaries:
    """Prices the stage boundaries of one cluster, and caches the price of each pair of meshes."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._known: dict[tuple[tuple[int, int], tuple[int, int], int], Boundary] = {}

    def between(self, source: tuple[int, int], destination: tuple[int, int], first_device: int = 0) -> Boundary:
        """Return the boundary between a stage whose devices begin at ``first_device`` and the stage after it."""
        # Hosts are identical: only the position of the first device in its host matters.
        key = (source, destination, first_device % self._cluster.devices_per_host)
        if key not in self._known:
            options = [self._option(*key, layout) for layout in (WHOLE, SHARES)]
            # Of equal options, prefer the one that gathers nothing.
            self._known[key] = min(options, key=lambda b: (b.time(1e6), b.layout != WHOLE))
        return self._known[key]

    def _option(self, source: tuple[int, int], destination: tuple[int, int], first: int, layout: str) -> Boundary:
        cluster = self._cluster
        middle = first + source[0] * source[1]
        within = middle + destination[0] * destination[1] <= cluster.devices_per_host
        link = cluster.inside if within else cluster.between
        # Both meshes divide these numbers of rows and columns, so that tiles are even.
        shape = (source[0] * destination[0], source[1] * destination[1])
        tasks = []
        for task in unit_tasks(shape, (source, WHOLE), (destination, layout)):
            senders = self._links(task.senders, source[1], first, within)
            receivers = self._links(task.receivers, destination[1], middle, within)
            tasks.append((senders, receivers, task.size / (shape[0] * shape[1])))
        makespan = schedule_tasks(tasks, "greedy").makespan
        gather = 0.0
        latency = link.alpha
        if layout == SHARES and destination[1] > 1:
            inner = cluster.link(destination[1], 1)
            gather = all_gather(destination[1], 1.0 / destination[0], inner) - inner.alpha
            latency += inner.alpha
        return Boundary(source, destination, layout, latency, makespan * link.beta + gather)

    def _links(self, devices: tuple[tuple[int, int], ...], tp: int, first: int, within: bool) -> list[int]:
        """Return the links that a piece needs: each device has its own within a host, otherwise each host has one."""
        numbers = [first + row * tp + column for row, column in devices]
        return sorted(set(numbers if within else [n // self._cluster.devices_per_host for n in numbers]))
