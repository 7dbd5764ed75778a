"""Shards a model over the ranks of a device mesh in one call.

The user calls :func:`parallelize` with the same model on every rank, or with a model without weights (empty.py) and a
folder of weights. It keeps this rank's part, which the Trainer or a custom loop can train like any other model::

    mesh = dp.init_device_mesh({"dp": 2, "tp": 2})
    model = dp.parallelize(RobertaForSequenceClassification(config), mesh)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Optional, TypeVar, Union

import numpy as np

from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.communication.replicas import check_same_structure
from mindnlp_dp.data_parallel.model_scope import ModelScope
from mindnlp_dp.data_parallel.multi_group import MultiGroupExchange
from mindnlp_dp.data_parallel.synchronizer import GradientSynchronizer
from mindnlp_dp.parallel.device_mesh import DeviceMesh, get_device_mesh
from mindnlp_dp.parallel.parallel_model import PartedModel
from mindnlp_dp.parallel.parallel_plan import ShardingPlan, plan_for
from mindnlp_dp.parallel.pipeline_parallel.runner import Pipeline
from mindnlp_dp.parallel.pipeline_parallel.stages import StageInput, partition_stages
from mindnlp_dp.parallel.pipeline_parallel.tied_weights import TiedParameter
from mindnlp_dp.parallel.tensor_parallel.apply import apply_tensor_parallel
from mindnlp_dp.parallel.tensor_parallel.expert_parallel import ExpertBatchWeights, ExpertLoad, apply_expert_parallel
from mindnlp_dp.parallel.weights.meta_init import fill_missing
from mindnlp_dp.parallel.weights.safetensors_files import WeightFiles
from mindnlp_dp.runtime.arrays import to_host
from mindnlp_dp.runtime.named_weights import all_names, named_weights

from .placement import Placements, replicate_all, take_shards

T = TypeVar("T")


class ParallelModel(PartedModel):
    """The sharding of a model, which :func:`parallelize` stores in ``model.parallel``; train steps use it.

    Attributes:
        mesh: the device mesh of the model.
        placements: placements of all weights, by name.
        pipeline: this rank's stage; None without the axis "pp".
        expert_blocks: the blocks whose experts are distributed over ranks.
    """

    def __init__(self, model: Any, placements: Placements) -> None:
        super().__init__(model, placements)
        self.pipeline: Optional[Pipeline] = None
        self.expert_blocks: list[Any] = []
        self._row_weights: Optional[ExpertBatchWeights] = None

    # Training.

    def scope(self, parameters: Sequence[Any]) -> ModelScope:
        """Return the scope that tells which of these parameters this rank adds to a norm over the full model."""
        placed = [self.placements[p.name_in_whole] for p in parameters]
        counts = [self.placements.owns(placement) for placement in placed]
        return ModelScope(self.mesh.model_parallel_group, counts, [placement.cut is not None for placement in placed])

    def window(
        self, named: Sequence[tuple[str, Any]], **exchange: Any
    ) -> Union[GradientSynchronizer, MultiGroupExchange]:
        """Return the gradient exchange for these parameters, each over the ranks that have it."""
        if self.pipeline is not None:
            # A stage runs several backward passes per update, and does not know which one is the last.
            exchange["overlap"] = False
        if self._row_weights is None:
            return GradientSynchronizer(named, self.mesh.grad_sync_group, **exchange)
        exchange["overlap"] = False
        weights = self._row_weights
        is_expert = [self.placements[p.name_in_whole].expert_rank is not None for _, p in named]
        places = [[i for i, expert in enumerate(is_expert) if expert == wanted] for wanted in (False, True)]
        windows = [
            GradientSynchronizer([named[place] for place in mine], group, **exchange)
            for mine, group in zip(places, (self.mesh.grad_sync_group, self.mesh.expert_dp_group))
        ]
        return MultiGroupExchange(windows, places, [lambda weight: weight, lambda weight: weights.total])

    def resync_tied_weights(self) -> None:
        """Make tied weights bitwise equal on all stages; called after every update. A collective."""
        for tie in self.pipeline.ties if self.pipeline is not None else ():
            tie.resync()

    def check_optimizer(self, optimizer: Any) -> None:
        """Raise ValueError if the optimizer updates parameters that are not (or no longer) in this model."""
        for group in getattr(optimizer, "param_groups", ()):
            for parameter in group["params"]:
                if getattr(parameter, "parallel", None) is not self:
                    raise ValueError(
                        f"the optimizer updates a parameter of shape {tuple(parameter.shape)} that is not the model's "
                        f"(any more) on rank {self.mesh.world.label()}; make the optimizer behind parallelize()"
                    )

    @property
    def has_experts(self) -> bool:
        """Whether this rank's forward passes use experts on other ranks, so that no rank may skip a pass."""
        return self._row_weights is not None

    @contextlib.contextmanager
    def micro_step(self, weight: float) -> Iterator[None]:
        """Run the forward and backward pass of a micro-step in this block. A collective if the model has experts."""
        with contextlib.nullcontext() if self._row_weights is None else self._row_weights.micro_step(weight):
            yield

    def dummy_batch_for(self, batch: Optional[T]) -> Optional[T]:
        """Return the batch to run: this rank's, or a dummy batch of weight 0 if only other ranks of the row have one.

        Returns None if no rank of the row has a batch. A collective of the row.
        """
        group = self.mesh.group("ep")
        has = group.all_gather_object(batch is not None)
        if all(has) or not any(has):
            return batch
        src = has.index(True)
        lent = group.broadcast_object(batch if group.rank == src else None, src)
        return lent if batch is None else batch

    def has_nonfinite_peer(self, loss: float) -> bool:
        """Return whether a loss of the row is not finite, and so the gradients of experts are not. A collective."""
        if self._row_weights is None:
            return False
        worst = self.mesh.group("ep").all_reduce(np.array([not np.isfinite(loss)], np.float32), every_step=True)
        return bool(worst[0] > 0)

    def loads(self) -> list[ExpertLoad]:
        """Return the expert loads of the last forward pass, one per block."""
        return [block.load for block in self.expert_blocks if hasattr(block, "load")]


def parallelize(
    model: T,
    mesh: Optional[DeviceMesh] = None,
    plan: Optional[ShardingPlan] = None,
    *,
    weights: Optional[Union[str, Path]] = None,
    schedule: str = "1f1b",
    recompute: bool = False,
    layers_per_stage: Sequence[int] = (),
) -> T:
    """Shard a model over the ranks of a mesh, in place, with the weights of rank 0. A collective.

    Args:
        model: a MindNLP model, the same on every rank. Make its optimizer after this call.
        mesh: the device mesh; by default the mesh of the job.
        plan: how to shard the model; by default the plan for its type (:func:`~mindnlp_dp.parallel.parallel_plan.plan_for`).
        weights: a folder with ``model*.safetensors`` files to read the weights from, array by array, so that a rank
            never holds more than its part and one full array. Weights that are missing there, such as the head of a
            new task, keep their values.
        schedule: pipeline schedule: "1f1b", "gpipe" or "eager-1f1b".
        layers_per_stage: number of layers of each pipeline stage; by default they are split evenly.
        recompute: in a pipeline, keep only the received activations and recompute the others in the backward pass.

    Raises:
        ValueError: the model cannot be sharded in this way; the message names the axis and a fix.
        CheckpointError: the weights in the folder do not belong to this model.
        ReplicaMismatchError: ranks have built different models.
    """
    mesh = mesh or get_device_mesh()
    if getattr(model, "parallel", None) is not None:
        raise ValueError(f"this {type(model).__name__} is cut already, as {model.parallel.mesh}")  # type: ignore[attr-defined]
    check_same_structure(named_weights(model), mesh.world)
    placements = replicate_all(model, mesh)
    files = _open(weights, placements, mesh.world)
    fill_missing(model, placements, [] if files is None else files[1], has_files=files is not None)
    originals = {placements[name].name: weight for name, weight in all_names(model).items()}
    parts = ParallelModel(model, placements)
    if not mesh.is_data_parallel:
        plan = plan or plan_for(model)
        # If stages differ, sharding may fail on some of them only: raise the error on all ranks.
        inbox = mesh.world.run_on(True, lambda: _cut(model, plan, parts, layers_per_stage), "cutting the model")
        if inbox is not None:
            parts.pipeline = Pipeline(model, mesh, inbox, schedule, recompute=recompute)
    elif layers_per_stage:
        raise ValueError(f"layers_per_stage is for a pipeline, and the mesh is {mesh}; leave it out")

    def source(placement: Any) -> np.ndarray:
        """Return a full array on rank 0, from the files or the original model, and drop the original."""
        original = originals.pop(placement.name)
        read = None if files is None or files[0] is None else files[0].get(placement)
        return to_host(original) if read is None else read

    take_shards(model, placements)
    parts.scatter(source)
    if parts.pipeline is not None:
        _tie_stages(model, parts.pipeline, placements)
        _check_stages_train(model, parts)
    if not mesh.is_data_parallel:
        model.parallel = parts  # type: ignore[attr-defined]
        for name, parameter in model.named_parameters():  # type: ignore[attr-defined]
            parameter.name_in_whole, parameter.parallel = name, parts
    return model


def _open(
    weights: Optional[Union[str, Path]], placements: Placements, world: ProcessGroup
) -> Optional[tuple[Optional[WeightFiles], list[str]]]:
    """Return the weight files (on rank 0 only) and the names of missing weights (on every rank)."""
    if weights is None:
        return None
    folder = Path(weights)
    files = world.run_on(world.is_main, lambda: WeightFiles(folder, placements, is_complete=False), "opening weights")
    return files, world.broadcast_object([] if files is None else files.missing)


def _cut(model: Any, plan: ShardingPlan, parts: ParallelModel, layers_per_stage: Sequence[int]) -> Optional[StageInput]:
    """Reduce the model to this rank's part; return the inbox for received activations if there is a pipeline."""
    mesh, placements = parts.mesh, parts.placements
    kinds = {"tp": (plan.tensor, "tensors"), "ep": (plan.experts, "experts"), "pp": (plan.pipeline, "a pipeline")}
    for axis, (part, what) in kinds.items():
        if mesh.sizes[axis] > 1 and part is None:
            raise ValueError(
                f"{axis}={mesh.sizes[axis]}, and the plan for {type(model).__name__} does not say how to cut {what}"
            )
    if mesh.sizes["pp"] > 1 and mesh.sizes["ep"] > 1:
        raise ValueError(f"stages and experts do not go together yet, got {mesh}; leave pp or ep out")
    if mesh.sizes["pp"] > 1 and getattr(getattr(model, "config", None), "output_router_logits", False):
        raise ValueError("a loss of the routers of all layers cannot be had in stages; set output_router_logits=False")
    if mesh.sizes["tp"] > 1 and plan.tensor is not None:
        apply_tensor_parallel(model, plan.tensor, placements)
    if mesh.sizes["ep"] > 1 and plan.experts is not None:
        parts.expert_blocks, parts._row_weights = apply_expert_parallel(model, plan.experts, placements)
    if mesh.sizes["pp"] > 1 and plan.pipeline is not None:
        return partition_stages(model, plan.pipeline, placements, layers_per_stage)
    if layers_per_stage:
        raise ValueError(f"layers_per_stage is for a pipeline, and the mesh is {mesh}; leave it out")
    return None


def _check_stages_train(model: Any, parts: ParallelModel) -> None:
    trains = any(parameter.requires_grad for parameter in model.parameters())
    for rank, others in enumerate(parts.mesh.world.all_gather_object(trains)):
        if not others:
            raise ValueError(
                f"the stage of rank {parts.mesh.world.label(rank)} has nothing to train: all of its weights are "
                "frozen; freeze fewer, or share out the work by tp or dp"
            )


def _tie_stages(model: Any, pipeline: Pipeline, placements: Placements) -> None:
    """Make the stages that share a tied weight sum its gradients."""
    mesh = placements.mesh
    # A group has the ranks with the same cell if the stages are equal, otherwise all ranks of these stages.
    among = mesh.model_parallel_group if mesh.stages_differ else mesh.group("pp")
    stage = mesh.index("pp")
    shared = sorted({p.stages for p in placements.values() if len(p.stages) > 1 and p.trains})
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
