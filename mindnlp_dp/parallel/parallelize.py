"""Shards a model over the ranks of a device mesh in one call.

The user calls :func:`parallelize` with the same model on every rank, or with a model without weights
(weights/meta_init.py) and a folder of weights. It keeps this rank's part, which the Trainer or a custom loop can train
like any other model::

    mesh = dp.init_device_mesh({"dp": 2, "tp": 2})
    model = dp.parallelize(RobertaForSequenceClassification(config), mesh)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Optional, TypeVar, Union, overload

import numpy as np

from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.communication.replicas import check_same_structure
from mindnlp_dp.parallel.device_mesh import DeviceMesh, get_device_mesh
from mindnlp_dp.parallel.fully_sharded.fully_sharded_edits import check_units, fully_sharded_edits
from mindnlp_dp.parallel.fully_sharded.units import Units
from mindnlp_dp.parallel.mixed_precision import MixedPrecision, check_chip, check_param_dtype, mixed_precision_of
from mindnlp_dp.parallel.model_edits import ModelEdits, ModelIndex
from mindnlp_dp.parallel.parallel_plan import ShardingPlan, check_support, head_of, plan_for, plan_within_adapters
from mindnlp_dp.parallel.pipeline_parallel.runner import Pipeline, check_pipeline
from mindnlp_dp.parallel.pipeline_parallel.stages import StageInput, pipeline_edits
from mindnlp_dp.parallel.pipeline_parallel.tied_weights import TiedParameter
from mindnlp_dp.parallel.placement import Placements, replicate_all, take_shards
from mindnlp_dp.parallel.plan_check import PlanCheck
from mindnlp_dp.parallel.row_loss_weights import RowLossWeights
from mindnlp_dp.parallel.sequence_parallel.sequence_edits import sequence_parallel_edits
from mindnlp_dp.parallel.sequence_parallel.token_shards import SequenceShards
from mindnlp_dp.parallel.sharded_head import sharded_head_edits
from mindnlp_dp.parallel.sharded_model import ShardedModel
from mindnlp_dp.parallel.tensor_parallel.expert_parallel import expert_parallel_edits
from mindnlp_dp.parallel.tensor_parallel.tensor_edits import rank_local_dropouts, tensor_parallel_edits
from mindnlp_dp.parallel.weights.meta_init import fill_missing
from mindnlp_dp.parallel.weights.safetensors_files import WeightFiles
from mindnlp_dp.runtime.adapters import base_model
from mindnlp_dp.runtime.arrays import to_host
from mindnlp_dp.runtime.named_weights import all_names, named_weights
from mindnlp_dp.runtime.recompute import RecomputeLayers, enable_recompute

T = TypeVar("T")


@overload
def parallelize(
    model: T, mesh: Optional[DeviceMesh] = ..., plan: Optional[ShardingPlan] = ..., *, dry_run: Literal[False] = ...,
    weights: Optional[Union[str, Path]] = ..., schedule: str = ..., recompute: RecomputeLayers = ...,
    layers_per_stage: Sequence[int] = ..., check: Optional[Mapping[str, Any]] = ..., units: RecomputeLayers = ...,
    keep_gathered: bool = ..., param_dtype: Optional[str] = ...,
) -> T: ...  # fmt: skip
@overload
def parallelize(
    model: Any, mesh: Optional[DeviceMesh] = ..., plan: Optional[ShardingPlan] = ..., *, dry_run: Literal[True],
    layers_per_stage: Sequence[int] = ..., units: RecomputeLayers = ..., param_dtype: Optional[str] = ...,
) -> ModelEdits: ...  # fmt: skip
def parallelize(
    model: Any,
    mesh: Optional[DeviceMesh] = None,
    plan: Optional[ShardingPlan] = None,
    *,
    weights: Optional[Union[str, Path]] = None,
    schedule: str = "1f1b",
    recompute: RecomputeLayers = False,
    layers_per_stage: Sequence[int] = (),
    check: Optional[Mapping[str, Any]] = None,
    units: RecomputeLayers = True,
    keep_gathered: bool = False,
    param_dtype: Optional[str] = None,
    dry_run: bool = False,
) -> Any:
    """Shard a model over the ranks of a mesh, in place, with the weights of rank 0. A collective.

    Args:
        model: a MindNLP model, the same on every rank. Make its optimizer after this call.
        mesh: the device mesh; by default the mesh of the job.
        plan: how to shard the model; by default the plan for its type
            (:func:`~mindnlp_dp.parallel.parallel_plan.plan_for`).
        weights: a folder with ``model*.safetensors`` files to read the weights from, array by array, so that a rank
            never holds more than its part and one full array. Weights that are missing there, such as the head of a
            new task, keep their values.
        schedule: pipeline schedule: "1f1b", "gpipe" or "eager-1f1b".
        layers_per_stage: number of layers of each pipeline stage; by default they are split evenly.
        recompute: the layers whose activations are recomputed in the backward pass
            (:func:`~mindnlp_dp.enable_recompute`).
        check: a batch with labels, the same on every rank. Its loss and gradients are computed with the whole model on
            every rank, and then with the sharded model; if they differ, this is an error that names the first layer
            that differs. For models that fit on one rank; on a mesh that shards nothing it has no effect. After the
            error the model is sharded: build it again.
        units: what gathers its weights together on a mesh with the axis "fsdp" (:func:`~mindnlp_dp.fully_shard`).
        keep_gathered: whether these weights are kept from the forward to the backward pass.
        param_dtype: "bfloat16", on devices, or "float16": the type in which the model computes, on a mesh of "dp",
            "fsdp" and "sp". Each layer casts its weights; parameters, gradients between ranks and the optimizer's state
            stay in float32.
        dry_run: change nothing, and return the edits that would give this rank its part of the model
            (:class:`~mindnlp_dp.parallel.model_edits.ModelEdits`); ``print`` shows them.

    Returns:
        The model; with ``dry_run`` the edits.

    Raises:
        ValueError: the model cannot be sharded in this way, and the message names the axis and a fix; or a pattern of
            the plan fits no module; or the sharded model computes something else for ``check``.
        CheckpointError: the weights in the folder do not belong to this model.
        ReplicaMismatchError: ranks have built different models.

    Examples:
        On four ranks the mesh would be ``{"dp": 2, "tp": 2}``; this one is that of a single process.

        >>> import mindnlp_dp as dp
        >>> from mindnlp.transformers import GPT2Config, GPT2LMHeadModel
        >>> group = dp.init_process_group()
        >>> mesh = dp.init_device_mesh({"dp": -1, "tp": 1})
        >>> config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2)
        >>> model = dp.parallelize(GPT2LMHeadModel(config), mesh)
        >>> getattr(model, "parallel", None) is None  # one process: nothing is sharded
        True
    """
    mesh = mesh or get_device_mesh()
    if getattr(model, "parallel", None) is not None:
        raise ValueError(f"this {type(model).__name__} is sharded already, as {model.parallel.mesh}")
    check_same_structure(named_weights(model), mesh.world)
    placements = replicate_all(model, mesh)
    stage_input, row_weights = StageInput(), RowLossWeights(mesh)
    gathering = _units(model, mesh, row_weights, keep_gathered=keep_gathered, param_dtype=param_dtype)

    def planned() -> ModelEdits:
        check_pipeline(schedule)
        axes = functools.partial(
            _edits_of_axes, model, plan, placements, stage_input, row_weights, layers_per_stage=layers_per_stage
        )
        if gathering is None:
            return axes()
        _check_options_of_units(mesh, check=check, plan=plan)
        return _edits_with_units(model, placements, gathering, units, axes)

    # If stages differ, sharding may fail on some of them only: raise the error on all ranks.
    edits = mesh.world.run_on(True, planned, "sharding the model")
    assert edits is not None, "every rank plans"
    if mesh.sizes["pp"] > 1:
        _check_stages_train(edits.placements_after())
    if dry_run:
        return edits
    if check is not None and weights is not None:
        raise ValueError("check runs the full model, with its own weights; leave weights out, or check a small config")
    if len(set(mesh.world.all_gather_object(check is None))) > 1:
        raise ValueError("check= needs the same batch on every rank, and some ranks have none")
    checking = None if check is None or mesh.is_data_parallel else PlanCheck(model, mesh, check)
    files = _open(weights, placements, mesh.world)
    fill_missing(model, placements, [] if files is None else files[1], has_files=files is not None)
    originals = {placements[name].name: weight for name, weight in all_names(model).items()}
    mesh.world.run_on(True, functools.partial(_apply, edits, model, gathering), "sharding the model")
    is_row = row_weights.group.world_size > 1
    is_fully_sharded = mesh.sizes["fsdp"] > 1
    parallel = ShardedModel(model, placements, row_weights if is_row else None, gathering if is_fully_sharded else None)
    if mesh.sizes["pp"] > 1:
        parallel.pipeline = Pipeline(model, mesh, stage_input, schedule)

    def source(placement: Any) -> np.ndarray:
        """Return a full array on rank 0, from the files or the original model, and drop the original."""
        original = originals.pop(placement.name)
        read = None if files is None or files[0] is None else files[0].get(placement)
        return to_host(original) if read is None else read

    take_shards(model, placements)
    parallel.scatter(source)
    if parallel.pipeline is not None:
        _tie_stages(model, parallel.pipeline, placements)
    if not mesh.is_data_parallel:
        model.parallel = parallel
        for name, parameter in model.named_parameters():
            parameter.full_name, parameter.full_shape = name, placements[name].shape
            parameter.parallel = parallel
    if checking is not None:
        result = checking.compare(model, parallel)
        if mesh.world.is_main:
            print(result, flush=True)
    if recompute is not False:
        enable_recompute(model, recompute)
    return model


def _units(
    model: Any, mesh: DeviceMesh, weights: RowLossWeights, *, keep_gathered: bool, param_dtype: Optional[str]
) -> Optional[Units]:
    """Return what gathers weights, or only casts them; None if no layer needs it. A collective."""
    known = mixed_precision_of(model)
    if param_dtype is not None and known is not None:
        raise ValueError(f"this {type(model).__name__} computes in {known.dtype} already; leave param_dtype out")
    check_param_dtype(param_dtype)
    if param_dtype is not None:
        check_chip(param_dtype, mesh.world)
    if mesh.sizes["fsdp"] == 1 and param_dtype is None:
        return None
    precision = None if param_dtype is None else MixedPrecision(param_dtype, model)
    return Units(mesh.group("fsdp"), weights, keeps_gathered=keep_gathered, precision=precision)


def _check_options_of_units(mesh: DeviceMesh, *, check: Any, plan: Any) -> None:
    if check is not None:
        raise ValueError("check is not supported with fsdp and param_dtype; leave it out")
    if plan is not None and not _has_planned_axes(mesh):
        raise ValueError("fsdp and param_dtype are for the layers of any model: leave plan out")


def _has_planned_axes(mesh: DeviceMesh) -> bool:
    return any(mesh.sizes[axis] > 1 for axis in ("ep", "sp", "tp"))


def _edits_with_units(
    model: Any, placements: Placements, gathering: Units, units: RecomputeLayers, axes: Callable[[], ModelEdits]
) -> ModelEdits:
    """Return the edits of other axes and then of units, which gather before anything of their layer runs."""
    check_units(model, placements, is_cast=gathering.precision is not None)
    edits = axes() if _has_planned_axes(placements.mesh) else ModelEdits(ModelIndex(model), placements)
    edits += fully_sharded_edits(ModelIndex(model), edits.placements_after(), gathering, units)
    return edits


def _edits_of_axes(
    model: Any,
    plan: Optional[ShardingPlan],
    placements: Placements,
    stage_input: StageInput,
    row_weights: RowLossWeights,
    *,
    layers_per_stage: Sequence[int],
) -> ModelEdits:
    """Return the edits that give this rank its part; raise ValueError if the model cannot be sharded in this way."""
    mesh, index = placements.mesh, ModelIndex(model)
    edits = ModelEdits(index, placements)
    if layers_per_stage and mesh.sizes["pp"] == 1:
        raise ValueError(f"layers_per_stage is for a pipeline, and the mesh is {mesh}; leave it out")
    if mesh.is_data_parallel:
        return edits
    checked = _checked_plan(model, plan, mesh)
    if mesh.sizes["tp"] > 1 and checked.tensor is not None:
        edits += tensor_parallel_edits(index, checked.tensor, placements)
    if mesh.sizes["ep"] > 1 and checked.experts is not None:
        edits += expert_parallel_edits(index, checked.experts, placements, row_weights)
    shards = SequenceShards(mesh.group("sp")) if mesh.sizes["sp"] > 1 else None
    if checked.tensor is not None and max(mesh.sizes["tp"], mesh.sizes["sp"]) > 1:
        edits += sharded_head_edits(index, checked.tensor, mesh, shards)
        edits += rank_local_dropouts(index, checked.tensor, mesh)
    if shards is not None:
        edits += sequence_parallel_edits(index, checked, placements, shards)
    if mesh.sizes["pp"] > 1 and checked.pipeline is not None:
        edits += pipeline_edits(index, checked.pipeline, placements, stage_input, layers_per_stage or None)
    return edits


def _apply(edits: ModelEdits, model: Any, gathering: Optional[Units]) -> None:
    edits.apply()
    if gathering is not None:
        gathering.bind(model)


def _open(
    weights: Optional[Union[str, Path]], placements: Placements, world: ProcessGroup
) -> Optional[tuple[Optional[WeightFiles], list[str]]]:
    """Return the weight files (on rank 0 only) and the names of missing weights (on every rank)."""
    if weights is None:
        return None
    folder = Path(weights)
    files = world.run_on(world.is_main, lambda: WeightFiles(folder, placements, is_complete=False), "opening weights")
    return files, world.broadcast_object([] if files is None else files.missing)


def _checked_plan(model: Any, plan: Optional[ShardingPlan], mesh: DeviceMesh) -> ShardingPlan:
    """Return the plan for a model; raise ValueError if it does not say how to shard it over an axis of the mesh."""
    inner = base_model(model)[1]
    plan = plan_within_adapters(plan, model) if plan else plan_for(model)
    given, expected = plan.tensor and plan.tensor.head, head_of(inner)
    if given and expected and given != expected:
        raise ValueError(
            f"head is {given!r} in the plan, and the labels of {type(inner).__name__} are those of head={expected!r}"
        )
    check_support(inner, [axis for axis, size in mesh.sizes.items() if size > 1])
    kinds = {
        "tp": (plan.tensor, "tensors"), "ep": (plan.experts, "experts"), "pp": (plan.pipeline, "a pipeline"),
        "sp": (plan.tensor and plan.pipeline, "the tokens of a row, by its parts for tensors and a pipeline"),
    }  # fmt: skip
    for axis, (part, what) in kinds.items():
        if mesh.sizes[axis] > 1 and part is None:
            raise ValueError(
                f"{axis}={mesh.sizes[axis]}, and the plan for {type(model).__name__} does not say how to shard {what}"
            )
    if mesh.sizes["pp"] > 1 and mesh.sizes["sp"] > 1:
        raise ValueError(f"pp and sp together are not supported yet, got {mesh}; leave pp or sp out")
    if mesh.sizes["pp"] > 1 and mesh.sizes["ep"] > 1:
        raise ValueError(f"pp and ep together are not supported yet, got {mesh}; leave pp or ep out")
    if mesh.sizes["pp"] > 1 and getattr(getattr(model, "config", None), "output_router_logits", False):
        raise ValueError("the router loss of all layers is not supported with pp; set output_router_logits=False")
    return plan


def _check_stages_train(placements: Placements) -> None:
    mesh, trains = placements.mesh, any(p.trains and placements.is_here(p) for p in placements.values())
    for rank, others in enumerate(mesh.world.all_gather_object(trains)):
        if not others:
            raise ValueError(
                f"the stage of rank {mesh.world.label(rank)} has no trainable weights, because all of them are "
                "frozen; freeze fewer weights, or use tp or dp in place of pp"
            )


def _tie_stages(model: Any, pipeline: Pipeline, placements: Placements) -> None:
    """Make the stages that share a tied weight sum its gradients."""
    mesh = placements.mesh
    # A group has the ranks with the same rank_in_stage if the stages are equal, otherwise all ranks of these stages.
    among = mesh.model_parallel_group if mesh.stages_differ else mesh.group("pp")
    stage = mesh.index("pp")
    # Also of a frozen weight, which may be unfrozen later.
    shared = sorted({p.stages for p in placements.values() if len(p.stages) > 1})
    groups = {}
    for stages in shared:
        theirs = [rank for s in stages for rank in mesh.row(s)] if mesh.stages_differ else list(stages)
        mine = theirs if stage in stages else [among.rank]
        is_all = len(theirs) == among.world_size
        groups[stages] = among if is_all else among.split(mine, [among.label(rank) for rank in mine])
    for name, parameter in model.named_parameters():
        stages = placements[name].stages
        if stages in groups and stage in stages:
            placement = placements[name] if mesh.stages_differ else None
            pipeline.ties.append(TiedParameter(parameter, groups[stages], placements, placement))
