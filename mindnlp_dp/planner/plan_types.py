"""What a plan says: stages with their times and their memory, and what the time goes into."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

from .cluster import Cluster
from .memory import MemoryUse
from .operators import Model
from .simulate import Timeline
from .stage_costs import MeshSize, Sharing, mesh_name, mesh_of


@dataclass(frozen=True)
class StagePlan:
    """A stage of a plan.

    Attributes:
        operators: (first, last) of the model's, last included.
        blocks: (first, end) of the transformer layers; None of a model without.
        sharing: how its devices share out the work.
        forward: seconds of a micro batch, collectives included; the backward pass's with what is computed anew.
        collectives: of both passes, the seconds that are exchanges.
        memory: bytes of each of its devices.
    """

    operators: tuple[int, int]
    blocks: Optional[tuple[int, int]]
    sharing: Sharing
    forward: float
    backward: float
    collectives: float
    memory: MemoryUse


@dataclass(frozen=True)
class Plan:
    """One way to train, with what it is expected to take.

    Attributes:
        stages: of the pipeline; one where there is none.
        micro_batch: samples of a device at a time, in the first stage.
        num_micro_batches: in an update.
        schedule: of the pipeline; "" without one.
        recompute: whether stages keep their inputs alone.
        zero_stage: see ``docs/update.md``.
        seconds: of an update.
        parts: of these, by what they are spent on: compute, collectives, transfers, bubble, gradients, optimizer.
        capacity: bytes of a device.
        speedup: over one device that does all of it, memory aside.
        amdahl: the most that it could be, were exchanges free and no stage ever idle: what devices do alike, or twice
            over, is not shared out.
        timeline: of the pipeline, as it was played; of very many micro batches, the first ones.
    """

    stages: list[StagePlan]
    micro_batch: int
    num_micro_batches: int
    schedule: str
    recompute: bool
    zero_stage: int
    seconds: float
    parts: dict[str, float]
    capacity: float
    speedup: float
    amdahl: float
    timeline: Timeline

    @property
    def num_devices(self) -> int:
        return sum(stage.sharing.num_devices for stage in self.stages)

    @property
    def heaviest(self) -> StagePlan:
        return max(self.stages, key=lambda stage: stage.memory.total)

    @property
    def margin(self) -> float:
        """The share of the heaviest stage's memory that is left."""
        return 1 - self.heaviest.memory.total / self.capacity

    @property
    def mesh(self) -> dict[str, MeshSize]:
        """For ``--mesh``; sizes are tuples, by stage, where stages have different ones."""
        return mesh_of([stage.sharing for stage in self.stages])

    @property
    def micro_batch_size(self) -> int:
        """For ``--micro-batch-size``: samples of a row of the mesh, which several devices of a stage may share out."""
        rows = math.gcd(*(stage.sharing.num_data for stage in self.stages))
        return self.micro_batch * self.stages[0].sharing.num_data // rows

    def __str__(self) -> str:
        return mesh_name(self.mesh)


@dataclass(frozen=True)
class Rejected:
    """What cannot be, in one sentence; ``needs`` are the bytes that it takes of a device, where these are too many."""

    what: str
    why: str
    needs: Optional[float] = None


class Plans(list[Plan]):
    """Best first.

    Attributes:
        rejected: what was left out.
        model: what they are for.
        cluster: where they run.
        batch: samples an update.
        num_priced: how many were priced by formula.
    """

    def __init__(
        self, plans: Sequence[Plan], rejected: list[Rejected], *, model: Model, cluster: Cluster, batch: int,
        num_priced: int,
    ) -> None:  # fmt: skip
        super().__init__(plans)
        self.rejected, self.model, self.cluster, self.batch = rejected, model, cluster, batch
        self.num_priced = num_priced
