"""Records where each weight of a model is: which ranks hold it, and whether as a shard or in full.

Every rank knows the placements of all parameters and buffers, by their names in the full model. From them follows which
part of an array a rank has, which rank counts it in a norm, and how shards are gathered. Tied weights (several names of
one parameter) have one placement. The code that shards models, and checkpoints of sharded models, use it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Optional

import numpy as np

from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.parallel.device_mesh import DeviceMesh
from mindnlp_dp.runtime.adapters import base_model
from mindnlp_dp.runtime.arrays import dtype_name, from_host
from mindnlp_dp.runtime.named_weights import all_names
from mindnlp_dp.runtime.sharded_array import FlatLayout, FlatShard, Shard, ShardedArray


@dataclass(frozen=True)
class Placement:
    """The placement of one parameter or buffer.

    Attributes:
        name: name in the full model.
        shape: shape of the full array.
        dtype: type of the full array.
        shard: how it is sharded over "tp"; None if every rank of the axis has the full array.
        is_fully_sharded: whether each rank of the axis "fsdp" has a flat shard of what "tp" leaves.
        stages: pipeline stages that hold it; two for a tied weight at both ends.
        expert_rank: coordinate on the axis "ep" of the ranks that hold it; None if all do.
        trains: whether it is a trainable parameter, not a buffer or a frozen parameter.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    shard: Optional[Shard] = None
    is_fully_sharded: bool = False
    stages: tuple[int, ...] = (0,)
    expert_rank: Optional[int] = None
    trains: bool = True

    @property
    def is_sharded(self) -> bool:
        return self.shard is not None or self.is_fully_sharded

    @property
    def summed_over(self) -> tuple[str, ...]:
        """The axes over which the backward pass sums its gradient; their ranks have other samples."""
        return ("ep",) * (self.expert_rank is not None) + ("fsdp",) * self.is_fully_sharded


class Placements(Mapping[str, Placement]):
    """Placements of all parameters and buffers, in the order of the full model; any of their names is a key.

    Attributes:
        mesh: the device mesh.
        prefix: prefix of the names of the base model's weights.
    """

    def __init__(
        self, mesh: DeviceMesh, placements: Sequence[Placement], aliases: Mapping[str, str], prefix: str = ""
    ) -> None:
        self.mesh = mesh
        self.prefix = prefix
        self._by_name = {placement.name: placement for placement in placements}
        self._aliases = dict(aliases)

    def __getitem__(self, name: str) -> Placement:
        own = self._aliases.get(name, name)
        if own not in self._by_name:
            raise KeyError(f"{name!r} was not in the model when parallelize() sharded it; change models before that")
        return self._by_name[own]

    def __iter__(self) -> Any:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def names_of(self, name: str) -> list[str]:
        """Return all names of the parameter that has this name, beginning with this name."""
        own = self[name].name
        return [name, *(alias for alias, known in self._aliases.items() if known == own and alias != name)]

    def copy(self) -> Placements:
        return Placements(self.mesh, list(self._by_name.values()), self._aliases, self.prefix)

    def change(self, names: Sequence[str], **changes: Any) -> None:
        for name in {self[name].name for name in names}:
            self._by_name[name] = replace(self._by_name[name], **changes)

    # The parts of this rank.

    def is_here(self, placement: Placement) -> bool:
        mesh = self.mesh
        return mesh.index("pp") in placement.stages and placement.expert_rank in (None, mesh.index("ep"))

    def part(self, placement: Placement, full: np.ndarray) -> np.ndarray:
        """Return this rank's shard of a full array, or the array itself if it is not sharded."""
        if placement.shard is not None:
            full = placement.shard.part(full, *self._number_on("tp"))
        return FlatShard().part(full, *self._number_on("fsdp")) if placement.is_fully_sharded else full

    def shape_here(self, placement: Placement) -> tuple[int, ...]:
        shape = self.shape_gathered(placement)
        return FlatShard().shape(shape, *self._number_on("fsdp")) if placement.is_fully_sharded else shape

    def shape_gathered(self, placement: Placement) -> tuple[int, ...]:
        """Return the shape that the weight has on this rank while its layer computes."""
        shape = placement.shape
        return shape if placement.shard is None else placement.shard.shape(shape, *self._number_on("tp"))

    def _number_on(self, axis: str) -> tuple[int, int]:
        """Return this rank's number on an axis, and the number of its ranks."""
        return self.mesh.index(axis), self.mesh.sizes[axis]

    def sharded(self, placement: Placement, mine: ShardedArray) -> ShardedArray:
        """Return the full array of which ``mine`` is this rank's shard, or has this rank's pieces of the shard."""
        shard, shape, (index, size) = placement.shard, placement.shape, self._number_on("tp")
        layout = FlatLayout(shape) if shard is None else FlatLayout(shape, shard, size)
        begin = layout.offset_of(index)
        if placement.is_fully_sharded:
            begin += FlatShard().range(layout.shape_of(index), *self._number_on("fsdp")).start
        return mine.within(layout, begin)

    def owns(self, placement: Placement) -> bool:
        """Return whether this rank, of the model-parallel ranks with the same data, adds it to a sum over the model."""
        here = self.mesh.coordinates
        return (
            here["pp"] == min(placement.stages)
            and here["dp_in_stage"] == here["sp"] == 0
            and (placement.shard is not None or here["tp"] == 0)
            and (placement.is_fully_sharded or here["fsdp"] == 0)
            and (placement.expert_rank is not None or here["ep"] == 0)
        )

    def full(
        self,
        placement: Placement,
        mine: Optional[np.ndarray],
        dtype: str = "",
        *,
        group: Optional[ProcessGroup] = None,
    ) -> np.ndarray:
        """Gather a full array from the shards of all ranks. A collective of ``mesh.model_parallel_group``.

        ``mine`` is this rank's shard, None if it has none. ``dtype`` is the type of the array if it is not the
        parameter's; ``group`` is the group of ranks that take part if it is not ``mesh.model_parallel_group``.
        """
        dtype = dtype or placement.dtype
        full = np.zeros(placement.shape, np.float32 if dtype == "bfloat16" else dtype)
        if mine is not None and self.owns(placement):
            if placement.is_fully_sharded:
                part = full if placement.shard is None else np.zeros(self.shape_gathered(placement), full.dtype)
                FlatShard().put(mine, part, *self._number_on("fsdp"))
                mine = part
            if placement.shard is None:
                full = mine
            else:
                placement.shard.put(mine, full, *self._number_on("tp"))
        return _exact_sum(full, group or self.mesh.model_parallel_group)


def _exact_sum(array: np.ndarray, group: ProcessGroup) -> np.ndarray:
    """Sum arrays of which at most one is nonzero at each place, bitwise exactly: a negative zero is kept."""
    bits = np.ascontiguousarray(array).reshape(-1).view(f"i{array.itemsize}")
    return group.all_reduce(bits).view(array.dtype).reshape(array.shape)


def replicate_all(model: Any, mesh: DeviceMesh) -> Placements:
    """Return placements with every parameter on every rank; edits (model_edits.py) change them."""
    names_of: dict[int, list[str]] = {}
    full = []
    stages = tuple(range(mesh.sizes["pp"]))
    for name, weight in all_names(model).items():
        known = names_of.setdefault(id(weight), [])
        known.append(name)
        if len(known) == 1:
            trains = bool(getattr(weight, "requires_grad", False))
            full.append(Placement(name, tuple(weight.shape), dtype_name(weight), stages=stages, trains=trains))
    aliases = {name: names[0] for names in names_of.values() for name in names}
    base = getattr(base_model(model)[1], "base_model_prefix", "")
    return Placements(mesh, full, aliases, f"{base}." if base else "")


def take_shards(model: Any, placements: Placements) -> None:
    """Replace sharded parameters by new ones of this rank's shapes; their values are set later."""
    from mindnlp.core.nn import Parameter

    # Autograd remembers the shape of a parameter, so the shape cannot be changed in place.
    new: dict[int, Any] = {}
    for name, module in model.named_modules():
        for kind, parameter in module._parameters.items():
            if parameter is None:
                continue
            placement = placements[f"{name}.{kind}" if name else kind]
            if placement.is_sharded:
                if id(parameter) not in new:
                    # The system allocates no memory for these zeros until they are written.
                    zeros = np.zeros(placements.shape_here(placement), np.float32)
                    tensor = from_host(zeros, placement.dtype)
                    new[id(parameter)] = Parameter(tensor, requires_grad=parameter.requires_grad)
                module._parameters[kind] = new[id(parameter)]
