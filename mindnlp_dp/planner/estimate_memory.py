"""Estimates the memory of a training run on a given mesh; ``mindnlp-dp estimate`` prints it for several."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Optional

from mindnlp_dp.pipeline_schedules.schedules import most_in_flight
from mindnlp_dp.planner.candidates import mesh_problem
from mindnlp_dp.planner.cost_model.memory_cost import MemoryUse, memory_of
from mindnlp_dp.planner.cost_model.stage_costs import layers_of, stages_of_mesh
from mindnlp_dp.planner.profiles.operator_graph import Model
from mindnlp_dp.runtime.mesh_spec import Size, mesh_name
from mindnlp_dp.runtime.shard_bounds import stage_bounds


def estimate(
    model: Model,
    batch: int,
    mesh: Mapping[str, Size],
    *,
    micro_batch: Optional[int] = None,
    zero_stage: int = 0,
    recompute: bool = False,
    precision: str = "float32",
) -> MemoryUse:
    """Return the bytes of a device of the heaviest stage.

    Args:
        batch: samples of an update, over all devices.
        mesh: sizes by axis, as for ``--mesh``; ``{"dp": 1}`` is one device.
        micro_batch: samples that a device of the first stage processes at a time; by default its samples of an update,
            in a pipeline divided by the number of stages.
        zero_stage: the ZeRO stage, 0 to 3; with the axis "fsdp" it is 3.
        recompute: whether layers keep only their inputs and recompute the other activations.
        precision: "float32", or "mixed", in which layers compute with 2 bytes for a value.

    Raises:
        ValueError: the sizes do not fit together.
    """
    zero_stage = 3 if "fsdp" in mesh else zero_stage
    if zero_stage == 3 and mesh.get("pp", 1) != 1:
        raise ValueError(f"zero_stage=3 with pp is not supported, got {dict(mesh)}")
    stages, firsts = stages_of_mesh(mesh), layers_of(model, len(model.split_points) + 1)
    pp = len(stages)
    for sharing in stages:
        problem = mesh_problem(model, pp, sharing, batch, len(firsts))
        if problem:
            raise ValueError(f"{mesh_name(mesh)}: {problem}")
    samples = batch // stages[0].num_data
    size = micro_batch or math.ceil(samples / pp)
    if size > samples:
        raise ValueError(f"a micro-batch of {size} samples exceeds the {samples} samples of a device")
    bounds, ends = stage_bounds(len(firsts), pp, None), [*firsts, len(model.graph.operators)]
    uses = []
    for number, sharing in enumerate(stages):
        of_stage = math.ceil(size * stages[0].num_data / sharing.num_data)
        in_flight = most_in_flight("1f1b", number, pp, math.ceil(samples / size)) if pp > 1 else 1
        operators = ends[bounds[number]], ends[bounds[number + 1]] - 1
        use = memory_of(
            model, operators, sharing.tp, sharing.dp, zero_stage, of_stage, recompute, ep=sharing.ep,
            sp=sharing.sp, in_flight=in_flight, precision=precision,
        )  # fmt: skip
        uses.append(use)
    return max(uses, key=lambda use: use.total)
