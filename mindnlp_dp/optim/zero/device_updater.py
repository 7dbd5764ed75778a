"""This module shards the update among devices (ZeRO 1 and 2): each updates its slices of the flat buckets.

A bucket is one flat tensor, split into as many equal slices as there are ranks (the end is padded). Rank r updates
slice r::

    gradients │ 0 0 0 0 │ 1 1 1 1 │   stage 2: a reduce-scatter leaves slice r on rank r; stage 1: an all-reduce
    state     │ 0 0 0 0 │             for the pieces that this rank updates, one set of tensors per piece
    weights   │ 0 0 0 0 │ 1 1 1 1 │   all-gathered, and copied to the parameters

MindNLP's own code updates the pieces as if they were parameters, so it must update each element independently. Pieces
are copied from the parameters before every update, so a value that the user assigns between updates is kept.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import mindspore
import numpy as np

from mindnlp_dp.communication.lazy_arrays import materialize
from mindnlp_dp.communication.transports.mindspore.mindspore_transport import MindSporeChannel
from mindnlp_dp.data_parallel.buckets.bucket import Bucket
from mindnlp_dp.data_parallel.buckets.bucket_layout import ParameterSlice
from mindnlp_dp.data_parallel.buckets.device_bucket import DeviceBucket
from mindnlp_dp.data_parallel.synchronizer import GradientSynchronizer
from mindnlp_dp.optim.updater import MindNLPUpdater, Updater
from mindnlp_dp.optim.zero.state_registry import gather_array
from mindnlp_dp.runtime.arrays import copy_of, dtype_name, from_host, number_of, set_weight, to_host
from mindnlp_dp.runtime.mindnlp_api import mindnlp_api
from mindnlp_dp.runtime.sharded_array import FlatLayout, ShardedArray


@dataclass(frozen=True)
class _OwnPiece:
    """A piece of a parameter, at ``where.offset`` in this rank's slice, and the tensor that the optimizer updates."""

    where: ParameterSlice
    weight: Any


# The type of ``gradients`` in this updater: this rank's slices by bucket number, and a mask of the used parameters.
Slices = tuple[dict[int, Any], np.ndarray]


class DeviceUpdater(MindNLPUpdater):
    """Shards the update on devices, for MindNLP optimizers that update each element independently.

    Args:
        zero_stage: The ZeRO stage: 1 or 2.
    """

    reads_buckets = True

    def __init__(
        self, optimizer: Any, synchronizer: GradientSynchronizer, zero_stage: int, scheduler: Any = None
    ) -> None:
        super().__init__(optimizer, synchronizer.parameters, scheduler)
        self.zero_stage = zero_stage
        self._sync = synchronizer
        self._group = synchronizer.group
        self._shapes = [tuple(p.shape) for p in self.parameters]
        self._pieces: list[list[_OwnPiece]] = []
        self._state: dict[Any, dict[str, Any]] = defaultdict(dict)
        self._packed: Sequence[Bucket] = ()
        self._buckets: list[DeviceBucket] = []
        # The names and types of each parameter's state; None before its first update. The same on every rank.
        self._types: list[Optional[dict[str, Optional[str]]]] = [None for _ in self.parameters]
        synchronizer.scatter, synchronizer.keeps_tensors = zero_stage == 2, True
        synchronizer.before_packing = self._release_views
        self._arrange()

    def _release_views(self) -> None:
        self._packed, self._buckets = (), []

    def _arrange(self) -> None:
        """Create the pieces of the current buckets, and move the existing state to them. A collective."""
        state = {index: self._full_state(index) for index in range(len(self.parameters)) if self._types[index]}
        self._packed = self._sync.buckets
        self._buckets = [bucket for bucket in self._packed if isinstance(bucket, DeviceBucket)]
        self._pieces = [self._own_pieces(bucket) for bucket in self._buckets]
        self._state.clear()
        for index, full in state.items():
            self._put(index, full)
        self._adopt_state()

    def _own_pieces(self, bucket: DeviceBucket) -> list[_OwnPiece]:
        first, last = bucket.own_range
        pieces, begin = [], 0
        for slot in bucket.layout.slots:
            start, stop = max(first - begin, 0), min(last - begin, slot.numel)
            if start < stop:
                where = ParameterSlice(slot.index, start, stop, begin + start - first)
                pieces.append(_OwnPiece(where, mindnlp_api().nn.Parameter(self._part_of_weight(where))))
            begin += slot.numel
        return pieces

    def _part_of_weight(self, where: ParameterSlice) -> Any:
        flat = self.parameters[where.index].reshape(-1)
        return copy_of(flat[where.start : where.stop])

    # The update.

    def receive(self, gradients: Optional[np.ndarray], synchronizer: Any) -> Optional[Slices]:
        used = gradients
        self._sum_of_squares = synchronizer.sum_of_squares
        if self._sync.buckets is not self._packed:
            self._arrange()
        if used is None:
            return None
        slices = {
            number: bucket.own_slice
            for number, bucket in enumerate(self._buckets)
            if any(used[slot.index] for slot in bucket.layout.slots)
        }
        return slices, used

    @property
    def _channel(self) -> MindSporeChannel:
        # It is not stored: a new channel is opened after a failure.
        channel = self._sync.channel
        assert isinstance(channel, MindSporeChannel)
        return channel

    def clip(self, gradients: Any, max_norm: float) -> tuple[Any, float]:
        return Updater.clip(self, gradients, max_norm)

    def scale(self, gradients: Any, factor: float) -> Any:
        slices, used = gradients
        if factor != 1:
            # A tensor is data; for a Python number an operator would be compiled for each value.
            scale = mindspore.Tensor(np.float32(factor))
            slices = {number: (part * scale).astype(part.dtype) for number, part in slices.items()}
        return slices, used

    def are_finite(self, gradients: Any) -> bool:
        return math.isfinite(self.norm(gradients))

    def norm(self, gradients: Any) -> float:
        """Return the norm of all gradients, which the exchange has read, unless it had to be repeated.

        Then every rank sums its slices, and the host reads one number.
        """
        if self._sum_of_squares is not None:
            return math.sqrt(self._sum_of_squares)
        squares = [(part.astype(mindspore.float32) ** 2).sum() for part in gradients[0].values()]
        mine = mindspore.ops.stack(squares).sum() if squares else mindspore.Tensor(np.float32(0))
        return math.sqrt(number_of(self._group.all_reduce(mine.reshape(1), every_step=True)))

    def update(self, gradients: Any) -> None:
        slices, used = gradients
        self._adopt_state()
        pieces = []
        for number, part in slices.items():
            for piece in self._pieces[number]:
                if used[piece.where.index]:
                    set_weight(piece.weight, self._part_of_weight(piece.where))
                    piece.weight.grad = copy_of(part[piece.where.flat])
                    pieces.append(piece)
        with self._in_place_of_parameters(pieces):
            self.optimizer.step()
        for piece in pieces:
            piece.weight.grad = None
        self._learn_types(used)
        for number in slices:
            self._publish(number, used)

    @contextlib.contextmanager
    def _in_place_of_parameters(self, pieces: list[_OwnPiece]) -> Iterator[None]:
        """Replace the optimizer's parameters and state by these pieces and their state, inside the context."""
        groups, state = self.optimizer.param_groups, self.optimizer.state
        everything = [group["params"] for group in groups]
        numbers = {id(p): number for number, full in enumerate(everything) for p in full}
        try:
            self.optimizer.state = self._state
            for group in groups:
                group["params"] = []
            for piece in pieces:
                number = numbers.get(id(self.parameters[piece.where.index]))
                if number is not None:
                    groups[number]["params"].append(piece.weight)
            yield
        finally:
            self.optimizer.state = state
            for group, full in zip(groups, everything):
                group["params"] = full

    def _publish(self, number: int, used: np.ndarray) -> None:
        """Give the new weights of a bucket to every rank. A collective."""
        bucket = self._buckets[number]
        first, last = bucket.own_range
        parts = [
            piece.weight if used[piece.where.index] else self._part_of_weight(piece.where)
            for piece in self._pieces[number]
        ]
        length = sum(piece.where.stop - piece.where.start for piece in self._pieces[number])
        if length < last - first:
            dtype = getattr(mindspore, bucket.layout.dtype)
            parts.append(mindspore.ops.zeros((last - first - length,), dtype))
        mine = mindspore.ops.cat(parts) if len(parts) > 1 else copy_of(parts[0])
        full = self._channel.all_gather_flat(mine)
        begin = 0
        for slot in bucket.layout.slots:
            if used[slot.index] and slot.numel:
                part = full[begin : begin + slot.numel].reshape(slot.shape)
                set_weight(self.parameters[slot.index], copy_of(part))
            begin += slot.numel

    # The optimizer's state.

    def _adopt_state(self) -> None:
        """Move state from the optimizer to the pieces: ``load_state_dict`` creates state for full parameters."""
        if not self.optimizer.state:
            return
        by_id = {id(p): state for p, state in self.optimizer.state.items()}
        for index, parameter in enumerate(self.parameters):
            self._put(index, by_id.get(id(parameter)) or {})
        self.optimizer.state.clear()

    def _learn_types(self, used: np.ndarray) -> None:
        """Record which state the optimizer has created for new parameters; ranks with a piece tell the others."""
        new = [index for index in np.flatnonzero(used) if self._types[index] is None]
        if not new:
            return
        mine = {
            piece.where.index: {
                name: _array_type(value, piece.weight) for name, value in self._state[piece.weight].items()
            }
            for pieces in self._pieces
            for piece in pieces
            if piece.where.index in new
        }
        everyone = self._group.all_gather_object(mine)
        for index in new:
            self._types[index] = next((theirs[index] for theirs in everyone if index in theirs), {})

    def _own(self, index: int) -> list[_OwnPiece]:
        return [piece for pieces in self._pieces for piece in pieces if piece.where.index == index]

    def _full_state(self, index: int, *, keep: bool = True, sharded: bool = False) -> dict[str, Any]:
        """Return the full state of a parameter, from all ranks' pieces; a collective of all ranks.

        With ``sharded``, the arrays are not gathered.
        """
        full: dict[str, Any] = {}
        own, numel = self._own(index), math.prod(self._shapes[index])
        for name, dtype in (self._types[index] or {}).items():
            if dtype is None:
                values = self._group.all_gather_object([self._state[piece.weight][name] for piece in own])
                full[name] = next(value for theirs in values for value in theirs)
                continue
            parts = [(piece.where, to_host(self._state[piece.weight][name])) for piece in own]
            if sharded:
                pieces = [(where.start, part) for where, part in parts]
                full[name] = ShardedArray(FlatLayout(self._shapes[index]), dtype, pieces)
                continue
            array = gather_array(parts, numel, _host_type(dtype), self._group)
            if keep:
                full[name] = from_host(array.reshape(self._shapes[index]), dtype)
        return full

    def _put(self, index: int, state: Mapping[str, Any]) -> None:
        """Store the parts of a parameter's full state that belong to this rank's pieces."""
        values = {name: materialize(value) for name, value in state.items()}
        parameter = self.parameters[index]
        types = self._types[index] = {name: _array_type(value, parameter) for name, value in values.items()} or None
        for piece in self._own(index):
            mine = self._state[piece.weight]
            mine.clear()
            for name, dtype in (types or {}).items():
                value = values[name]
                if dtype is not None:
                    flat = to_host(value).reshape(-1)[piece.where.start : piece.where.stop]
                    value = from_host(flat.copy(), dtype)
                mine[name] = value

    def optimizer_state(self, *, keep: bool = True, sharded: bool = False) -> dict[str, Any]:
        self._adopt_state()
        places = {id(p): index for index, p in enumerate(self.parameters)}
        everything = [p for group in self.optimizer.param_groups for p in group["params"]]
        indices = {number: places.get(id(p)) for number, p in enumerate(everything)}
        state = {
            n: self._full_state(i, keep=keep, sharded=sharded)
            for n, i in indices.items()
            if i is not None and self._types[i]
        }
        return {"state": state, "param_groups": self.optimizer.state_dict()["param_groups"]}

    def load_optimizer_state(self, saved: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict({"state": {}, "param_groups": saved["param_groups"]})
        places = {id(p): index for index, p in enumerate(self.parameters)}
        everything = [p for group in self.optimizer.param_groups for p in group["params"]]
        self._state.clear()
        self._types = [None for _ in self.parameters]
        for number, state in saved["state"].items():
            index = places.get(id(everything[int(number)]))
            if index is not None:
                self._put(index, state)


def _host_type(dtype: str) -> Any:
    # to_host() converts bfloat16 to float32.
    return np.dtype({"bfloat16": "float32"}.get(dtype, dtype))


def _array_type(value: Any, weight: Any) -> Optional[str]:
    """Return the type of a state that has one value per element of a weight; None for others, such as a step."""
    shape = getattr(value, "shape", None)
    return dtype_name(value) if shape is not None and tuple(shape) == tuple(weight.shape) else None
