"""Gathers the shards of a unit's weights from all ranks, and reduces the gradients to those of the shards.

In host memory, sums are made in the order of the ranks. On devices nothing passes through the host, and a gather may
begin before its unit computes. Every rank sends as many elements as the rank that has most::

    rank 0   w₀ w₀ w₀ │ b₀        weights are cast to the type of the computation before they are sent, and
    rank 1   w₁ w₁ ·  │ b₁        gradients to float32
"""

from __future__ import annotations

import abc
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import mindspore
import numpy as np
from mindspore import Tensor

from mindnlp_dp.communication.gradient_channel import open_gradient_channel
from mindnlp_dp.communication.operations import Operation
from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.communication.transports.mindspore.mindspore_transport import MindSporeChannel
from mindnlp_dp.parallel.model_edits import module_at
from mindnlp_dp.runtime.arrays import dtype_name, from_host, read
from mindnlp_dp.runtime.shard_bounds import shard_bounds, split_evenly

# Exchanges in host memory are made in parts of this size, so that copies of large weights need little memory.
_PART_BYTES = 4 * 2**20


@dataclass
class UnitWeight:
    """A weight of a unit.

    Attributes:
        name: its name in the model.
        shape: its shape while the unit computes.
        paths: the modules that have it, each with its name there.
        is_sharded: whether ranks have shards of it; not if it has too few elements, or if ranks share no weights.
        summed_over: the axes over which its gradient is already summed when it comes to the unit.
    """

    name: str
    shape: tuple[int, ...]
    paths: Sequence[tuple[str, str]]
    is_sharded: bool = True
    summed_over: tuple[str, ...] = ()
    places: Sequence[tuple[Any, str]] = ()

    def bind(self, model: Any) -> None:
        """Find the modules in the model, after its layers were replaced."""
        self.places = [(module_at(model, path), attribute) for path, attribute in self.paths]

    @property
    def own(self) -> Any:
        """This rank's parameter: its shard, or the weight."""
        module, attribute = self.places[0]
        return module._parameters[attribute]

    def checked(self) -> Any:
        """Return this rank's parameter; raise ValueError if its type was changed."""
        parameter = self.own
        if dtype_name(parameter) != "float32":
            raise ValueError(
                f"{self.name!r} is of type {dtype_name(parameter)} now, and parameters of a fully sharded model, or of "
                "one with param_dtype, stay in float32; leave out fp16_full_eval, bf16_full_eval and model.to(dtype)"
            )
        return parameter


class UnitExchange(abc.ABC):
    """Exchanges the sharded weights of one unit among the ranks of a group.

    Args:
        weights: the sharded weights.
        dtype: the type in which they are gathered.
    """

    def __init__(self, group: ProcessGroup, weights: Sequence[UnitWeight], dtype: str) -> None:
        self.group, self.weights, self.dtype = group, weights, dtype
        self._bounds = [shard_bounds(math.prod(w.shape), group.world_size) for w in weights]

    @abc.abstractmethod
    def gather(self, dtype: str = "") -> list[Tensor]:
        """Return all weights in full, in another type if ``dtype`` says so. A collective."""

    @abc.abstractmethod
    def reduce(
        self, places: Sequence[int], gradients: Sequence[Optional[Tensor]], loss_weights: Sequence[float]
    ) -> list[Tensor]:
        """Return this rank's shards of the sums of all ranks' weighted gradients, in float32. A collective.

        ``gradients`` are those of the weights at ``places``, and ``loss_weights`` what each is multiplied by.
        """

    def begin_gather(self) -> None:  # noqa: B027 -- host memory is read at once
        """Begin the next :meth:`gather`. A collective."""

    def cancel_gather(self) -> None:  # noqa: B027
        """Forget a gather that was begun: the weights change."""


class HostExchange(UnitExchange):
    """Exchanges NumPy arrays; the bits do not depend on when ranks arrive."""

    def gather(self, dtype: str = "") -> list[Tensor]:
        rank, numpy_dtype = self.group.rank, np.dtype(dtype or self.dtype)
        mine = [read(weight.checked()) for weight in self.weights]
        found = [new_array(weight.shape, numpy_dtype) for weight in self.weights]
        for ranges in _parts(self._bounds, numpy_dtype.itemsize):
            row, begin = np.zeros(max(_counts(ranges)), numpy_dtype), 0
            for array, bounds, of_ranks in zip(mine, self._bounds, ranges):
                first, last = (place - bounds[rank] for place in of_ranks[rank])
                row[begin : begin + last - first] = array[first:last]
                begin += last - first
            rows, begins = self.group.all_gather(row, every_step=True), [0] * self.group.world_size
            for full, of_ranks in zip(found, ranges):
                flat = full.reshape(-1)
                for other, (first, last) in enumerate(of_ranks):
                    flat[first:last] = rows[other][begins[other] : begins[other] + last - first]
                    begins[other] += last - first
        return [from_host(full, dtype or self.dtype) for full in found]

    def reduce(
        self, places: Sequence[int], gradients: Sequence[Optional[Tensor]], loss_weights: Sequence[float]
    ) -> list[Tensor]:
        rank, bounds = self.group.rank, [self._bounds[place] for place in places]
        arrays = [None if gradient is None else read(gradient).reshape(-1) for gradient in gradients]
        found = [np.empty(b[rank + 1] - b[rank], np.float32) for b in bounds]
        for ranges in _parts(bounds, 4):
            mine = self._summed(*self._weighted(arrays, ranges, loss_weights))
            begin = 0
            for array, b, of_ranks in zip(found, bounds, ranges):
                first, last = (place - b[rank] for place in of_ranks[rank])
                array[first:last] = mine[begin : begin + last - first]
                begin += last - first
        return [from_host(array, "float32") for array in found]

    def _weighted(
        self,
        arrays: Sequence[Optional[np.ndarray]],
        ranges: Ranges,
        loss_weights: Sequence[float],
    ) -> tuple[np.ndarray, list[int]]:
        """Return the weighted gradients at each rank's ranges, one rank after the other, and their numbers."""
        counts = _counts(ranges)
        sent, begin = np.zeros(sum(counts), np.float32), 0
        for rank in range(len(counts)):
            for array, of_ranks, loss_weight in zip(arrays, ranges, loss_weights):
                first, last = of_ranks[rank]
                # With a weight of zero nothing may be added: zero times NaN would be NaN.
                if array is not None and loss_weight > 0:
                    np.multiply(array[first:last], np.float32(loss_weight), out=sent[begin : begin + last - first])
                begin += last - first
        return sent, counts

    def _summed(self, sent: np.ndarray, counts: Sequence[int]) -> np.ndarray:
        """Return this rank's range of the sum of all ranks' ``sent``, added in the order of the ranks."""
        group = self.group
        if group.library_without(Operation.ALL_TO_ALL):
            begin = sum(counts[: group.rank])
            total: np.ndarray = group.all_reduce(sent, every_step=True)
            return total[begin : begin + counts[group.rank]]
        rows = group.exchange_rows(sent, counts, [counts[group.rank]] * group.world_size)
        first, *others = rows.reshape(group.world_size, -1)
        for other in others:
            first += other
        return np.asarray(first)


class DeviceExchange(UnitExchange):
    """Exchanges tensors that stay on their device; each shard is padded to the length of the longest one."""

    def __init__(
        self, group: ProcessGroup, weights: Sequence[UnitWeight], dtype: str, channel: MindSporeChannel
    ) -> None:
        super().__init__(group, weights, dtype)
        self._channel = channel
        self._lengths = [max(end - begin for begin, end in zip(b, b[1:])) for b in self._bounds]
        self._begun: Optional[tuple[Any, Any]] = None

    def begin_gather(self) -> None:
        if self.weights and self._begun is None:
            self._begun = self._begin(self.dtype)

    def _begin(self, dtype: str) -> tuple[Any, Any]:
        mine = [self._padded(w.checked(), length) for w, length in zip(self.weights, self._lengths)]
        wire = dtype if self._channel.reduces_natively(dtype) else "float32"
        return self._channel.all_gather_flat_async(_joined(mine).astype(getattr(mindspore, wire)))

    def cancel_gather(self) -> None:
        begun, self._begun = self._begun, None
        # The device may still write to its memory.
        if begun is not None and begun[1] is not None:
            begun[1].wait()

    def gather(self, dtype: str = "") -> list[Tensor]:
        if dtype not in ("", self.dtype):
            self.cancel_gather()
        (flat, handle), self._begun = self._begun or self._begin(dtype or self.dtype), None
        if handle is not None:
            handle.wait()
        rows, begin, found = flat.reshape(self.group.world_size, -1), 0, []
        for weight, length, bounds in zip(self.weights, self._lengths, self._bounds):
            columns = rows[:, begin : begin + length]
            if length * len(rows) != math.prod(weight.shape):
                sizes = [end - first for first, end in zip(bounds, bounds[1:])]
                columns = _joined([columns[rank, :size] for rank, size in enumerate(sizes)])
            # A copy: a view would keep the memory of all weights, and begin within it.
            full = columns.contiguous().reshape(weight.shape)
            found.append(full.astype(getattr(mindspore, dtype or self.dtype)))
            begin += length
        return found

    def reduce(
        self, places: Sequence[int], gradients: Sequence[Optional[Tensor]], loss_weights: Sequence[float]
    ) -> list[Tensor]:
        # A tensor is data; for a Python number an operator would be compiled for each value.
        factors = {loss_weight: Tensor(np.float32(loss_weight)) for loss_weight in set(loss_weights)}
        rows = [
            self._rows(gradient if loss_weight > 0 else None, self._bounds[place], self._lengths[place])
            for place, gradient, loss_weight in zip(places, gradients, loss_weights)
        ]
        if len(factors) > 1:
            rows = [row * factors[loss_weight] for row, loss_weight in zip(rows, loss_weights)]
        sent = mindspore.ops.cat(rows, 1) if len(rows) > 1 else rows[0]
        if len(factors) == 1:
            sent = sent * factors[loss_weights[0]]
        mine, handle = self._channel.reduce_scatter_async(sent.reshape(-1))
        if handle is not None:
            handle.wait()
        begin, found = 0, []
        for place in places:
            size = self._bounds[place][self.group.rank + 1] - self._bounds[place][self.group.rank]
            found.append(mine[begin : begin + size])
            begin += self._lengths[place]
        return found

    def _rows(self, gradient: Optional[Tensor], bounds: Sequence[int], length: int) -> Tensor:
        """Return a row of a gradient for each rank, padded with zeros to ``length``."""
        size = self.group.world_size
        if gradient is None:
            return mindspore.ops.zeros((size, length), mindspore.float32)
        flat = gradient.reshape(-1).astype(mindspore.float32)
        if length * size != bounds[-1]:
            flat = _joined([self._padded(flat[begin:end], length) for begin, end in zip(bounds, bounds[1:])])
        return flat.reshape(size, length)

    @staticmethod
    def _padded(flat: Tensor, length: int) -> Tensor:
        missing = length - flat.shape[0]
        return flat if not missing else _joined([flat, mindspore.ops.zeros((missing,), flat.dtype)])


class UnitExchanges:
    """Makes the exchanges of a model's units. The constructor is a collective."""

    def __init__(self, group: ProcessGroup, dtype: str) -> None:
        self._group, self._dtype = group, dtype
        channel = open_gradient_channel(group) if group.on_device else None
        self._channel = channel if isinstance(channel, MindSporeChannel) else None

    def of_unit(self, weights: Sequence[UnitWeight]) -> UnitExchange:
        if self._channel is not None:
            return DeviceExchange(self._group, weights, self._dtype, self._channel)
        return HostExchange(self._group, weights, self._dtype)


# For each weight, the first and the last position of each rank's range, which is not included.
Ranges = list[list[tuple[int, int]]]


def _parts(bounds: Sequence[Sequence[int]], itemsize: int) -> Iterator[Ranges]:
    """Yield parts of weights whose shards have these bounds, with an equal share of each shard."""
    num_parts = itemsize * sum(b[-1] for b in bounds) // _PART_BYTES + 1
    for part in range(num_parts):
        yield [[_part_of(begin, end, num_parts, part) for begin, end in zip(b, b[1:])] for b in bounds]


def _part_of(begin: int, end: int, num_parts: int, part: int) -> tuple[int, int]:
    first, last = split_evenly(end - begin, num_parts, part)
    return begin + first, begin + last


def _counts(ranges: Ranges) -> list[int]:
    """Return how many elements each rank has in its ranges."""
    return [sum(last - first for first, last in of_rank) for of_rank in zip(*ranges)]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return mindspore.ops.cat(list(parts)) if len(parts) > 1 else parts[0]


def new_array(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Return memory for a full weight."""
    return np.empty(shape, dtype)
