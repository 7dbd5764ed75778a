"""Gathers the weights of a fully sharded model, unit by unit, in its forward and backward passes.

A unit is a layer, or all that is in no layer (the root unit). Autograd sees the gather as an operator, whose backward
pass is a reduce-scatter (Rajbhandari et al., *ZeRO*, 2020, stage 3)::

    forward    shards ── all-gather ──▶ weights ── layer ──▶ output
    backward   shards ── all-gather ──▶ weights ── layer's backward pass ──▶ gradients ── reduce-scatter ──▶ of shards

Between both, autograd keeps a handle in place of each weight of a layer, and gathers it again when it needs it. The
weights of the root unit stay from the forward to the backward pass.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Optional

import mindspore
import numpy as np
from mindspore import Tensor
from mindspore.common._grad_function import _Function

from mindnlp_dp.communication.operations import Operation
from mindnlp_dp.parallel.row_loss_weights import RowLossWeights
from mindnlp_dp.runtime.arrays import dtype_name, from_host, read
from mindnlp_dp.runtime.pynative_executor import pynative_executor
from mindnlp_dp.runtime.shard_bounds import shard_bounds


class UnitWeight(NamedTuple):
    """A weight of a unit: its name, its full shape, and the modules that have it, with its name in each."""

    name: str
    shape: tuple[int, ...]
    places: tuple[tuple[Any, str], ...]

    @property
    def shard(self) -> Any:
        module, attribute = self.places[0]
        return module._parameters[attribute]


class Units:
    """The units of a model; its :class:`~..sharded_model.ShardedModel` has them.

    Args:
        weights: the loss weights of the ranks that have the shards.
        keeps_gathered: whether layers keep their weights from the forward to the backward pass.
    """

    def __init__(self, weights: RowLossWeights, *, keeps_gathered: bool = False) -> None:
        self.loss_weights, self.group, self.keeps_gathered = weights, weights.group, keeps_gathered
        self.by_name: dict[str, Unit] = {}
        self.is_held = False
        self._current: Optional[Unit] = None

    def add(self, name: str, weights: Sequence[UnitWeight]) -> Unit:
        self.by_name[name] = Unit(self, name, weights)
        return self.by_name[name]

    def enter_backward(self, unit: Optional[Unit]) -> None:
        """Release the weights that another unit has gathered for its backward pass, which is over."""
        if self._current is not None and self._current is not unit:
            self._current.release()
        self._current = unit

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Gather all weights for this block, in which the model is like one that is not sharded. A collective."""
        if self.is_held:
            yield
            return
        with contextlib.ExitStack() as stack:
            for unit in self.by_name.values():
                stack.enter_context(unit.installed(unit.gather()))
            self.is_held = True
            try:
                yield
            finally:
                self.is_held = False


class Unit:
    """A module whose weights are gathered for its forward pass, and again for its backward pass."""

    def __init__(self, units: Units, name: str, weights: Sequence[UnitWeight]) -> None:
        self.units, self.name, self.weights = units, name, weights
        self._bounds = [shard_bounds(math.prod(w.shape), units.group.world_size) for w in weights]
        # Whether the modules have full weights.
        self.is_in_full = False
        self._again: Optional[list[Tensor]] = None

    def forward(self, module: Any, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward pass with gathered weights."""
        if self.units.is_held:
            return stock(*args, **kwargs)
        is_recorded = pynative_executor.grad_flag()
        full = self._gather_with_gradients() if is_recorded else self.gather()
        # Recomputation itself keeps nothing of this pass, and comes here again.
        keeps = not self.name or not is_recorded or self.units.keeps_gathered or _is_recomputed(module)
        with self.installed(full), contextlib.nullcontext() if keeps else self._handles(full):
            return stock(*args, **kwargs)

    @contextlib.contextmanager
    def installed(self, full: Sequence[Any]) -> Iterator[None]:
        """Put full weights into the modules in place of the shards, in this block."""
        shards = [weight.shard for weight in self.weights]
        for tensor, shard in zip(full, shards):
            # Models and losses ask their weights.
            tensor.requires_grad = shard.requires_grad
        self._install(full)
        self.is_in_full = True
        try:
            yield
        finally:
            self.is_in_full = False
            self._install(shards)

    def _install(self, tensors: Sequence[Any]) -> None:
        for weight, tensor in zip(self.weights, tensors):
            for module, attribute in weight.places:
                module._parameters[attribute] = tensor

    # The collectives.

    def gather(self) -> list[Tensor]:
        """Return all weights of the unit in full. A collective."""
        group, mine = self.units.group, [self._on_host(weight) for weight in self.weights]
        # All ranks send as many elements as the rank that has most.
        row = np.zeros(max(self._counts(self._bounds)), np.float32)
        np.concatenate(mine, out=row[: sum(map(len, mine))])
        rows = group.all_gather(row, every_step=True)
        begins, found = [0] * len(rows), []
        for weight, bounds in zip(self.weights, self._bounds):
            full = new_array(weight.shape)
            flat = full.reshape(-1)
            for rank, (begin, end) in enumerate(zip(bounds, bounds[1:])):
                flat[begin:end] = rows[rank][begins[rank] : begins[rank] + end - begin]
                begins[rank] += end - begin
            found.append(from_host(full, "float32"))
        return found

    def _counts(self, bounds: Sequence[Sequence[int]]) -> list[int]:
        """Return the numbers of elements of each rank's shards."""
        return [sum(b[rank + 1] - b[rank] for b in bounds) for rank in range(self.units.group.world_size)]

    def _on_host(self, weight: UnitWeight) -> np.ndarray:
        shard = weight.shard
        if dtype_name(shard) != "float32":
            raise ValueError(
                f"{weight.name!r} is of type {dtype_name(shard)} now, and a fully sharded model computes in float32; "
                "leave out fp16_full_eval, bf16_full_eval and model.to(dtype)"
            )
        return read(shard)

    def reduce(self, trained: Sequence[int], gradients: Sequence[Optional[Tensor]]) -> list[Tensor]:
        """Return this rank's shards of the weighted sums of all ranks' gradients. A collective."""
        group, loss_weight = self.units.group, self.units.loss_weights.own
        bounds = [self._bounds[index] for index in trained]
        counts = self._counts(bounds)
        sent, begin = np.zeros(sum(counts), np.float32), 0
        arrays = [None if gradient is None else read(gradient).reshape(-1) for gradient in gradients]
        for rank in range(group.world_size):
            for array, b in zip(arrays, bounds):
                size = b[rank + 1] - b[rank]
                # With a weight of zero nothing may be added: zero times NaN would be NaN.
                if array is not None and loss_weight > 0:
                    np.multiply(array[b[rank] : b[rank + 1]], np.float32(loss_weight), out=sent[begin : begin + size])
                begin += size
        mine, ends = self._summed(sent, counts), np.cumsum([0, *(b[group.rank + 1] - b[group.rank] for b in bounds)])
        return [from_host(mine[first:last].copy(), "float32") for first, last in zip(ends, ends[1:])]

    def _summed(self, sent: np.ndarray, counts: Sequence[int]) -> np.ndarray:
        """Return this rank's range of the sum of all ranks' ``sent``, added in the order of the ranks."""
        group = self.units.group
        if group.library_without(Operation.ALL_TO_ALL):
            begin = sum(counts[: group.rank])
            total: np.ndarray = group.all_reduce(sent, every_step=True)
            return total[begin : begin + counts[group.rank]]
        rows = group.exchange_rows(sent, counts, [counts[group.rank]] * group.world_size)
        first, *others = rows.reshape(group.world_size, -1)
        for other in others:
            first += other
        return np.asarray(first)

    # Autograd.

    def _gather_with_gradients(self) -> list[Any]:
        full = self.gather()
        shards = [weight.shard for weight in self.weights]
        trained = [index for index, shard in enumerate(shards) if shard.requires_grad]
        if trained:
            call = _Call(self, trained, [full[index] for index in trained])
            outputs = _Gather.apply(call, *(shards[index] for index in trained))
            for index, output in zip(trained, outputs if isinstance(outputs, (tuple, list)) else [outputs]):
                full[index] = output
        return full

    def _handles(self, full: Sequence[Tensor]) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which autograd keeps handles in place of these weights, and of views of them."""
        begins = [tensor.data_ptr() for tensor in full]
        ranges = [(begin, begin + tensor.nbytes) for begin, tensor in zip(begins, full)]

        def pack(tensor: Any) -> Any:
            address = tensor.data_ptr() if tensor.size else None
            for index, (begin, end) in enumerate(ranges if address is not None else ()):
                if begin <= address < end:
                    offset = (address - begin) // tensor.itemsize
                    return _Handle(self, index, tuple(tensor.shape), tuple(tensor.stride()), offset)
            return tensor

        return mindspore.saved_tensors_hooks(pack, _unpacked)  # type: ignore[no-any-return]

    def again(self, index: int) -> Tensor:
        """Return a weight for the backward pass, which gathers the unit if it has not yet. A collective then."""
        self.units.enter_backward(self)
        if self._again is None:
            self._again = self.gather()
        return self._again[index]

    def release(self) -> None:
        self._again = None


class _Call:
    """One gather of a unit's weights: the numbers of those that train, and their tensors until autograd has them."""

    def __init__(self, unit: Unit, trained: Sequence[int], full: list[Tensor]) -> None:
        self.unit, self.trained, self._full = unit, trained, full

    def take(self) -> tuple[Tensor, ...]:
        full, self._full = tuple(self._full), []
        return full


class _Gather(_Function):
    """Turns shards into full weights; the gradients of the weights are reduced to those of the shards."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *shards: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        return call.take()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        unit = ctx.call.unit
        found = unit.reduce(ctx.call.trained, gradients)
        unit.release()
        return (None, *found)


class _Handle(NamedTuple):
    """What autograd keeps in place of a weight, or of a view of it."""

    unit: Unit
    number: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


def _unpacked(kept: Any) -> Any:
    if not isinstance(kept, _Handle):
        return kept
    full = kept.unit.again(kept.number)
    if kept.shape == tuple(full.shape) and kept.strides == tuple(full.stride()) and not kept.offset:
        return full
    return mindspore.ops.as_strided(full, kept.shape, kept.strides, kept.offset)


def _is_recomputed(module: Any) -> bool:
    return module.training and getattr(module, "forward_in_training", None) is not None


def new_array(shape: Sequence[int]) -> np.ndarray:
    """Return memory for a full weight."""
    return np.empty(shape, np.float32)


def calling(function: Callable[..., Any], *args: Any) -> Callable[[Any], Any]:
    """Return a function that replaces a module's forward method by function, which gets it after ``args``."""

    def make(stock: Callable[..., Any]) -> Callable[..., Any]:
        return functools.update_wrapper(functools.partial(function, *args, stock), stock)

    return make
