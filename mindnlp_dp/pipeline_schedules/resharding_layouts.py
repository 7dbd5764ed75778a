"""Computes which pieces of a tensor each device of one mesh must send to which devices of another mesh.

Pipeline messages (:mod:`mindnlp_dp.parallel`) and the planner's boundaries use these unit tasks, which follow Zhuang et
al., *On Optimizing the Communication of Model Parallelism* (MLSys 2023), section 3.

A layout has one entry per dimension: R is replicated, S0 and S1 are sharded over the first (hosts) and second (devices
of a host) axis of the mesh, S01 over both, host by host: "S0RR", "RS01R".
"""

from __future__ import annotations

import bisect
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

# (host, device in the host), and (first, last + 1) for each dimension.
Device = tuple[int, int]

Box = tuple[tuple[int, int], ...]

MeshAndSpec = tuple[tuple[int, int], str]


@dataclass(frozen=True)
class UnitTask:
    """Describes a piece of a tensor that is sent as one message.

    Attributes:
        box: (first, last + 1) of the piece in the tensor, for each dimension.
        senders: devices of the source mesh that have it; any of them may send it.
        receivers: devices of the destination mesh that need it.
        size: number of elements.
    """

    box: Box
    senders: tuple[Device, ...]
    receivers: tuple[Device, ...]
    size: int

    @property
    def sender_hosts(self) -> tuple[int, ...]:
        return tuple(sorted({host for host, _ in self.senders}))

    @property
    def receiver_hosts(self) -> tuple[int, ...]:
        return tuple(sorted({host for host, _ in self.receivers}))


def unit_tasks(
    shape: Sequence[int],
    source: MeshAndSpec = ((2, 4), "S0RR"),
    destination: MeshAndSpec = ((2, 4), "RS0R"),
) -> list[UnitTask]:
    """Return the pieces of a tensor to send from one mesh to another, by source tile and then by destination tile.

    Args:
        source: (hosts, devices of a host), and the layout on that mesh.
        destination: the same for the receiving mesh.

    Tiles of a dimension that the devices do not divide differ by one element, as in NumPy's ``array_split``; with more
    devices than elements, the last devices have none.

    Examples:
        >>> [task.size for task in unit_tasks((4, 6), ((2, 1), "S0R"), ((1, 3), "RS1"))]
        [4, 4, 4, 4, 4, 4]
    """
    have, want = tiles(shape, *source), list(tiles(shape, *destination).items())
    # The tiles that begin within each part of the first dimension; tiles of one layout are equal there or apart.
    by_part: dict[tuple[int, int], list[int]] = {}
    for number, (there, _) in enumerate(want):
        by_part.setdefault(there[0] if there else (0, 1), []).append(number)
    parts = sorted(by_part)
    tasks = []
    for here, senders in have.items():
        begin, end = here[0] if here else (0, 1)
        first = max(0, bisect.bisect_right(parts, (begin, math.inf)) - 1)
        last = bisect.bisect_left(parts, (end, 0))
        for number in sorted(number for part in parts[first:last] for number in by_part[part]):
            there, receivers = want[number]
            box = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(here, there))
            size = math.prod(max(0, end - begin) for begin, end in box)
            if size:
                tasks.append(UnitTask(box, tuple(senders), tuple(receivers), size))
    return tasks


def tiles(shape: Sequence[int], mesh: tuple[int, int], spec: str) -> dict[Box, list[Device]]:
    """Return the tiles of a layout, with the devices that have each, host by host; empty tiles are left out.

    Raises:
        ValueError: The layout is invalid, or is not valid for such a tensor.
    """
    axes_of = parse_spec(spec, len(shape))
    if len(mesh) != 2 or any(size < 1 for size in mesh):
        raise ValueError(f"a mesh is (hosts, devices of a host), each at least 1; got {mesh}")
    if any(size < 0 for size in shape):
        raise ValueError(f"a shape has sizes of at least 0, got {tuple(shape)}")
    found: dict[Box, list[Device]] = {}
    for device in itertools.product(range(mesh[0]), range(mesh[1])):
        box = box_of(shape, mesh, axes_of, device)
        if all(begin < end for begin, end in box):
            found.setdefault(box, []).append(device)
    return found


def box_of(shape: Sequence[int], mesh: tuple[int, int], axes_of: Sequence[tuple[int, ...]], device: Device) -> Box:
    """Return the part of a tensor that a device has, if dimension d is sharded over the mesh axes ``axes_of[d]``."""
    box = []
    for size, axes in zip(shape, axes_of):
        number, parts = 0, 1
        for axis in axes:
            number, parts = number * mesh[axis] + device[axis], parts * mesh[axis]
        small, larger = divmod(size, parts)
        begin = number * small + min(number, larger)
        box.append((begin, begin + small + (number < larger)))
    return tuple(box)


def parse_spec(spec: str, num_dimensions: int) -> list[tuple[int, ...]]:
    """Return, for each dimension, the mesh axes that it is sharded over.

    >>> parse_spec("RS01R", 3)
    [(), (0, 1), ()]
    """
    parts = re.findall(r"R|S01|S10|S0|S1", spec)
    if "".join(parts) != spec or len(parts) != num_dimensions:
        raise ValueError(
            f"a layout of {num_dimensions} dimensions has R, S0, S1 or S01 for each of them, as in "
            f"{'S0' + 'R' * (num_dimensions - 1)!r}; got {spec!r}"
        )
    axes = [tuple(int(digit) for digit in part[1:]) for part in parts]
    if len(set(sum(axes, ()))) < len(sum(axes, ())):
        raise ValueError(f"an axis of the mesh shards at most one dimension, got {spec!r}")
    return axes
