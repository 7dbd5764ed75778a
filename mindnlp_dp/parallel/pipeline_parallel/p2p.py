"""Sends hidden states from a pipeline stage to the next one, and their gradients back; the pipeline calls it.

If two stages split a micro-batch in the same way, each rank sends to the rank with the same rank_in_stage of the other
stage. Otherwise the planner schedules which rows are sent (:mod:`mindnlp_dp.schedules.resharding_schedule`); every rank
computes the same schedule.
"""

from __future__ import annotations

import functools
from typing import Any, Optional

import numpy as np
from mindspore import Tensor

from mindnlp_dp.communication.p2p import PipelineP2P
from mindnlp_dp.parallel.device_mesh import DeviceMesh
from mindnlp_dp.runtime.arrays import dtype_name, from_host, to_host
from mindnlp_dp.schedules.resharding import box_of, unit_tasks
from mindnlp_dp.schedules.resharding_schedule import schedule_tasks

Rows = tuple[int, int]

# (sender, receiver, rows), with ranks of ``mesh.model_parallel_group``; None stands for all rows that the sender has.
Move = tuple[int, int, Optional[Rows]]


class StageP2P:
    """Exchanges activations and gradients between this rank's stage and its neighbors.

    Attributes:
        wire: the point-to-point channel that carries the messages.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.p2p = PipelineP2P(mesh.model_parallel_group)
        self._mesh = mesh
        self._rank, self._stage = mesh.model_parallel_group.rank, mesh.index("pp")
        self._moves = functools.lru_cache(maxsize=64)(self._moves_between)

    def rows(self, num_rows: int) -> Rows:
        """Return this rank's range of a micro-batch's rows; it may be empty if there are fewer rows than ranks."""
        return self.rows_of_each(num_rows)[self._mesh.index("dp_in_stage")]

    def rows_of_each(self, num_rows: int) -> list[Rows]:
        """Return the range of rows for every rank of this stage that splits the micro-batch."""
        dp_in_stage = self._mesh.sizes["dp_in_stage"]
        return [box_of((num_rows,), (dp_in_stage, 1), [(0,)], (number, 0))[0] for number in range(dp_in_stage)]

    def send(
        self, x: Any, stage: int, number: int, direction: int, *, num_rows: Optional[int] = None, note: float = 0.0
    ) -> None:
        """Start sending this rank's rows of a micro-batch to a stage; without ``num_rows`` every rank has all rows.

        Raises:
            ValueError: stages differ, and ``x`` does not have the number of rows of this rank's shard.
        """
        begin, end = (0, x.shape[0]) if num_rows is None else self.rows(num_rows)
        if x.shape[0] != end - begin and self._mesh.stages_differ:
            raise ValueError(
                f"rank {self._mesh.world.label()} has {end - begin} of the {num_rows} rows of a micro-batch, and the "
                f"model has made {x.shape[0]} of them. Where stages differ, samples are split by rows: every "
                "column that has a row a sample must be an array, the first of all columns must be one, and the model "
                "must keep rows as they are; else give all stages the same mesh"
            )
        for sender, receiver, rows in self._moves(self._stage, stage, num_rows):
            if sender == self._rank:
                part = x if rows is None else _part(x, rows[0] - begin, rows[1] - begin)
                self.p2p.send(part, receiver, number, direction, note)

    def receive(self, stage: int, number: int, direction: int, *, num_rows: Optional[int] = None) -> tuple[Any, float]:
        """Return this rank's rows from a stage (None if it has no rows), and the number sent with them."""
        parts, note = [], 0.0
        for sender, receiver, _ in sorted(self._moves(stage, self._stage, num_rows), key=lambda move: move[2] or ()):
            if receiver == self._rank:
                part, note = self.p2p.receive(sender, number, direction)
                parts.append(part)
        return _joined(parts), note

    def send_abort(self, stage: int, number: int, direction: int, num_rows: int) -> None:
        """Send an abort instead of the data; it raises an error on the ranks that wait for the data."""
        for sender, receiver, _ in self._moves(self._stage, stage, num_rows):
            if sender == self._rank:
                self.p2p.send_abort(receiver, number, direction)

    def _moves_between(self, source: int, destination: int, num_rows: Optional[int]) -> list[Move]:
        """Return all moves from one stage to another, in the order in which a rank sends them."""
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
            # The ranks of a tp group have the same rows; they take turns in sending.
            senders = [device for device in task.senders if device[0] == schedule.senders[place]]
            for turn, (dp_in_stage, tp) in enumerate(task.receivers):
                there = senders[turn % len(senders)]
                found.append(
                    (have[there[0] * shares[0][1] + there[1]], want[dp_in_stage * shares[1][1] + tp], task.box[0])
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


def to_arrays(outputs: Any) -> Any:
    """Replace the tensors in nested model outputs by arrays; output classes of the model are kept."""
    if isinstance(outputs, Tensor):
        return _Array(to_host(outputs), dtype_name(outputs))
    if isinstance(outputs, dict):
        return type(outputs)(**{key: to_arrays(value) for key, value in outputs.items()})
    if isinstance(outputs, (list, tuple)):
        return type(outputs)(map(to_arrays, outputs))
    return outputs


def to_tensors(outputs: Any) -> Any:
    """Return outputs with tensors in place of NumPy arrays."""
    if isinstance(outputs, _Array):
        return outputs.tensor()
    if isinstance(outputs, dict):
        return type(outputs)(**{key: to_tensors(value) for key, value in outputs.items()})
    if isinstance(outputs, (list, tuple)):
        return type(outputs)(map(to_tensors, outputs))
    return outputs


class _Array:
    def __init__(self, array: np.ndarray, dtype: str) -> None:
        self.array, self.dtype = array, dtype

    def tensor(self) -> Any:
        return from_host(self.array, self.dtype)
