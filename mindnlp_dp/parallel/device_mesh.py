"""Arranges the ranks of a job in a device mesh, with one axis for each kind of parallelism.

The user calls :func:`init_device_mesh`; the mesh has this rank's coordinates and a :class:`~mindnlp_dp.ProcessGroup`
for every axis. The last axis varies fastest, so its ranks are neighbors. Eight ranks as
``{"dp": 2, "pp": 2, "tp": 2}``::

            pp=0            pp=1
    dp=0    tp=0 tp=1       tp=0 tp=1           0 1   2 3
    dp=1    tp=0 tp=1       tp=0 tp=1           4 5   6 7

Ranks that differ only in ``tp`` or ``pp`` work on the same samples, each with its part of the model. Ranks that differ
in ``sp`` work on the same samples with the same weights, each with its part of every row. Ranks that differ in ``dp``,
``ep`` or ``fsdp`` work on different samples. Ranks that differ in ``ep`` have different experts, and otherwise the same
weights; ranks that differ in ``fsdp`` have different shards of all weights, which they gather to compute.

Each stage may have its own ``dp`` and ``tp``, as in ``{"pp": 2, "dp": (2, 1), "tp": (1, 2)}``. The number of rows
(parallel pipelines) is then the greatest common divisor of the ``dp`` of the stages. The other ranks of a stage's
``dp`` split the samples of each micro-batch, along an internal axis ``dp_in_stage`` that the user does not name::

            pp=0            pp=1                (s: dp_in_stage)
            s=0 s=1         tp=0 tp=1           0 1   2 3
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from mindnlp_dp.communication.default_group import get_process_group, set_data_group
from mindnlp_dp.communication.operations import Operation
from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.runtime.mesh_spec import Size, size_text

# Data, pipeline, expert, fully sharded data, sequence and tensor parallelism.
AXES = ("dp", "pp", "ep", "fsdp", "sp", "tp")

# The axes whose size may differ between stages, given as a tuple.
_BY_STAGE = ("dp", "tp")

# The axes of the ranks that together work on a micro-batch.
_OF_MODEL = ("pp", "ep", "fsdp", "sp", "dp_in_stage", "tp")

# The axes of the ranks that have the same part of the model, except experts and shards.
_OF_SAMPLES = ("dp", "ep", "fsdp", "sp", "dp_in_stage")

# The operations that an axis needs and that not every library has.
_NEEDS = {"pp": Operation.MESSAGES, "ep": Operation.ALL_TO_ALL, "sp": Operation.ALL_TO_ALL}

_mesh_of: weakref.WeakKeyDictionary[ProcessGroup, DeviceMesh] = weakref.WeakKeyDictionary()


class DeviceMesh:
    """The ranks of a job as a mesh, made by :func:`init_device_mesh`. The constructor is a collective.

    Attributes:
        axes: sizes of the axes that the user named, in order; tuples by stage if stages differ.
        sizes: sizes of all axes in this rank's stage; axes that the user did not name have size 1.
        coordinates: coordinates of this rank. "rank_in_stage" is the rank's number within its stage and row, along sub
            and tp.
        stages: (dp_in_stage, tp) of every stage.
        world: group of all ranks.
        dp_group: group of the ranks with the same part of the model, except experts and fully sharded weights, that
            split the samples: ``dp x ep x fsdp``.
        grad_sync_group: group of the same ranks and those that split the samples of a micro-batch, or their rows:
            ``dp x ep x fsdp x sp x dp_in_stage``.
        model_parallel_group: group of the ranks that together work on a micro-batch with the full model:
            ``pp x ep x fsdp x sp x dp_in_stage x tp``.
    """

    def __init__(self, sizes: Mapping[str, Size], world: ProcessGroup) -> None:
        self.world = world
        self.axes = dict(sizes)
        num_stages = self._of(0, "pp")
        rows = math.gcd(*(self._of(stage, "dp") for stage in range(num_stages)))
        self.stages = [(self._of(stage, "dp") // rows, self._of(stage, "tp")) for stage in range(num_stages)]
        self._order = [*sizes, *(axis for axis in AXES if axis not in sizes)]
        common = {"dp": rows, "pp": num_stages, **{axis: self._of(0, axis) for axis in ("ep", "fsdp", "sp")}}
        self._places = self._arranged(common)
        self.coordinates = self._places[world.rank]
        dp_in_stage, tp = self.stages[self.coordinates["pp"]]
        self.sizes = {**common, "dp_in_stage": dp_in_stage, "tp": tp}
        self._groups: dict[tuple[int, ...], ProcessGroup] = {tuple(range(world.world_size)): world}
        is_mesh = rows < world.world_size
        world.set_rank_labels([f"{r} ({self.label(place)})" for r, place in enumerate(self._places)] if is_mesh else [])
        for axis in (*AXES, "dp_in_stage"):
            self._make_group((axis,))
        self.dp_group = self._make_group(("dp", "ep", "fsdp"))
        self._make_group(("ep", "fsdp"))
        for summed_over in ((), ("ep",), ("fsdp",), ("ep", "fsdp")):
            self._make_group(_others(summed_over))
        self.grad_sync_group = self.grad_sync_group_of(())
        self.model_parallel_group = self._make_group(_OF_MODEL)

    def _of(self, stage: int, axis: str) -> int:
        size = self.axes.get(axis, 1)
        return size[stage] if isinstance(size, tuple) else size

    def _arranged(self, sizes: Mapping[str, int]) -> list[dict[str, int]]:
        """Return the coordinates of all ranks in rank order; those of a stage vary at the position of "tp"."""
        ranks_in_stages = [dp_in_stage * tp for dp_in_stage, tp in self.stages]
        found = []
        for numbers in itertools.product(
            *(range(max(ranks_in_stages) if a == "tp" else sizes[a]) for a in self._order)
        ):
            place = dict(zip(self._order, numbers))
            rank_in_stage = place.pop("tp")
            if rank_in_stage < ranks_in_stages[place["pp"]]:
                dp_in_stage, tp = divmod(rank_in_stage, self.stages[place["pp"]][1])
                found.append({**place, "dp_in_stage": dp_in_stage, "tp": tp, "rank_in_stage": rank_in_stage})
        return found

    def __repr__(self) -> str:
        return f"DeviceMesh({self}; this is {self.label(self.coordinates)})"

    def __str__(self) -> str:
        shown = {axis: size for axis, size in self.axes.items() if size != 1}
        return ", ".join(f"{axis}={size_text(size)}" for axis, size in shown.items()) or "dp=1"

    def group(self, *axes: str) -> ProcessGroup:
        """Return the group of the ranks that differ from this one only in these axes, in the order of the mesh.

        With "pp" but without "dp_in_stage" and "tp", these are the ranks with the same rank_in_stage in every stage.
        """
        return self._groups[self._ranks(axes)]

    def grad_sync_group_of(self, summed_over: Sequence[str]) -> ProcessGroup:
        """Return the group that averages gradients which the backward pass has summed over some axes.

        It is that of the ranks with the same weights: those of experts are summed over "ep", shards over "fsdp".
        """
        return self.group(*_others(summed_over))

    def row(self, stage: int) -> list[int]:
        """Return the ranks within ``model_parallel_group`` that are in a stage, ordered by rank_in_stage."""
        ranks = self._ranks(_OF_MODEL)
        return [number for number, rank in enumerate(ranks) if self._places[rank]["pp"] == stage]

    def _ranks(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        here = self.coordinates
        within = (
            [axis for axis in ("dp_in_stage", "tp") if axis not in axes]
            if {"dp_in_stage", "tp"} & set(axes)
            else ["rank_in_stage"]
        )
        same = [axis for axis in AXES if axis not in ("tp", *axes)] + within
        return tuple(r for r, place in enumerate(self._places) if all(place[a] == here[a] for a in same))

    def _make_group(self, axes: tuple[str, ...]) -> ProcessGroup:
        """Return the group of the ranks that differ from this one only in these axes. A collective."""
        ranks = self._ranks(axes)
        # If stages differ, some ranks may already have their group and others not; split() is a collective.
        if any(self.world.all_gather_object(ranks not in self._groups)):
            labels = [f"{rank} ({self.label(self._places[rank])})" for rank in ranks]
            made = self.world.split(ranks, labels)
            self._groups.setdefault(ranks, made)
        return self._groups[ranks]

    def label(self, place: Mapping[str, int]) -> str:
        """Return the coordinates of a rank as text for messages."""
        dp_in_stage, tp = (max(of_stages) for of_stages in zip(*self.stages))
        most = {axis: 1 + max(other[axis] for other in self._places) for axis in AXES if axis != "tp"}
        most |= {"dp_in_stage": dp_in_stage, "tp": tp}
        place_of_tp = self._order.index("tp")
        order = [*self._order[:place_of_tp], "dp_in_stage", *self._order[place_of_tp:]]
        return ", ".join(f"{axis}={place[axis]}" for axis in order if most[axis] > 1) or "dp=0"

    def index(self, axis: str) -> int:
        """Return this rank's coordinate on an axis."""
        return self.coordinates[axis]

    @property
    def is_data_parallel(self) -> bool:
        """Whether every rank has the full model."""
        return self.model_parallel_group.world_size == 1

    @property
    def stages_differ(self) -> bool:
        return len(set(self.stages)) > 1

    @property
    def seed_rank(self) -> int:
        """The rank from which the seed of the randomness inside the model is computed, besides the step.

        It depends on the samples and the stage. Ranks that differ only in ``sp`` or ``tp`` have the same seed rank,
        because all of them compute what is not sharded.
        """
        before = sum(dp_in_stage for dp_in_stage, _ in self.stages[: self.index("pp")])
        samples = self._ranks(("dp", "ep", "fsdp", "dp_in_stage")).index(self.world.rank)
        return samples + self.sizes["dp"] * self.sizes["ep"] * self.sizes["fsdp"] * before

    @property
    def is_first_stage(self) -> bool:
        return self.index("pp") == 0

    @property
    def is_last_stage(self) -> bool:
        return self.index("pp") == self.sizes["pp"] - 1


def _others(axes: Sequence[str]) -> tuple[str, ...]:
    return tuple(axis for axis in _OF_SAMPLES if axis not in axes)


def init_device_mesh(sizes: Mapping[str, Size], group: Optional[ProcessGroup] = None) -> DeviceMesh:
    """Arrange the ranks of a job in a mesh and make it the default mesh of the job. A collective.

    Args:
        sizes: size of each axis: "dp" (data), "pp" (pipeline), "ep" (experts), "fsdp" (data, with sharded weights),
            "sp" (the tokens of a row), "tp" (tensors). Their product must be the world size; one size may be -1 and is
            then computed. If stages differ,
            "dp" and "tp" are tuples with one size per stage, and the sum of the stages' products must be the world
            size.
        group: group of all ranks; by default the group of :func:`~mindnlp_dp.init_process_group`.

    Raises:
        TypeError: ``sizes`` is not a mapping.
        ValueError: the sizes do not fit the world size, differ between ranks, or are not supported by the backend.
    """
    if not isinstance(sizes, Mapping):
        raise TypeError(f'the sizes of a mesh are a dict, such as {{"dp": 2, "tp": 2}}; got {sizes!r}')
    group = group or get_process_group()
    everyone = group.all_gather_object(list(sizes.items()))
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise ValueError(
                f"ranks must make the same mesh: {dict(everyone[0])} on rank 0, and {dict(theirs)} on rank {rank}"
            )
    checked = _checked(dict(sizes), group)
    known = _mesh_of.get(group)
    # Reuse an equal mesh, to make no new groups.
    mesh = known if known is not None and known.axes == checked else DeviceMesh(checked, group)
    _mesh_of[group] = mesh
    set_data_group(mesh.dp_group)
    return mesh


def get_device_mesh(group: Optional[ProcessGroup] = None) -> DeviceMesh:
    """Return the mesh of the job; if none was made, all ranks are on the axis "dp"."""
    group = group or get_process_group()
    if group not in _mesh_of:
        _mesh_of[group] = DeviceMesh({"dp": group.world_size}, group)
    return _mesh_of[group]


def _checked(sizes: dict[str, Any], group: ProcessGroup) -> dict[str, Size]:
    for axis, size in sizes.items():
        if axis not in AXES:
            raise ValueError(f"a mesh has axes {', '.join(AXES)}, got {axis!r}")
        if isinstance(size, (tuple, list)):
            sizes[axis] = _checked_by_stage(axis, tuple(size), sizes.get("pp", 1))
        elif not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
            raise ValueError(
                f"the size of {axis} must be a whole number of at least 1, or -1 for the remaining ranks; got {size!r}"
            )
    by_stage = [axis for axis, size in sizes.items() if isinstance(size, tuple)]
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise ValueError(f"at most one axis may be -1, got {' and '.join(open_axes)}")
    if open_axes and by_stage:
        raise ValueError(f"sizes by stage, as of {by_stage[0]}, leave no axis to be inferred; {open_axes[0]} is -1")
    known = math.prod(size for size in sizes.values() if size != -1 and not isinstance(size, tuple))
    if open_axes and group.world_size % known == 0:
        sizes[open_axes[0]] = group.world_size // known
    if _num_ranks(sizes) != group.world_size:
        shown = " x ".join(f"{axis}={size_text(size)}" for axis, size in sizes.items()) or "no axis"
        made = "sizes multiply to the number of ranks" + (", by stage, and stages add up" if by_stage else "")
        raise ValueError(f"{shown} does not match the {group.world_size} ranks of this job; {made}")
    for axis, need in _NEEDS.items():
        library = group.library_without(need) if sizes.get(axis, 1) > 1 else ""
        if library:
            here = "use dp or tp on this device; on CPU, MPI has" if group.on_device else "MPI has"
            raise ValueError(
                f"{axis}={sizes[axis]} is not supported by {library}, which has no {need.value}; {here}: "
                f"mindnlp-dp run --nproc {group.world_size} --backend mpi script.py"
            )
    return sizes


def _checked_by_stage(axis: str, size: tuple[Any, ...], num_stages: Any) -> Size:
    if axis not in _BY_STAGE:
        raise ValueError(f"the sizes of dp and tp may differ by stage, that of {axis} may not; got {size}")
    if any(not isinstance(number, int) or isinstance(number, bool) or number < 1 for number in size):
        raise ValueError(f"sizes by stage are whole numbers of at least 1, got {axis}={size_text(size)}")
    if len(size) != num_stages:
        raise ValueError(f"{axis}={size_text(size)} has {len(size)} stages, and pp={num_stages}")
    return size


def _num_ranks(sizes: Mapping[str, Size]) -> int:
    common = math.prod(size for axis, size in sizes.items() if axis != "pp" and not isinstance(size, tuple))
    by_stage = [size for size in sizes.values() if isinstance(size, tuple)]
    num_stages = sizes.get("pp", 1)
    assert isinstance(num_stages, int), "sizes by stage are dp's and tp's"
    return common * (sum(map(math.prod, zip(*by_stage))) if by_stage else num_stages)
