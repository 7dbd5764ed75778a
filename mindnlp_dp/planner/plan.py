"""Defines the results of the planner: plans, their stages with times and memory, and rejected alternatives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

from mindnlp_dp.pipeline_schedules.simulation import Timeline
from mindnlp_dp.planner.cost_model.memory_cost import MemoryUse
from mindnlp_dp.planner.cost_model.stage_costs import StageParallelism, mesh_of
from mindnlp_dp.planner.profiles.cluster_profile import Cluster
from mindnlp_dp.planner.profiles.operator_graph import Model
from mindnlp_dp.runtime.mesh_spec import Size, mesh_name


@dataclass(frozen=True)
class StagePlan:
    """Describes one stage of a plan.

    Attributes:
        operators: (first, last) of the model's operators, last included.
        blocks: (first, end) of the transformer layers, end excluded; None for a model without transformer layers.
        sharing: the degrees of parallelism of the stage.
        forward: seconds of the forward pass of a micro-batch, collectives included.
        backward: seconds of its backward pass, collectives and recomputation included.
        collectives: seconds of communication within both of these.
        memory: bytes on each device of the stage.
    """

    operators: tuple[int, int]
    blocks: Optional[tuple[int, int]]
    sharing: StageParallelism
    forward: float
    backward: float
    collectives: float
    memory: MemoryUse


@dataclass(frozen=True)
class Plan:
    """Describes one way to train, with its predicted time and memory.

    Attributes:
        stages: the stages of the pipeline; one stage without pipeline parallelism.
        micro_batch: samples that a device of the first stage processes at a time.
        num_micro_batches: micro-batches per update.
        schedule: the pipeline schedule; "" without a pipeline.
        recompute: whether layers keep only their inputs and recompute the other activations.
        zero_stage: the ZeRO stage, see ``docs/zero.md``.
        seconds: predicted time of an update.
        parts: the same seconds by purpose: compute, collectives, transfers, bubble, gradients, optimizer.
        capacity: memory of a device in bytes.
        speedup: speedup over a single device with unlimited memory.
        amdahl: upper bound of the speedup, with free communication and no idle stage; it is below the number of devices
            where devices repeat work, because repeated and recomputed work is not divided.
        timeline: the simulated pipeline; only the first micro-batches if there are very many.
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
        """Return the fraction of device memory that is free in the heaviest stage."""
        return 1 - self.heaviest.memory.total / self.capacity

    @property
    def mesh(self) -> dict[str, Size]:
        """Return the sizes for ``--mesh``; a size is a tuple with a value per stage where stages differ."""
        sizes = mesh_of([stage.sharing for stage in self.stages])
        return {"fsdp" if axis == "dp" and self.zero_stage == 3 else axis: size for axis, size in sizes.items()}

    @property
    def micro_batch_size(self) -> int:
        """Return the value for ``--micro-batch-size``: samples of a mesh row, which a stage's devices may split."""
        rows = math.gcd(*(stage.sharing.num_data for stage in self.stages))
        return self.micro_batch * self.stages[0].sharing.num_data // rows

    def __str__(self) -> str:
        return mesh_name(self.mesh)


@dataclass(frozen=True)
class Rejected:
    """Records an alternative that is impossible, and why; ``needs`` is its bytes per device if memory is the reason."""

    what: str
    why: str
    needs: Optional[float] = None


class Plans(list[Plan]):
    """Holds the plans that the planner found, best first.

    Attributes:
        rejected: the alternatives that were left out.
        model: the model that the plans are for.
        cluster: the cluster that they run on.
        batch: samples per update.
        num_priced: number of candidates that were priced by formula.
    """

    def __init__(
        self, plans: Sequence[Plan], rejected: list[Rejected], *, model: Model, cluster: Cluster, batch: int,
        num_priced: int,
    ) -> None:  # fmt: skip
        super().__init__(plans)
        self.rejected, self.model, self.cluster, self.batch = rejected, model, cluster, batch
        self.num_priced = num_priced
