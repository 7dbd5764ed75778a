"""What the stages of a pipeline send each other: hidden states up, their gradients down.

Goes in: what a rank has of a micro batch, all or some of its rows. Comes out: what a rank of the next stage, or of the
one before, needs of it. Where two stages share out a micro batch alike, each rank sends to the one in its place;
else rows go as the planner schedules them (:mod:`mindnlp_dp.planner.resharding_schedule`), on every rank the same.
"""

from __future__ import annotations

import functools
from typing import Any, Optional

import numpy as np

from mindnlp_dp.arrays.conversion import from_host, to_host
from mindnlp_dp.arrays.types import dtype_name
from mindnlp_dp.communication.wire import Wire
from mindnlp_dp.planner.resharding import box_of, unit_tasks
from mindnlp_dp.planner.resharding_schedule import schedule_tasks

from .mesh import DeviceMesh

Rows = tuple[int, int]
# From a rank to a rank of ``mesh.parts``: some rows, or, where there are None, all that it has.
Move = tuple[int, int, Optional[Rows]]


class Messages:
    """Between this rank's stage and its neighbours.

    Attributes:
        wire: what they go over.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.wire = Wire(mesh.parts)
        self._mesh = mesh
        self._rank, self._stage = mesh.parts.rank, mesh.index("pp")
        self._moves = functools.lru_cache(maxsize=64)(self._moves_between)

    def rows(self, num_rows: int) -> Rows:
        """This rank's of a micro batch's; none (begin equals end) where there are fewer than ranks that share them."""
        return self.rows_of_each(num_rows)[self._mesh.index("sub")]

    def rows_of_each(self, num_rows: int) -> list[Rows]:
        """The same of every rank that shares out a micro batch in this stage."""
        sub = self._mesh.sizes["sub"]
        return [box_of((num_rows,), (sub, 1), [(0,)], (number, 0))[0] for number in range(sub)]

    def send(
        self, x: Any, stage: int, number: int, direction: int, *, num_rows: Optional[int] = None, note: float = 0.0
    ) -> None:
        """Begin to send this rank's rows of a micro batch of ``num_rows`` to a stage; without, all ranks have all.

        Raises:
            ValueError: ``x`` has not as many rows as this rank's share of the micro batch, where stages differ.
        """
        begin, end = (0, x.shape[0]) if num_rows is None else self.rows(num_rows)
        if x.shape[0] != end - begin and self._mesh.stages_differ:
            raise ValueError(
                f"rank {self._mesh.world.label()} has {end - begin} of the {num_rows} rows of a micro batch, and the "
                f"model has made {x.shape[0]} of them. Where stages differ, samples are shared out by rows: every "
                "column that has a row a sample must be an array, the first of all columns must be one, and the model "
                "must keep rows as they are; else give all stages the same mesh"
            )
        for sender, receiver, rows in self._moves(self._stage, stage, num_rows):
            if sender == self._rank:
                part = x if rows is None else _part(x, rows[0] - begin, rows[1] - begin)
                self.wire.send(part, receiver, number, direction, note)

    def receive(self, stage: int, number: int, direction: int, *, num_rows: Optional[int] = None) -> tuple[Any, float]:
        """This rank's rows, which a stage sends, and the number beside them; None where it has no row."""
        parts, note = [], 0.0
        for sender, receiver, _ in sorted(self._moves(stage, self._stage, num_rows), key=lambda move: move[2] or ()):
            if receiver == self._rank:
                part, note = self.wire.receive(sender, number, direction)
                parts.append(part)
        return _joined(parts), note

    def call_off(self, stage: int, number: int, direction: int, num_rows: int) -> None:
        """In the place of what this rank had to send: an error where it is waited for."""
        for sender, receiver, _ in self._moves(self._stage, stage, num_rows):
            if sender == self._rank:
                self.wire.call_off(receiver, number, direction)

    def _moves_between(self, source: int, destination: int, num_rows: Optional[int]) -> list[Move]:
        """Who sends what to whom, in the order in which a rank sends."""
        mesh = self._mesh
        have, want = mesh.row(source), mesh.row(destination)
        if num_rows is None or mesh.stages[source] == mesh.stages[destination]:
            return [(have[cell % len(have)], rank, None) for cell, rank in enumerate(want)]
        shares = [mesh.stages[stage] for stage in (source, destination)]
        tasks = unit_tasks((num_rows,), (shares[0], "S0"), (shares[1], "S0"))
        schedule = schedule_tasks(tasks, "greedy")
        found: list[Move] = []
        for place in schedule.order:
            task = tasks[place]
            # Those with the same rows take turns.
            senders = [device for device in task.senders if device[0] == schedule.senders[place]]
            for turn, (sub, tp) in enumerate(task.receivers):
                there = senders[turn % len(senders)]
                found.append(
                    (have[there[0] * shares[0][1] + there[1]], want[sub * shares[1][1] + tp], task.box[0])
                )  # fmt: skip
        return found


def _part(x: Any, begin: int, end: int) -> Any:
    if (begin, end) == (0, x.shape[0]):
        return x
    return from_host(np.ascontiguousarray(to_host(x)[begin:end]), dtype_name(x))


def _joined(parts: list[Any]) -> Any:
    if len(parts) < 2:
        return parts[0] if parts else None
    return from_host(np.concatenate([to_host(part) for part in parts]), dtype_name(parts[0]))
