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
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Optional

import mindspore
from mindspore import Tensor
from mindspore.common._grad_function import _Function
from mindspore.ops.auto_generate import as_strided

from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.parallel.fully_sharded.unit_exchange import UnitExchanges, UnitWeight
from mindnlp_dp.parallel.mixed_precision import MixedPrecision
from mindnlp_dp.parallel.model_edits import module_at
from mindnlp_dp.parallel.row_loss_weights import RowLossWeights
from mindnlp_dp.runtime.computing_type import computing_in
from mindnlp_dp.runtime.pynative_executor import pynative_executor, recording
from mindnlp_dp.runtime.recompute import is_recomputing


class Units:
    """The units of a model; its :class:`~..sharded_model.ShardedModel` has them. The constructor is a collective.

    Args:
        group: the ranks that have the shards.
        weights: the loss weights of these ranks.
        keeps_gathered: whether layers keep their weights from the forward to the backward pass.
        precision: the type in which the model computes; None: float32.
    """

    def __init__(
        self,
        group: ProcessGroup,
        weights: RowLossWeights,
        *,
        keeps_gathered: bool = False,
        precision: Optional[MixedPrecision] = None,
    ) -> None:
        self.loss_weights, self.group, self.keeps_gathered = weights, group, keeps_gathered
        self.precision = precision
        if precision is not None:
            precision.units = self
        self.exchanges = UnitExchanges(group, "float32" if precision is None else precision.dtype)
        self.by_name: dict[str, Unit] = {}
        # Without the root unit, in the order of the model.
        self._layers: list[Unit] = []
        self.is_held = False
        self._current: Optional[Unit] = None

    def add(self, name: str, weights: Sequence[UnitWeight]) -> Unit:
        # The root unit is before the first layer.
        unit = self.by_name[name] = Unit(self, name, weights, number=len(self._layers) if name else -1)
        if name:
            self._layers.append(unit)
        return unit

    def bind(self, model: Any) -> None:
        """Find the units and their weights in the model, after its layers were replaced."""
        for unit in self.by_name.values():
            unit.module = module_at(model, unit.name)
            for weight in unit.weights:
                weight.bind(model)

    def enter_backward(self, unit: Optional[Unit]) -> None:
        """Release the weights that another unit has gathered for its backward pass, which is over."""
        if self._current is not None and self._current is not unit:
            self._current.release()
        self._current = unit

    def end_passes(self) -> None:
        """Release all weights, which are updated next."""
        self.enter_backward(None)
        self.cancel_gathers()

    def begin_next(self, unit: Unit, *, is_backward: bool) -> None:
        """Begin to gather the weights of the layer that follows, while this one computes."""
        number = unit.number + (-1 if is_backward else 1)
        # Which layers a backward pass needs is known from the one before.
        if 0 <= number < len(self._layers) and (self._layers[number].is_gathered_again or not is_backward):
            with recording(False):
                self._layers[number].exchange.begin_gather()

    def cancel_gathers(self) -> None:
        """Forget gathers that no layer has used, because it was left out."""
        for unit in self.by_name.values():
            unit.exchange.cancel_gather()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Gather all weights for this block, in which the model is like one in float32 on one rank. A collective."""
        if self.is_held:
            yield
            return
        self.end_passes()
        with contextlib.ExitStack() as stack:
            for unit in self.by_name.values():
                stack.enter_context(unit.installed(unit.gather(in_float32=True)))
            self.is_held = True
            try:
                yield
            finally:
                self.is_held = False


class Unit:
    """A module whose weights are gathered for its forward pass, and again for its backward pass."""

    def __init__(self, units: Units, name: str, weights: Sequence[UnitWeight], number: int) -> None:
        self.units, self.name, self.weights, self.number = units, name, weights, number
        self.exchange = units.exchanges.of_unit([weight for weight in weights if weight.is_sharded])
        # Whether the modules have full weights.
        self.is_in_full = False
        # Whether the last backward pass has gathered the weights again.
        self.is_gathered_again = False
        self._again: Optional[list[Tensor]] = None
        self.module: Any = None

    def forward(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward pass with gathered weights."""
        if self.units.is_held:
            return stock(*args, **kwargs)
        is_recorded, is_again = pynative_executor.grad_flag(), is_recomputing()
        if not self.name:
            self.units.end_passes()
        elif is_recorded and not is_again:
            self._check_is_within_model()
        full = self._gather_with_gradients() if is_recorded else self.gather()
        self.is_gathered_again |= is_again
        self.units.begin_next(self, is_backward=is_again)
        # Recomputation itself keeps nothing of this pass, and comes here again.
        keeps = not self.name or not is_recorded or self.units.keeps_gathered or _is_recomputed(self.module)
        with self.installed(full), contextlib.nullcontext() if keeps else self._handles(full):
            return self._in_low_precision(stock, args, kwargs)

    def _check_is_within_model(self) -> None:
        """Raise RuntimeError where the gradient would be divided by a scale that it was not multiplied by."""
        precision = self.units.precision
        if precision is not None and precision.scale != 1 and not self.units.by_name[""].is_in_full:
            raise RuntimeError(
                f"{self.name} is called outside of the forward pass of its model on rank {self.units.group.label()}, "
                'and param_dtype="float16" scales the gradient where it enters the model; call the model, and compute '
                "the loss from its outputs"
            )

    def _in_low_precision(self, stock: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a forward method; the model's own gets its inputs in its type, and returns float32."""
        precision = self.units.precision
        if precision is None or self.name:
            return stock(*args, **kwargs)
        with computing_in(getattr(mindspore, precision.dtype)):
            return precision.uncast(stock(*precision.cast(args), **precision.cast(kwargs)))

    @contextlib.contextmanager
    def installed(self, full: Sequence[Any]) -> Iterator[None]:
        """Put full weights into the modules in place of the shards, in this block."""
        shards = [weight.own for weight in self.weights]
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

    def gather(self, *, in_float32: bool = False) -> list[Tensor]:
        """Return all weights of the unit in full, in the type in which it computes, or in float32. A collective."""
        precision = None if in_float32 else self.units.precision
        with recording(False):
            sharded = iter(self.exchange.gather("float32" if in_float32 else "") if self.exchange.weights else ())
            found = []
            for weight in self.weights:
                if weight.is_sharded:
                    found.append(next(sharded))
                else:
                    found.append(weight.own if precision is None else precision.lowered(weight.checked()))
            return found

    def reduce(self, trained: Sequence[int], gradients: Sequence[Optional[Tensor]]) -> list[Optional[Tensor]]:
        """Return the gradients of this rank's parameters: sums of all ranks' of shards, its own of others."""
        precision = self.units.precision
        if precision is not None:
            gradients = [None if gradient is None else precision.unscaled(gradient) for gradient in gradients]
        found = dict(zip(trained, gradients))
        numbers = [number for number, weight in enumerate(self.weights) if weight.is_sharded]
        mine = [number for number in numbers if number in found]
        if mine:
            places, theirs = [numbers.index(number) for number in mine], [found[number] for number in mine]
            loss_weights = [self.units.loss_weights.factor(self.weights[number].summed_over) for number in mine]
            found.update(zip(mine, self.exchange.reduce(places, theirs, loss_weights)))
        return list(found.values())

    # Autograd.

    def _gather_with_gradients(self) -> list[Any]:
        full = self.gather()
        shards = [weight.own for weight in self.weights]
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
            self.is_gathered_again = True
            self.units.begin_next(self, is_backward=True)
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
    # The offset of a handle is within the weight, which is contiguous and begins its memory.
    return as_strided(full, kept.shape, kept.strides, kept.offset)


def _is_recomputed(module: Any) -> bool:
    return module.training and getattr(module, "forward_in_training", None) is not None


def calling(function: Callable[..., Any], *args: Any) -> Callable[[Any], Any]:
    """Return a function that replaces a module's forward method by function, which gets it after ``args``."""

    def make(stock: Callable[..., Any]) -> Callable[..., Any]:
        return functools.update_wrapper(functools.partial(function, *args, stock), stock)

    return make
