"""This module implements optimizers on segments of flat arrays, in place; the flat updater (flat_updater.py) calls it.

A rule changes the weights and the state of segments, with the hyperparameters of their groups. The resulting bits do
not depend on how the arrays are split into segments.

AdamW and Adam run MindSpore's own kernel (``ops.Adam``) on long arrays: MindNLP 0.4.1 calls it for every parameter,
which takes several times as long. MindNLP's SGD loses the momentum between two updates; here SGD is PyTorch's.
"""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

import mindspore
import numpy as np

from mindnlp_dp.data_parallel.buckets.bucket_layout import ParameterSlice
from mindnlp_dp.kernels.matmul import product
from mindnlp_dp.optim.fused.adam_kernel import kernel, step_size
from mindnlp_dp.optim.fused.block_sums import BlockSums
from mindnlp_dp.optim.newton_schulz import adjustment, directions, multiplications, orthogonalize
from mindnlp_dp.runtime.arrays import number_of

Group = dict[str, Any]


@dataclass
class Segment:
    """Elements that are updated together, and are consecutive in each array.

    Attributes:
        parts: The pieces of parameters in the segment, with their places in these arrays.
        tensors: MindSpore tensors over the arrays, which a rule creates once.
    """

    weights: np.ndarray
    gradient: np.ndarray
    state: dict[str, np.ndarray]
    parts: Sequence[ParameterSlice]
    tensors: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class UpdateContext:
    """Holds the inputs of one update that are not part of a segment.

    Attributes:
        scale: The factor of the gradients, which clips them.
        scratch: Temporary memory, as long as the longest segment.
        groups: The optimizer's group of each parameter.
        steps: The number of updates of each parameter, this one included.
        blocks: The block sums of the parameters, for norms.
        add: A function that combines block sums over the ranks that shard the update.
        used: A mask of the parameters that are updated.
        shapes: The shapes of the parameters.
        by_owner: A function that applies another one to full parameters (``MatrixOwners.apply``).
    """

    scale: float
    scratch: np.ndarray
    groups: Sequence[Group]
    steps: Sequence[int]
    blocks: BlockSums
    add: Callable[[np.ndarray], np.ndarray]
    used: np.ndarray
    shapes: Sequence[tuple[int, ...]]
    by_owner: Callable[[np.ndarray, Mapping[int, int], Callable[[int, np.ndarray], np.ndarray]], np.ndarray]


class Rule(abc.ABC):
    """Interface of an optimizer on flat arrays.

    Attributes:
        state_names: The names of its state arrays, as in the optimizer's ``state_dict``.
        counts_steps: Whether its state contains "step".
    """

    state_names: tuple[str, ...] = ()
    counts_steps = False

    def names_of(self, group: Optional[Group]) -> tuple[str, ...]:
        """Return the names of the state arrays that a parameter of this group has."""
        return self.state_names

    @abc.abstractmethod
    def key(self, group: Group, step: int) -> Hashable:
        """Return a key; consecutive parameters in memory that have the same key are updated as one segment."""

    @abc.abstractmethod
    def apply(self, segments: Sequence[Segment], update: UpdateContext) -> None:
        """Change weights and state in place. A collective if ranks shard the update."""


@functools.lru_cache(maxsize=64)
def _scalar(value: float) -> Any:
    # A tensor is data; for a Python number MindSpore would compile and keep an operator for each value.
    return mindspore.Tensor(np.float32(value))


def _runs(segment: Segment, value_of: Callable[[int], float]) -> Iterator[tuple[slice, float]]:
    """Yield slices of a segment whose parameters have the same ``value_of``, and this value; skip the value 0."""
    begin, end, value = 0, 0, 0.0
    for part in segment.parts:
        other = value_of(part.index)
        if other != value:
            if value and end > begin:
                yield slice(begin, end), value
            begin, value = part.offset, other
        end = part.flat.stop
    if value and end > begin:
        yield slice(begin, end), value


class AdamRule(Rule):
    """AdamW (``decoupled``: weight decay is separate from the gradient) and Adam (decay is part of the gradient).

    Epsilon is added to the root of the second moment: after its bias correction (``epsilon_is_corrected``), as in
    PyTorch and MindNLP 0.5, or before it, as in MindSpore's kernel and MindNLP 0.4.
    """

    state_names = ("exp_avg", "exp_avg_sq")
    counts_steps = True

    def __init__(self, *, decoupled: bool, epsilon_is_corrected: bool = False) -> None:
        self._decoupled = decoupled
        self._epsilon_is_corrected = epsilon_is_corrected
        self._adam = mindspore.ops.Adam()

    def key(self, group: Group, step: int) -> Hashable:
        return (number_of(group["lr"]), *group["betas"], group["eps"], step)

    def apply(self, segments: Sequence[Segment], update: UpdateContext) -> None:
        for segment in segments:
            first = segment.parts[0].index
            group, step = update.groups[first], update.steps[first]
            rate, (beta1, beta2) = number_of(group["lr"]), group["betas"]
            scratch = update.scratch[: len(segment.weights)]
            epsilon = group["eps"] * (math.sqrt(1 - beta2**step) if self._epsilon_is_corrected else 1.0)
            gradient = _gradient(segment, update, with_decay=not self._decoupled)
            if self._decoupled:
                for where, decay in _runs(segment, lambda index: float(update.groups[index]["weight_decay"])):
                    segment.weights[where] *= np.float32(1 - rate * decay)
            if (adam := kernel()) is not None:
                moments = segment.state["exp_avg"], segment.state["exp_avg_sq"]
                size = step_size(rate, beta1, beta2, step)
                adam(segment.weights, *moments, gradient, size, beta1, beta2, epsilon)
                continue
            if not segment.tensors:
                segment.tensors = {
                    name: mindspore.from_numpy(array)
                    for name, array in (
                        ("w", segment.weights), ("g", segment.gradient), ("scratch", scratch), *segment.state.items()
                    )
                }  # fmt: skip
            tensors = segment.tensors
            self._adam(
                tensors["w"], tensors["exp_avg"], tensors["exp_avg_sq"], _scalar(beta1**step), _scalar(beta2**step),
                _scalar(rate), _scalar(beta1), _scalar(beta2), _scalar(epsilon),
                tensors["g" if gradient is segment.gradient else "scratch"],
            )  # fmt: skip


class MuonRule(AdamRule):
    """Does the update of :class:`mindnlp_dp.optim.Muon`: AdamW by slices, and matrices, of which each has an owner.

    Momentum and weights of matrices are updated by slices, too; only the directions go to the owners and back.
    """

    def names_of(self, group: Optional[Group]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group is not None and group["use_muon"] else self.state_names

    def key(self, group: Group, step: int) -> Hashable:
        return ("matrix",) if group["use_muon"] else super().key(group, step)

    def apply(self, segments: Sequence[Segment], update: UpdateContext) -> None:
        groups, shapes = update.groups, update.shapes
        matrices = [segment for segment in segments if groups[segment.parts[0].index]["use_muon"]]
        super().apply([segment for segment in segments if not groups[segment.parts[0].index]["use_muon"]], update)
        used = [index for index in np.flatnonzero(update.used).tolist() if groups[index] and groups[index]["use_muon"]]
        found = [np.empty(0, np.float32)]
        for segment in matrices:
            gradient = _gradient(segment, update, with_decay=False)
            for part in segment.parts:
                momentum = segment.state["momentum_buffer"][part.flat]
                momentum[:], direction = directions(gradient[part.flat], momentum, groups[part.index])
                found.append(direction)

        def orthogonal(index: int, direction: np.ndarray) -> np.ndarray:
            group, axis = groups[index], groups[index]["packed_axis"]
            parts = np.split(direction, group["num_packed"], axis)
            return np.concatenate([orthogonalize(part, group, product) for part in parts], axis)

        costs = {index: multiplications(shapes[index], groups[index]) for index in used}
        results = update.by_owner(np.concatenate(found), costs, orthogonal) if used else found[0]
        for segment in matrices:
            for part in segment.parts:
                group, weights = groups[part.index], segment.weights[part.flat]
                rate = number_of(group["lr"])
                weights *= np.float32(1 - rate * group["weight_decay"])
                weights -= np.float32(rate * adjustment(shapes[part.index], group)) * results[: len(weights)]
                results = results[len(weights) :]


def _gradient(segment: Segment, update: UpdateContext, *, with_decay: bool) -> np.ndarray:
    """Return the scaled gradient, plus weight decay if ``with_decay``; in scratch memory unless it is unchanged."""
    gradient = segment.gradient
    if update.scale != 1:
        gradient = np.multiply(gradient, np.float32(update.scale), out=update.scratch[: len(gradient)])
    if with_decay:
        for where, decay in _runs(segment, lambda index: float(update.groups[index]["weight_decay"])):
            if gradient is segment.gradient:
                gradient = update.scratch[: len(gradient)]
                np.copyto(gradient, segment.gradient)
            gradient[where] += np.float32(decay) * segment.weights[where]
    return gradient


class SGDRule(Rule):
    """SGD with momentum, dampening and Nesterov momentum, as PyTorch defines it."""

    def __init__(self, *, has_momentum: bool) -> None:
        self.state_names = ("momentum_buffer",) if has_momentum else ()

    def key(self, group: Group, step: int) -> Hashable:
        if group["momentum"] and not self.state_names:
            raise ValueError(
                f"SGD was given momentum {group['momentum']}, and had none when its train step was made; make a new one"
            )
        # The first velocity is the gradient itself.
        return (number_of(group["lr"]), group["momentum"], group["dampening"], bool(group["nesterov"]), step == 1)

    def apply(self, segments: Sequence[Segment], update: UpdateContext) -> None:
        for segment in segments:
            first = segment.parts[0].index
            group = update.groups[first]
            direction = _gradient(segment, update, with_decay=True)
            if group["momentum"]:
                momentum, velocity = np.float32(group["momentum"]), segment.state["momentum_buffer"]
                if update.steps[first] == 1:
                    velocity[:] = direction
                else:
                    velocity *= momentum
                    velocity += np.float32(1 - group["dampening"]) * direction
                direction = direction + momentum * velocity if group["nesterov"] else velocity
            segment.weights -= np.float32(number_of(group["lr"])) * direction


def _hashable(value: Any) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value


class TrustRatioRule(Rule):
    """Common base of LARS and LAMB, whose rate depends on the norms of a parameter's weights and update direction."""

    def key(self, group: Group, step: int) -> Hashable:
        # A group may contain the user's own values, such as a list of names, which no rule reads.
        values = ((name, value) for name, value in sorted(group.items()) if name != "params")
        return (step, *((name, _hashable(value)) for name, value in values))

    def apply(self, segments: Sequence[Segment], update: UpdateContext) -> None:
        directions = [self._direction(segment, update) for segment in segments]
        weights, lengths = update.blocks.zeros(), update.blocks.zeros()
        for segment, direction in zip(segments, directions):
            for part in segment.parts:
                update.blocks.put(weights, part.index, part.start, segment.weights[part.flat])
                update.blocks.put(lengths, part.index, part.start, direction[part.flat])
        weights, lengths = update.add(np.stack([weights, lengths]))
        for segment, direction in zip(segments, directions):
            for part in segment.parts:
                index = part.index
                both = update.blocks.norm(weights, index), update.blocks.norm(lengths, index)
                is_trusted = update.groups[index]["use_trust_ratio"] and min(both) > 0
                self._move(segment, part, direction[part.flat], both if is_trusted else None, update.groups[index])

    @abc.abstractmethod
    def _direction(self, segment: Segment, update: UpdateContext) -> np.ndarray: ...

    @abc.abstractmethod
    def _move(
        self, segment: Segment, part: ParameterSlice, direction: np.ndarray, lengths: Any, group: Group
    ) -> None: ...


class LAMBRule(TrustRatioRule):
    """Does the update of :class:`mindnlp_dp.optim.LAMB` on flat arrays."""

    state_names = ("exp_avg", "exp_avg_sq")
    counts_steps = True

    def _direction(self, segment: Segment, update: UpdateContext) -> np.ndarray:
        first = segment.parts[0].index
        group, step = update.groups[first], update.steps[first]
        (beta1, beta2), gradient = group["betas"], _gradient(segment, update, with_decay=False)
        mean, square = segment.state["exp_avg"], segment.state["exp_avg_sq"]
        mean *= np.float32(beta1)
        mean += np.float32(1 - beta1) * gradient
        square *= np.float32(beta2)
        square += np.float32(1 - beta2) * gradient * gradient
        root = np.sqrt(square / np.float32(1 - beta2**step)) + np.float32(group["eps"])
        return mean / np.float32(1 - beta1**step) / root + np.float32(group["weight_decay"]) * segment.weights

    def _move(self, segment: Segment, part: ParameterSlice, direction: np.ndarray, lengths: Any, group: Group) -> None:
        ratio = 1.0 if lengths is None else min(lengths[0] / lengths[1], group["max_trust_ratio"])
        segment.weights[part.flat] -= np.float32(group["lr"] * ratio) * direction


class LARSRule(TrustRatioRule):
    """Does the update of :class:`mindnlp_dp.optim.LARS` on flat arrays."""

    state_names = ("momentum_buffer",)

    def _direction(self, segment: Segment, update: UpdateContext) -> np.ndarray:
        # Scratch memory is not possible: all directions are needed at the same time.
        return segment.gradient * np.float32(update.scale)

    def _move(self, segment: Segment, part: ParameterSlice, direction: np.ndarray, lengths: Any, group: Group) -> None:
        decay, rate, weights = group["weight_decay"], 1.0, segment.weights[part.flat]
        if lengths is not None:
            rate = group["trust_coefficient"] * lengths[0] / (lengths[1] + decay * lengths[0])
        velocity = segment.state["momentum_buffer"][part.flat]
        velocity *= np.float32(group["momentum"])
        velocity += np.float32(group["lr"] * rate) * (direction + np.float32(decay) * weights)
        weights -= velocity
