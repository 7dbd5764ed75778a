"""Moves a tensor from the ranks and layout of one mesh to those of another, bitwise exactly.

The user makes a :class:`Resharding` from two layouts and runs it on all ranks. The planner decides which rank sends
which piece to which rank, and in which order (pipeline_schedules/resharding_schedule.py); every rank computes the
same schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np

from mindnlp_dp.communication.operations import Operation
from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.pipeline_schedules.resharding_layouts import Box, Device, UnitTask, box_of, parse_spec, unit_tasks
from mindnlp_dp.pipeline_schedules.resharding_schedule import schedule_tasks
from mindnlp_dp.runtime.arrays import to_host


@dataclass(frozen=True)
class MeshLayout:
    """The layout of a tensor on some ranks of a group.

    Attributes:
        ranks: ranks of the group, host by host.
        mesh: (hosts, devices per host); their product is the number of ranks.
        spec: sharding spec, such as "S0RR" (:func:`~mindnlp_dp.pipeline_schedules.resharding_layouts.parse_spec`).
    """

    ranks: Sequence[int]
    mesh: tuple[int, int]
    spec: str

    def box(self, rank: int, shape: Sequence[int]) -> Optional[Box]:
        """Return the box of a tensor of this shape that a rank has, or None if the rank is not in the layout."""
        if rank not in self.ranks:
            return None
        place = divmod(list(self.ranks).index(rank), self.mesh[1])
        return box_of(shape, self.mesh, parse_spec(self.spec, len(shape)), place)

    def rank_of(self, device: Device) -> int:
        return self.ranks[device[0] * self.mesh[1] + device[1]]

    def check(self, what: str, world_size: int) -> None:
        if len(set(self.ranks)) != self.mesh[0] * self.mesh[1] or len(self.ranks) != len(set(self.ranks)):
            raise ValueError(f"{what}: a mesh of {self.mesh} has other ranks than {list(self.ranks)}")
        if not all(0 <= rank < world_size for rank in self.ranks):
            raise ValueError(f"{what}: ranks are 0 to {world_size - 1}, got {list(self.ranks)}")


class Resharding:
    """A schedule that moves tensors of one shape between two layouts; it is made once and can run many times.

    Attributes:
        source: the layout that is read.
        destination: the layout that is written.
        schedule: the order of the pieces, and the sender of each.
    """

    def __init__(
        self, shape: Sequence[int], source: MeshLayout, destination: MeshLayout, group: ProcessGroup,
        algorithm: str = "search",
    ) -> None:  # fmt: skip
        if library := group.library_without(Operation.MESSAGES):
            raise ValueError(
                f"{library} has no messages between two ranks, by which a tensor is resharded; MPI has, on CPU: "
                "mindnlp-dp run --backend mpi script.py"
            )
        source.check("source", group.world_size)
        destination.check("destination", group.world_size)
        self.shape, self.source, self.destination = tuple(shape), source, destination
        self._group = group
        self.tasks: list[UnitTask] = unit_tasks(
            self.shape, (source.mesh, source.spec), (destination.mesh, destination.spec)
        )
        self.schedule = schedule_tasks(self.tasks, algorithm)

    def run(self, tile: Optional[Any], dtype: Any = np.float32) -> Optional[np.ndarray]:
        """Move a tensor, given this rank's tile of the source if it has one. A collective of the group.

        Returns:
            This rank's tile of the destination as an array; None on ranks that are not in the destination.

        Raises:
            ValueError: the tile of some rank has a wrong shape or type, or is missing; raised on all ranks.
        """
        rank = self._group.rank
        mine, wanted = self.source.box(rank, self.shape), self.destination.box(rank, self.shape)
        array = None if tile is None else np.ascontiguousarray(to_host(tile))
        dtype = np.dtype(dtype)
        self._group.raise_on_all_ranks(self._problem(array, mine, dtype), "resharding a tensor")
        result = None if wanted is None else np.empty([end - begin for begin, end in wanted], dtype)
        for number in self.schedule.order:
            task = self.tasks[number]
            sender = self._sender(task, self.schedule.senders[number])
            piece = None
            if rank == sender:
                assert array is not None, "a sender has a tile"
                assert mine is not None
                piece = np.ascontiguousarray(array[_within(task.box, mine)])
            for receiver in (self.destination.rank_of(device) for device in task.receivers):
                if rank == receiver:
                    assert result is not None, "a receiver has a place for it"
                    assert wanted is not None
                    like = np.empty([end - begin for begin, end in task.box], dtype)
                    result[_within(task.box, wanted)] = piece if piece is not None else self._group.recv(like, sender)
                elif rank == sender:
                    self._group.send(piece, receiver)
        return result

    def _sender(self, task: UnitTask, host: int) -> int:
        return next(self.source.rank_of(device) for device in task.senders if device[0] == host)

    def _problem(self, array: Optional[np.ndarray], mine: Optional[Box], dtype: Any) -> Optional[ValueError]:
        if mine is None:
            return None
        expected = tuple(end - begin for begin, end in mine)
        if array is not None and (array.shape, array.dtype) == (expected, dtype):
            return None
        got = "none" if array is None else f"{array.dtype} of shape {array.shape}"
        return ValueError(
            f"rank {self._group.label()} has {self.source.spec} of {self.shape}: a tile of {dtype} and shape "
            f"{expected}, got {got}"
        )


def _within(box: Box, tile: Box) -> tuple[slice, ...]:
    """Return the slices of a piece within a tile that contains it."""
    return tuple(slice(a - begin, b - begin) for (a, b), (begin, _) in zip(box, tile))
