"""Finds the fastest parallelism for a model on a cluster: prices all candidates by formula and simulates the best few.

``mindnlp-dp plan`` calls :func:`plan`; the benchmarks also call :func:`predict`. The two levels are those of Zheng et
al., *Alpa* (OSDI 2022): the integer program chooses how each operator is sharded within a stage
(cost_model/memory_cost.py, ``strategies_of``), and the dynamic program chooses the layers of each
stage (:mod:`~mindnlp_dp.planner.stage_partition`). Unlike Alpa, the formula also prices messages between stages, the
number of micro-batches and the optimizer. A simulator that does not use the formula then ranks the best candidates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Optional

from mindnlp_dp.pipeline_schedules.schedules import SCHEDULES
from mindnlp_dp.planner.candidates import Candidate, Candidates, device_problem, divisors, mesh_problem
from mindnlp_dp.planner.cost_model.stage_costs import layers_of, mesh_of, stages_of_mesh
from mindnlp_dp.planner.integer_program import InfeasibleError
from mindnlp_dp.planner.plan import Plan, Plans
from mindnlp_dp.planner.profiles.cluster_profile import Cluster
from mindnlp_dp.planner.profiles.operator_graph import Model
from mindnlp_dp.planner.simulate_step import simulate_step
from mindnlp_dp.runtime.mesh_spec import Size, mesh_name
from mindnlp_dp.runtime.shard_bounds import stage_bounds

# Simulate this many meshes, and more as long as candidates are not much slower. Group a model into at most
# _COARSE_LAYERS layers where stages may have different meshes, and into at most _MOST_LAYERS otherwise.
_PLAYED = 24
_COARSE_LAYERS = 24
_MOST_LAYERS = 128


def plan(
    model: Model,
    cluster: Cluster,
    batch: int,
    *,
    zero_stage: Optional[int] = None,
    schedules: Sequence[str] = SCHEDULES,
    mixed_stages: bool = True,
    fill: float = 0.9,
) -> Plans:
    """Find plans for ``batch`` samples per update on all devices of a cluster, and return the best one of each mesh.

    Args:
        zero_stage: the ZeRO stage; by default 1 wherever several devices have the same parameters, else 0. Stage 3 is
            for meshes without "pp"; plans name its ranks "fsdp".
        schedules: the pipeline schedules to consider.
        mixed_stages: whether stages may have different meshes.
        fill: the fraction of a device's memory that a plan may use; the rest is for the framework.

    Raises:
        InfeasibleError: No candidate fits into memory; the message names the closest one.
        ValueError: ``batch``, ``zero_stage`` or ``fill`` is out of range.
    """
    if not 0 < fill <= 1:
        raise ValueError(f"fill must be a share of the memory above 0 and at most 1, got {fill}")
    search = Candidates(model, cluster, batch, zero_stage, schedules, fill)
    candidates = sorted(search.uniform(layers_of(model, _MOST_LAYERS)), key=lambda c: c.seconds)
    if mixed_stages and cluster.num_devices > 1 and zero_stage != 3:
        coarse = layers_of(model, min(_COARSE_LAYERS, model.most_stages or _COARSE_LAYERS))
        candidates += search.mixed(coarse, _totals(candidates, batch))
        candidates.sort(key=lambda c: c.seconds)
    played: dict[str, Plan] = {}
    for candidate in candidates:
        if len(played) >= _PLAYED and candidate.seconds > 1.5 * min(p.seconds for p in played.values()):
            break
        # Keep the best combination of micro-batch and schedule for each mesh.
        name = mesh_name(mesh_of([sharing for *_, sharing in candidate.slices]))
        found = simulate_step(search, candidate, played[name].seconds if name in played else math.inf)
        if found is not None:
            played[name] = found
    if not played:
        closest = min(search.rejected, key=lambda r: r.needs or float("inf"))
        raise InfeasibleError(
            f"none of {len(search.rejected)} configurations of {model.name} fits on {cluster.num_devices} devices; "
            f"closest is {closest.what}: {closest.why}"
        )
    plans = sorted(played.values(), key=lambda p: p.seconds)
    return Plans(plans, search.rejected, model=model, cluster=cluster, batch=batch, num_priced=len(candidates))


def predict(
    model: Model,
    cluster: Cluster,
    batch: int,
    mesh: Mapping[str, Size],
    micro_batch: int,
    *,
    schedule: str = "1f1b",
    recompute: bool = False,
    zero_stage: int = 0,
    blocks: Optional[Sequence[int]] = None,
) -> Plan:
    """Predict the time and memory of one way to train, whether it fits into memory or not.

    Args:
        mesh: sizes by axis, as for ``--mesh``, which use all devices of the cluster; a size is a tuple with a value per
            stage where stages differ.
        micro_batch: samples that a row of the mesh processes at a time; a row is a data-parallel rank if stages agree.
        blocks: number of transformer layers of each stage; by default as even as ``--mesh`` alone splits them.

    Raises:
        ValueError: The sizes do not fit together.
    """
    zero_stage = 3 if "fsdp" in mesh else zero_stage
    stages = stages_of_mesh(mesh)
    if zero_stage == 3 and len(stages) > 1:
        raise ValueError(f"zero_stage=3 with pp is not supported, got {dict(mesh)}")
    pp, rows = len(stages), math.gcd(*(sharing.num_data for sharing in stages))
    total = micro_batch * rows
    if micro_batch < 1:
        raise ValueError(f"micro_batch must be at least 1, got {micro_batch}")
    if sum(sharing.num_devices for sharing in stages) != cluster.num_devices:
        raise ValueError(f"{dict(mesh)} does not have the {cluster.num_devices} devices of {cluster.name}")
    if batch % total:
        raise ValueError(f"{rows} rows with {micro_batch} samples each do not divide {batch} samples")
    search = Candidates(model, cluster, batch, zero_stage, [schedule], float("inf"))
    firsts = layers_of(model, len(model.split_points) + 1)
    for sharing in stages:
        problem = mesh_problem(model, pp, sharing, batch, len(firsts)) or device_problem(cluster.device, sharing)
        if not problem and total % sharing.num_data:
            problem = f"{total} samples of a micro-batch cannot be split evenly among {sharing.num_data} devices"
        if problem:
            raise ValueError(f"{mesh_name(mesh_of(stages))}: {problem}")
    bounds = stage_bounds(len(firsts), pp, blocks)
    slices = [(a, b - 1, sharing) for a, b, sharing in zip(bounds, bounds[1:], stages)]
    of_each = [total // sharing.num_data for sharing in stages]
    name = schedule if pp > 1 else ""
    found = simulate_step(search, Candidate(0.0, slices, firsts, of_each, batch // total, name, recompute, zero_stage))
    assert found is not None, "memory does not matter"
    return found


def _totals(candidates: Sequence[Candidate], batch: int) -> list[int]:
    """Return the samples of a micro-batch over all devices of a stage, for the three best pipelines by formula.

    Without any pipeline, return the three largest sizes that give four or more micro-batches per update.
    """
    best: dict[int, float] = {}
    for candidate in candidates:
        if len(candidate.slices) > 1:
            best.setdefault(candidate.micro_batches[0] * candidate.slices[0][2].num_data, candidate.seconds)
    if not best:
        return [total for total in divisors(batch) if batch // total >= 4][-3:]
    return sorted(best, key=lambda total: best[total])[:3]
