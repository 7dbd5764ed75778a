"""What a micro batch's way from one stage of a pipeline to the next takes.

Goes in: the meshes of both stages, and where on the cluster they are. Comes out: seconds a byte and a message, by the
best schedule of the resharding, for the layout in which the tensor best arrives.
"""

from __future__ import annotations

from dataclasses import dataclass

from .cluster import Cluster, all_gather
from .resharding import unit_tasks
from .resharding_schedule import schedule_tasks

# Both layouts in which a stage may receive: whole on each device of its tensor-parallel group, or in shares, which are
# then gathered among them.
WHOLE, SHARES = "S0R", "S0S1"


@dataclass(frozen=True)
class Boundary:
    """From a stage of dp x tp devices to the next one.

    Attributes:
        source: (dp, tp) of the stage that sends.
        destination: the same of the one that receives.
        layout: how the tensor arrives: "S0R" whole, "S0S1" in shares that are gathered.
        seconds: of a message of no bytes.
        seconds_per_byte: of the micro batch's hidden states, all samples together.
    """

    source: tuple[int, int]
    destination: tuple[int, int]
    layout: str
    seconds: float
    seconds_per_byte: float

    def time(self, num_bytes: float) -> float:
        return self.seconds + num_bytes * self.seconds_per_byte


class Boundaries:
    """Of one cluster; each pair of meshes is looked at once."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._known: dict[tuple[tuple[int, int], tuple[int, int], int], Boundary] = {}

    def between(self, source: tuple[int, int], destination: tuple[int, int], first_device: int = 0) -> Boundary:
        """Of a stage whose devices begin at ``first_device``, to the one right behind it."""
        # Hosts are alike: what matters is where in its host the first device is.
        key = (source, destination, first_device % self._cluster.devices_per_host)
        if key not in self._known:
            options = [self._option(*key, layout) for layout in (WHOLE, SHARES)]
            # Of equals, the one that gathers nothing.
            self._known[key] = min(options, key=lambda b: (b.time(1e6), b.layout != WHOLE))
        return self._known[key]

    def _option(self, source: tuple[int, int], destination: tuple[int, int], first: int, layout: str) -> Boundary:
        cluster = self._cluster
        middle = first + source[0] * source[1]
        within = middle + destination[0] * destination[1] <= cluster.devices_per_host
        link = cluster.inside if within else cluster.between
        # As many rows and columns as any of the meshes cuts, so that tiles are whole.
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
        """Which links a piece needs: of devices in one host, each has its own; else hosts have."""
        numbers = [first + row * tp + column for row, column in devices]
        return sorted(set(numbers if within else [n // self._cluster.devices_per_host for n in numbers]))
