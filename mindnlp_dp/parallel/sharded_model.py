"""Loads, saves, compares and digests a sharded model as a full one; checkpoints and trainers call it.

The weights, digests and files are those of one process. Arrays are exchanged one at a time, so that no rank holds more
than its shards and one full array, except the rank that keeps a full optimizer state to write it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Optional, TypeVar, Union

import numpy as np
from safetensors.numpy import load_file

from mindnlp_dp.checkpoint.manifest import MODEL
from mindnlp_dp.checkpoint.writer import write_adapters
from mindnlp_dp.communication.lazy_arrays import LazyArray, LazyTensor
from mindnlp_dp.communication.replicas import (
    ReplicaMismatchError,
    broadcast_buffers,
    broadcast_parameters,
    digest_of,
    is_unused_copy,
    weight_digest,
)
from mindnlp_dp.data_parallel.model_scope import ModelScope
from mindnlp_dp.data_parallel.multi_group_synchronizer import MultiGroupSynchronizer
from mindnlp_dp.data_parallel.synchronizer import GradientSynchronizer
from mindnlp_dp.data_parallel.weighted_synchronizer import WeightedGradientSynchronizer
from mindnlp_dp.optim.updater_factory import updates_each_element_alone
from mindnlp_dp.parallel.distributed_model import DistributedModel
from mindnlp_dp.parallel.fully_sharded.units import Units
from mindnlp_dp.parallel.pipeline_parallel.runner import Pipeline
from mindnlp_dp.parallel.pipeline_parallel.tied_weights import TiedParameter
from mindnlp_dp.parallel.placement import Placement, Placements
from mindnlp_dp.parallel.row_loss_weights import RowLossWeights
from mindnlp_dp.parallel.tensor_parallel.expert_parallel import ExpertLoad, ExpertParallelBlock
from mindnlp_dp.parallel.weights.safetensors_files import WeightFiles, bytes_of, file_header, host_type
from mindnlp_dp.runtime.adapters import has_adapters
from mindnlp_dp.runtime.arrays import HostTensor, from_host, set_weight, to_host
from mindnlp_dp.runtime.atomic_write import link_or_copy
from mindnlp_dp.runtime.named_weights import named_weights
from mindnlp_dp.runtime.sharded_array import ShardedArray, as_sharded, without_pieces

T = TypeVar("T")

# Returns a full array on rank 0 of the job, or None if it does not have it; called on rank 0 only.
Source = Callable[[Placement], Optional[np.ndarray]]


class ShardedModel(DistributedModel):
    """A sharded model, which :func:`~mindnlp_dp.parallelize` stores in ``model.parallel``.

    Train steps and checkpoints use it; its interface is that of a replicated model.

    Attributes:
        mesh: the device mesh of the model.
        placements: placements of all weights, by name.
        pipeline: this rank's stage; None without the axis "pp".
        units: what gathers the weights; None without the axis "fsdp".
    """

    is_sharded = True

    def __init__(
        self,
        model: Any,
        placements: Placements,
        row_weights: Optional[RowLossWeights] = None,
        units: Optional[Units] = None,
    ) -> None:
        self.mesh = placements.mesh
        self.model = model
        self.group, self.world = self.mesh.dp_group, self.mesh.world
        self.placements = placements
        self.seed_rank = self.mesh.seed_rank
        self.loss_replication = self.mesh.sizes["dp_in_stage"] * self.mesh.sizes["sp"]
        self.pipeline: Optional[Pipeline] = None
        self._row_weights = row_weights
        self.units = units

    # Training.

    def scope(self, parameters: Sequence[Any]) -> ModelScope:
        placed = [self.placements[p.full_name] for p in parameters]
        counts = [self.placements.owns(placement) for placement in placed]
        return ModelScope(self.mesh.model_parallel_group, counts, [placement.is_sharded for placement in placed])

    def make_synchronizer(
        self, named: Sequence[tuple[str, Any]], **options: Any
    ) -> Union[GradientSynchronizer, MultiGroupSynchronizer]:
        if self.pipeline is not None:
            self._check_ties(self.pipeline.ties, [p for _, p in named])
            # A stage runs several backward passes per update, and does not know which one is the last.
            options["overlap"] = False
        if self._row_weights is None:
            return GradientSynchronizer(named, self.mesh.grad_sync_group, **options)
        options["overlap"] = False
        if self.units is not None and options.get("compression"):
            raise ValueError(f"compression={options['compression']!r} is not supported with fsdp > 1; leave it out")
        summed_over = [self.placements[p.full_name].summed_over for _, p in named]
        kinds = self._kinds()
        places = [[i for i, mine in enumerate(summed_over) if mine == axes] for axes in kinds]
        synchronizers = [
            # A unit has weighted the gradients that it sums, a block of experts has not.
            (WeightedGradientSynchronizer if "fsdp" in axes else GradientSynchronizer)(
                [named[place] for place in mine], self.mesh.grad_sync_group_of(axes), **options
            )
            for axes, mine in zip(kinds, places)
        ]
        totals = [functools.partial(_total, self._row_weights, axes) for axes in kinds]
        return MultiGroupSynchronizer(synchronizers, places, totals)

    def _check_ties(self, ties: Sequence[TiedParameter], parameters: Sequence[Any]) -> None:
        """Raise ValueError on all ranks if a tied weight is trained on some of its stages only."""
        trained, error = {id(p) for p in parameters}, None
        for tie in ties:
            if len(set(tie.group.all_gather_object(id(tie.parameter) in trained))) > 1:
                error = ValueError(
                    f"the tied weight {tie.parameter.full_name!r} is trained on some stages and frozen on others (rank "
                    f"{self.world.label()}); freeze or unfreeze it on all, where it may have other names"
                )
        self.world.raise_on_all_ranks(error, "comparing tied weights")

    def _kinds(self) -> list[tuple[str, ...]]:
        """Return over which axes gradients are summed in the backward pass, the same on every rank; first over none."""
        return sorted({(), *(placement.summed_over for placement in self.placements.values())})

    def resync_tied_weights(self) -> None:
        for tie in self.pipeline.ties if self.pipeline is not None else ():
            tie.resync()

    def check_optimizer(self, optimizer: Any, parameters: Sequence[Any]) -> None:
        for group in getattr(optimizer, "param_groups", ()):
            for parameter in group["params"]:
                if getattr(parameter, "parallel", None) is not self:
                    raise ValueError(
                        f"the optimizer updates a parameter of shape {tuple(parameter.shape)} that is not the model's "
                        f"(any more) on rank {self.mesh.world.label()}; make the optimizer after parallelize()"
                    )
        if self.units is not None and not updates_each_element_alone(optimizer):
            raise ValueError(
                f"{type(optimizer).__name__} may need whole weights, and ranks have flat shards of them (fsdp > 1); "
                "use AdamW, Adam or SGD of mindnlp.core.optim, or zero_stage=2"
            )

    def zero_stage(self, asked_for: Union[int, str]) -> Union[int, str]:
        if self.units is None:
            if asked_for != 3:
                return asked_for
            # The ranks that are left of an elastic job may be one row, which shards nothing over fsdp.
            if self.world.world_size > 1 and "fsdp" not in self.mesh.axes:
                raise ValueError(
                    f'zero_stage=3 shards weights over the axis "fsdp", and this mesh has {self.mesh}; name the axis, '
                    'as in dp.init_device_mesh({"fsdp": 2, "tp": 2}), or leave zero_stage out'
                )
            if self.world.is_main and self.world.world_size > 1:
                print(f"zero_stage=3 is 0 here: the axis fsdp has one rank, and the mesh is {self.mesh}", flush=True)
            return 0
        if asked_for not in ("auto", 3):
            raise ValueError(
                f"zero_stage={asked_for}, and this model is fully sharded, which is stage 3; leave zero_stage out, or "
                "do not call fully_shard"
            )
        return 0

    @contextlib.contextmanager
    def micro_step(self, weight: float) -> Iterator[None]:
        if self.units is not None and self.units.is_held:
            raise RuntimeError("weights get no gradients within mindnlp_dp.gathered(model); train outside of it")
        with contextlib.nullcontext() if self._row_weights is None else self._row_weights.micro_step(weight):
            try:
                yield
            finally:
                if self.units is not None:
                    self.units.end_passes()

    def num_micro_steps(self, mine: int) -> int:
        if self._row_weights is None:
            return mine
        return int(self._row_weights.group.all_reduce(np.array([mine], np.int64), op="max", every_step=True)[0])

    def dummy_batch_for(self, batch: Optional[T]) -> Optional[T]:
        # A collective of the row: no rank may skip a pass whose tokens go to the experts of the others, or in which
        # weights are gathered.
        if self._row_weights is None:
            return batch
        group = self._row_weights.group
        has = group.all_gather_object(batch is not None)
        if all(has) or not any(has):
            return batch
        src = has.index(True)
        dummy = group.broadcast_object(batch if group.rank == src else None, src)
        return dummy if batch is None else batch

    def has_nonfinite_peer(self, loss: float) -> bool:
        if self._row_weights is None:
            return False
        worst = self._row_weights.group.all_reduce(np.array([not np.isfinite(loss)], np.float32), every_step=True)
        return bool(worst[0] > 0)

    def loads(self) -> list[ExpertLoad]:
        """Return the expert loads of the last forward pass, one per block."""
        blocks = [module for module in self.model.modules() if isinstance(module, ExpertParallelBlock)]
        return [block.load for block in blocks if hasattr(block, "load")]

    # Weights.

    def _own(self) -> dict[str, Any]:
        """Return this rank's parameters and buffers, by their names in the full model."""
        return {self.placements[name].name: weight for name, weight in named_weights(self.model)}

    def _replicas(self) -> list[tuple[Any, list[tuple[str, Any]]]]:
        """Return pairs of a group and the weights that its ranks have in common: experts and shards fewer."""
        own = list(self._own().items())
        return [
            (
                self.mesh.grad_sync_group_of(axes),
                [(name, w) for name, w in own if self.placements[name].summed_over == axes],
            )
            for axes in self._kinds()
        ]

    def broadcast_weights(self) -> None:
        for group, weights in self._replicas():
            broadcast_parameters(weights, group)

    def broadcast_buffers(self) -> None:
        broadcast_buffers(self.model, self.mesh.grad_sync_group)

    def assert_in_sync(self) -> str:
        problem = self._replica_that_differs() or self._copy_that_differs()
        # Some groups may be in sync and others not: raise the error on all ranks.
        error = ReplicaMismatchError(problem) if problem else None
        self.world.raise_on_all_ranks(error, "comparing weights")
        return self.digest()

    def _replica_that_differs(self) -> str:
        """Return a message about a weight that differs from the first replica's, or an empty string."""
        found = ""
        for group, weights in self._replicas():
            digests = group.all_gather_object([weight_digest(name, weight) for name, weight in weights])
            for (name, _), *theirs in zip(weights, *digests):
                for rank, digest in enumerate(theirs):
                    if digest != theirs[0] and not found:
                        found = (
                            f"replicas are out of sync: {name!r} on rank {group.label(rank)} differs from rank "
                            f"{group.label(0)}. Let every rank apply the same update"
                        )
        # Tell all ranks, because the next collectives are over other groups.
        everyone = self.world.all_gather_object(found)
        return next(filter(None, everyone), "")

    def _copy_that_differs(self) -> str:
        """Return a message if weights that "tp" leaves whole differ over it, or tied ones over stages, or nothing."""
        number = self.mesh.index("fsdp")
        copies = [
            (name, number if self.placements[name].is_fully_sharded else 0, weight_digest(name, weight))
            for name, weight in self._own().items()
            if self.placements[name].shard is None and self.placements[name].expert_rank is None
        ]
        group = self.mesh.model_parallel_group
        first: dict[tuple[str, int], tuple[int, bytes]] = {}
        for rank, theirs in enumerate(group.all_gather_object(copies)):
            for name, number, digest in theirs:
                where, known = first.setdefault((name, number), (rank, digest))
                if digest != known:
                    return (
                        f"copies are out of sync: {name!r} on rank {group.label(rank)} differs from rank "
                        f"{group.label(where)}, though neither is sharded. Was a gradient changed on some of the ranks?"
                    )
        return ""

    # Full arrays, one at a time.

    def full_arrays(self, placements: Optional[Iterable[Placement]] = None) -> Iterator[tuple[Placement, np.ndarray]]:
        """Yield every weight, or those of ``placements``, as a full array. A collective of the model-parallel group."""
        own = self._own()
        for placement in self.placements.values() if placements is None else placements:
            weight = own.get(placement.name)
            mine = to_host(weight) if weight is not None and self.placements.is_here(placement) else None
            yield placement, self.placements.full(placement, mine)

    def digest(self) -> str:
        """Return the digest that one process with the same weights would compute."""
        used = [p for p in self.placements.values() if not (has_adapters(self.model) and is_unused_copy(p.name))]
        return digest_of((p.name, from_host(full, p.dtype)) for p, full in self.full_arrays(used))

    def scatter(self, source: Source, names: Optional[Iterable[str]] = None) -> None:
        """Scatter full arrays from rank 0 of the job to the ranks' shards: all arrays, or those with these names."""
        own = self._own()
        if self.units is not None:
            self.units.end_passes()
        for placement in map(self.placements.__getitem__, self.placements if names is None else names):
            full = self.world.run_on(
                self.world.is_main, functools.partial(source, placement), f"reading {placement.name}"
            )
            if full is None:
                full = np.zeros(placement.shape, host_type(placement.dtype))
            full = self.world.broadcast(full.astype(host_type(placement.dtype), copy=False))
            weight = own.get(placement.name)
            if weight is not None and self.placements.is_here(placement):
                set_weight(weight, from_host(self.placements.part(placement, full).copy(), placement.dtype))

    def read_weights(self, folder: Path) -> None:
        files = self.world.run_on(
            self.world.is_main, lambda: WeightFiles(folder, self.placements, is_complete=True), "reading a checkpoint"
        )
        # Buffers that are missing in the files keep their values.
        missing = set(self.world.broadcast_object([] if files is None else files.missing))
        names = [name for name in self.placements if name not in missing]
        self.scatter(lambda placement: files.get(placement) if files else None, names)

    def model_writer(
        self, workspace: Path, write_full: Callable[[Path], None], beside: Sequence[Any] = ()
    ) -> Callable[[Path], None]:
        """Write the weights to ``workspace``; return a function that puts them into a checkpoint, on one rank."""
        self.write_weights(workspace / MODEL if self.world.is_main else None)

        def write(checkpoint: Path) -> None:
            link_or_copy(workspace / MODEL, checkpoint / MODEL)
            if has_adapters(self.model):
                write_adapters(self.model, load_file(checkpoint / MODEL), checkpoint)
            for part in (None if has_adapters(self.model) else getattr(self.model, "config", None), *beside):
                if hasattr(part, "save_pretrained"):
                    part.save_pretrained(str(checkpoint))

        return write

    def write_weights(self, path: Optional[Path]) -> None:
        """Write the full model as one safetensors file, array by array, on the rank that passes a path.

        Of a model with adapters, only the parameters that are not frozen.
        """
        written = [p for p in self.placements.values() if p.trains or not has_adapters(self.model)]
        error: Optional[Exception] = None
        file: Any = None

        def attempt(step: Callable[[], Any]) -> None:
            # A rank that cannot write continues with the collectives and raises its error at the end.
            nonlocal error
            if path is not None and error is None:
                try:
                    step()
                except Exception as caught:  # noqa: BLE001
                    error = caught

        def begin() -> None:
            nonlocal file
            assert path is not None, "attempted by the rank that has one"
            path.parent.mkdir(parents=True, exist_ok=True)
            file = open(path, "wb")  # noqa: SIM115
            file.write(file_header(written))

        attempt(begin)
        if self.mesh.index("dp") == 0:
            for placement, full in self.full_arrays(written):
                attempt(lambda p=placement, a=full: file.write(bytes_of(a, p.dtype)))  # type: ignore[misc]
        if file is not None:
            attempt(file.close)
        if error is not None and path is not None:
            path.unlink(missing_ok=True)
        self.world.raise_on_all_ranks(error, "writing the model")

    # The optimizer state.

    def full_optimizer_state(self, own: dict[str, Any], *, keep: bool, sharded: bool = False) -> dict[str, Any]:
        names = [[self.placements[name].name for name in names] for names in own["parameters"]]
        options = [{key: x for key, x in group.items() if key != "params"} for group in own["param_groups"]]
        everyone = self.mesh.model_parallel_group.all_gather_object(list(zip(names, options)))
        settings, groups = _joined_groups(everyone, {name: place for place, name in enumerate(self.placements)})
        numbers = [number for group in own["param_groups"] for number in group["params"]]
        mine = dict(zip((name for group in names for name in group), (own["state"].get(n) for n in numbers)))
        if sharded:
            mine = {name: state and self._in_full_arrays(name, state) for name, state in mine.items()}
        # Scalars, such as the step, and the names of the arrays come from the rank that counts the parameter.
        sharded_state = {
            name: {key: self._without_arrays(placement, value) for key, value in state.items()}
            for name, state in mine.items()
            if state and self.placements.owns(placement := self.placements[name])
        }
        outline = {
            name: s
            for theirs in self.mesh.model_parallel_group.all_gather_object(sharded_state)
            for name, s in theirs.items()
        }
        state: dict[int, dict[str, Any]] = {}
        for number, name in enumerate(name for group in groups for name in group):
            placement = self.placements[name]
            for key, value in outline.get(name, {}).items():
                entry = state.setdefault(number, {})
                part = mine.get(name)
                if isinstance(value, ShardedArray):
                    # A tied weight may be sharded differently on its last stage: its first stage writes it.
                    is_first = self.mesh.index("pp") == min(placement.stages) and self.placements.is_here(placement)
                    entry[key] = part[key] if part and is_first else value
                    continue
                if value is not None:
                    entry[key] = HostTensor.back(value)
                    continue
                array = to_host(part[key]) if part else None
                full = self.placements.full(placement, array, "float32")
                if keep:
                    entry[key] = from_host(full, "float32")
        begins = np.cumsum([0, *map(len, groups)]).tolist()
        param_groups = [
            {**group, "params": list(range(begin, end))} for group, begin, end in zip(settings, begins, begins[1:])
        ]
        return {"parameters": groups, "state": state, "param_groups": param_groups}

    def _in_full_arrays(self, name: str, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of a parameter with this rank's arrays as pieces of the full ones."""
        placement = self.placements[name]
        arrays = {
            key: self.placements.sharded(placement, as_sharded(value))
            for key, value in state.items()
            if self._is_elementwise(placement, value)
        }
        return {**state, **arrays}

    def _is_elementwise(self, placement: Placement, value: Any) -> bool:
        """Return whether a state has one value for each element of this rank's part of the parameter."""
        if isinstance(value, ShardedArray):
            return True
        return _is_array(value) and tuple(value.shape) == self.placements.shape_here(placement)

    def _without_arrays(self, placement: Placement, value: Any) -> Any:
        """Return what the other ranks need to know of a state; None if it is an array, which is gathered."""
        if isinstance(value, ShardedArray):
            return without_pieces(value)
        return None if self._is_elementwise(placement, value) else HostTensor.of(value)

    def local_optimizer_state(self, full: Mapping[str, Any], names: Sequence[Sequence[str]]) -> dict[str, Any]:
        own = self._own()
        here = [[name for name in group if name in own] for group in full["parameters"]]
        # A tied weight has another name on the last stage than on the first.
        local_names = {self.placements[name].name: name for group in names for name in group}
        number_of = {name: number for number, name in enumerate(name for group in here for name in group)}
        state: dict[int, dict[str, Any]] = {}
        # fetch() is a collective: all ranks fetch all arrays in the same order, and keep their shards.
        for number, name in enumerate(name for group in full["parameters"] for name in group):
            for key, value in (full["state"].get(number) or full["state"].get(str(number)) or {}).items():
                array = value.fetch() if isinstance(value, (LazyArray, LazyTensor)) else value
                if name not in number_of:
                    continue
                entry = state.setdefault(number_of[name], {})
                if _is_array(array) and tuple(array.shape) == self.placements[name].shape:
                    part = self.placements.part(self.placements[name], to_host(array))
                    entry[key] = from_host(np.ascontiguousarray(part), "float32")
                else:
                    entry[key] = array
        ends = np.cumsum([0, *map(len, here)]).tolist()
        param_groups = [
            {**group, "params": list(range(begin, end))}
            for group, begin, end in zip(full["param_groups"], ends, ends[1:])
        ]
        shown = [[local_names.get(name, name) for name in group] for group in here]
        return {"parameters": shown, "state": state, "param_groups": param_groups}


def _joined_groups(
    everyone: Iterable[Sequence[tuple[Sequence[str], dict[str, Any]]]], place_of: Mapping[str, int]
) -> tuple[list[dict[str, Any]], list[list[str]]]:
    """Return the options and the names of the full model's parameter groups from the groups of every rank.

    Ranks of different stages may have groups that others do not have; those with the same options are one group.
    """
    settings: dict[str, dict[str, Any]] = {}
    group_of: dict[str, str] = {}
    for names, options in itertools.chain.from_iterable(everyone):
        key = repr(sorted(options.items()))
        settings.setdefault(key, options)
        for name in names:
            group_of.setdefault(name, key)
    by_key: dict[str, list[str]] = {key: [] for key in settings}
    for name in sorted(group_of, key=place_of.__getitem__):
        by_key[group_of[name]].append(name)
    return list(settings.values()), list(by_key.values())


def _total(weights: RowLossWeights, axes: tuple[str, ...], own: float) -> float:
    return weights.total(axes) if axes else own


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) or hasattr(value, "asnumpy")
