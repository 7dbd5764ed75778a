"""The ranks of a job as a mesh: an axis for each way of sharing out the work.

Goes in: the group of all ranks, and the sizes of the axes. Comes out: this rank's coordinates, and a
:class:`~mindnlp_dp.ProcessGroup` for every axis, on which all that takes a group works. Of eight ranks as
``{"dp": 2, "pp": 2, "tp": 2}``, the last axis varies fastest, so that its ranks are neighbours::

            pp=0            pp=1
    dp=0    tp=0 tp=1       tp=0 tp=1           0 1   2 3
    dp=1    tp=0 tp=1       tp=0 tp=1           4 5   6 7

Ranks that differ in ``tp`` or ``pp`` alone work on the same samples, each with its part of the model; those that
differ in ``dp`` or ``ep`` on other ones. Those that differ in ``ep`` have other experts, and else the same weights.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Mapping
from typing import Any, Optional

from mindnlp_dp.communication.collectives import ProcessGroup
from mindnlp_dp.communication.process_group import get_process_group, set_data_group

# Data, stages of a pipeline, experts, tensors.
AXES = ("dp", "pp", "ep", "tp")
# What MCCL lacks in a group of some ranks: a pipeline sends between two ranks, experts all to all.
_NEEDS = {"pp": "messages between two ranks", "ep": "all-to-all"}

_mesh_of: weakref.WeakKeyDictionary[ProcessGroup, DeviceMesh] = weakref.WeakKeyDictionary()


class DeviceMesh:
    """What :func:`init_device_mesh` makes. Making it is a collective.

    Attributes:
        axes: those that were named, in order, and their sizes.
        sizes: of all axes; those that were not named are 1.
        coordinates: of this rank.
        world: the group of all ranks.
        data: of the ranks with the same part of the model, experts aside, which share out the samples: ``dp x ep``.
        replicas: of the ranks with the same weights, experts included: ``dp``.
        parts: of the ranks that together have the whole model: ``pp x ep x tp``.
    """

    def __init__(self, sizes: Mapping[str, int], world: ProcessGroup) -> None:
        self.world = world
        self.axes = dict(sizes)
        self.sizes = {**dict.fromkeys(AXES, 1), **{axis: int(size) for axis, size in sizes.items()}}
        self._order = [*sizes, *(axis for axis in AXES if axis not in sizes)]
        places = itertools.product(*(range(self.sizes[axis]) for axis in self._order))
        self._places = [dict(zip(self._order, place)) for place in places]
        self.coordinates = self._places[world.rank]
        self._groups: dict[tuple[int, ...], ProcessGroup] = {tuple(range(world.world_size)): world}
        is_mesh = self.sizes["dp"] < world.world_size
        world.name_ranks([f"{r} ({self.label(place)})" for r, place in enumerate(self._places)] if is_mesh else [])
        for axes in [(axis,) for axis in AXES] + [("dp", "ep"), ("pp", "ep", "tp")]:
            self._make_group(axes)
        self.data, self.replicas, self.parts = self.group("dp", "ep"), self.group("dp"), self.group("pp", "ep", "tp")

    def __repr__(self) -> str:
        return f"DeviceMesh({self}; this is {self.label(self.coordinates)})"

    def __str__(self) -> str:
        return ", ".join(f"{axis}={self.sizes[axis]}" for axis in self._order if self.sizes[axis] > 1) or "dp=1"

    def group(self, *axes: str) -> ProcessGroup:
        """The ranks that differ from this one in these axes alone, in the mesh's order."""
        return self._groups[self._ranks(axes)]

    def _ranks(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        here = self.coordinates
        same = [axis for axis in AXES if axis not in axes]
        return tuple(r for r, place in enumerate(self._places) if all(place[a] == here[a] for a in same))

    def _make_group(self, axes: tuple[str, ...]) -> None:
        ranks = self._ranks(axes)
        # Where one rank finds its group made, so do all: groups differ by their sizes.
        if ranks not in self._groups:
            labels = [f"{rank} ({self.label(self._places[rank])})" for rank in ranks]
            self._groups[ranks] = self.world.split(ranks, labels)

    def label(self, place: Mapping[str, int]) -> str:
        """Coordinates as messages show them."""
        return ", ".join(f"{axis}={place[axis]}" for axis in self._order if self.sizes[axis] > 1) or "dp=0"

    def index(self, axis: str) -> int:
        """This rank's coordinate on an axis."""
        return self.coordinates[axis]

    @property
    def is_data_parallel(self) -> bool:
        """Whether every rank has the whole model."""
        return self.parts.world_size == 1

    @property
    def seed_rank(self) -> int:
        """What randomness inside the model is a function of, besides the step: the samples' rank, and the stage.

        Ranks that differ in ``tp`` alone draw alike, for what is not cut among them is computed on all.
        """
        return self.data.rank + self.data.world_size * self.index("pp")

    @property
    def is_first_stage(self) -> bool:
        return self.index("pp") == 0

    @property
    def is_last_stage(self) -> bool:
        return self.index("pp") == self.sizes["pp"] - 1


def init_device_mesh(sizes: Mapping[str, int], group: Optional[ProcessGroup] = None) -> DeviceMesh:
    """Arrange the ranks of a job in a mesh, which is the job's from then on. A collective.

    Args:
        sizes: by axis: "dp" (data), "pp" (pipeline), "ep" (experts), "tp" (tensors). Their product is the world size;
            one of them may be -1, and is what is left.
        group: of all ranks; by default that of :func:`~mindnlp_dp.init_process_group`.

    Raises:
        ValueError: sizes that do not fit, that ranks disagree about, or that the backend cannot serve.
    """
    group = group or get_process_group()
    everyone = group.all_gather_object(list(sizes.items()))
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise ValueError(
                f"ranks must make the same mesh: {dict(everyone[0])} on rank 0, and {dict(theirs)} on rank {rank}"
            )
    checked = _checked(dict(sizes), group)
    known = _mesh_of.get(group)
    # The same one again takes no new groups.
    mesh = known if known is not None and known.axes == checked else DeviceMesh(checked, group)
    _mesh_of[group] = mesh
    set_data_group(mesh.data)
    return mesh


def get_device_mesh(group: Optional[ProcessGroup] = None) -> DeviceMesh:
    """The job's mesh; where none was made, all ranks are on the axis "dp"."""
    group = group or get_process_group()
    if group not in _mesh_of:
        _mesh_of[group] = DeviceMesh({"dp": group.world_size}, group)
    return _mesh_of[group]


def parse_mesh(text: str) -> dict[str, int]:
    """``"dp=2,tp=2"`` as ``{"dp": 2, "tp": 2}``; ValueError where it is not of that form.

    >>> parse_mesh("dp=2,tp=2")
    {'dp': 2, 'tp': 2}
    """
    sizes: dict[str, int] = {}
    for part in filter(None, text.replace(" ", "").split(",")):
        axis, _, size = part.partition("=")
        if axis in sizes or not size.lstrip("-").isdigit():
            raise ValueError(f"a mesh is written as dp=2,tp=2, got {text!r}")
        sizes[axis] = int(size)
    return sizes


def _checked(sizes: dict[str, Any], group: ProcessGroup) -> dict[str, int]:
    for axis, size in sizes.items():
        if axis not in AXES:
            raise ValueError(f"a mesh has axes {', '.join(AXES)}, got {axis!r}")
        if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
            raise ValueError(
                f"the size of {axis} must be a whole number from 1 on, or -1 for what is left; got {size!r}"
            )
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    known = math.prod(size for size in sizes.values() if size != -1)
    if len(open_axes) > 1:
        raise ValueError(f"one axis at most is -1, got {' and '.join(open_axes)}")
    if open_axes and group.world_size % known == 0:
        sizes[open_axes[0]] = group.world_size // known
    if math.prod(sizes.values()) != group.world_size:
        shown = " x ".join(f"{axis}={size}" for axis, size in sizes.items()) or "no axis"
        raise ValueError(
            f"{shown} does not make {group.world_size} ranks, which this job has; sizes multiply to the number of ranks"
        )
    for axis, need in _NEEDS.items():
        if group.backend == "mccl" and sizes.get(axis, 1) > 1:
            raise ValueError(
                f"{axis}={sizes[axis]} cannot be under MindSpore's CPU library (mccl), which has no {need}; MPI has: "
                f"mindnlp-dp run --nproc {group.world_size} --backend mpi script.py"
            )
    return sizes
