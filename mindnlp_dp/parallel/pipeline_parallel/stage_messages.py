"""Sends hidden states from a pipeline stage to the next one, and their gradients back; the pipeline calls it.

If two stages split a micro-batch in the same way, each rank sends to the rank with the same rank_in_stage of the other
stage. Otherwise the planner schedules which rows are sent (pipeline_schedules/resharding_schedule.py); every rank
computes the same schedule.

MindSpore issues all messages of a group on one stream of a device, in program order, and ignores tags; HCCL and NCCL
complete a message only when it is received. There, a stage holds its activations until the next stage is about to
receive them (:func:`~mindnlp_dp.pipeline_schedules.schedules.link_order`)::

    stage 0   F0 ─a0─▶ F1 (holds a1)   ◀─g0─  ─a1─▶ B0  F2 (holds a2)   ◀─g1─  ─a2─▶ B1  ...
    stage 1      a0─▶ F0 B0            ─g0─▶   a1─▶ F1 B1               ─g1─▶   a2─▶ F2  ...
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Optional

import numpy as np
from mindspore import Tensor

from mindnlp_dp.communication.p2p import ACTIVATIONS, PipelineP2P
from mindnlp_dp.parallel.device_mesh import DeviceMesh
from mindnlp_dp.pipeline_schedules.resharding_layouts import box_of, unit_tasks
from mindnlp_dp.pipeline_schedules.resharding_schedule import schedule_tasks
from mindnlp_dp.pipeline_schedules.schedules import BACKWARD, FORWARD, Action
from mindnlp_dp.runtime.arrays import dtype_name, from_host, to_host

Rows = tuple[int, int]

# (sender, receiver, rows), with ranks of ``mesh.model_parallel_group``; None stands for all rows that the sender has.
Move = tuple[int, int, Optional[Rows]]


class StageP2P:
    """Exchanges activations and gradients between this rank's stage and its neighbors.

    Attributes:
        p2p: the messages between two ranks.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.p2p = PipelineP2P(mesh.model_parallel_group)
        self._mesh = mesh
        self._rank, self._stage = mesh.model_parallel_group.rank, mesh.index("pp")
        self._moves = functools.lru_cache(maxsize=64)(self._moves_between)
        # Where messages are matched in order: what the next stage will receive and send, and the sends held until then.
        self._link: deque[Action] = deque()
        self._held: dict[int, Callable[[], None]] = {}

    def begin(self, link: Iterable[Action] = ()) -> None:
        """Begin an update, on all ranks; ``link`` are its messages with the next stage in that stage's order."""
        self.p2p.begin()
        self._link, self._held = deque(link if self.p2p.is_in_order else ()), {}

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

        Where messages are matched in order, activations may be held until it is their turn. ``x`` is None on a rank
        that has no rows.

        Raises:
            ValueError: stages differ, and ``x`` does not have the number of rows of this rank's shard.
        """
        send = functools.partial(self._send, x, stage, number, direction, num_rows=num_rows, note=note)
        if direction == ACTIVATIONS and self._link:
            self._held[number] = send
            self._send_held()
        else:
            send()

    def _send_held(self) -> None:
        """Send the activations that the next stage receives before it sends its next gradients, in its order."""
        while self._link and self._link[0][0] == FORWARD and self._link[0][1] in self._held:
            _, number = self._link.popleft()
            self._held.pop(number)()

    def _send(self, x: Any, stage: int, number: int, direction: int, *, num_rows: Optional[int], note: float) -> None:
        if x is None:
            return
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
        is_gradient = bool(self._link) and direction != ACTIVATIONS
        if is_gradient and (due := self._link.popleft()) != (BACKWARD, number):
            raise RuntimeError(
                f"rank {self._mesh.world.label()}: the gradients of micro-batch {number} are received before {due}"
            )
        parts: list[tuple[Rows, Any]] = []
        note = 0.0
        # In the order in which they are sent.
        for sender, receiver, rows in self._moves(stage, self._stage, num_rows):
            if receiver == self._rank:
                part, note = self.p2p.receive(sender, number, direction)
                parts.append((rows or (0, 0), part))
        if is_gradient:
            self._send_held()
        return _joined([part for _, part in sorted(parts, key=lambda item: item[0])]), note

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
