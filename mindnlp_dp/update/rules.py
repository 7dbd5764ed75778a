"""How optimizers change a slice of the weights: in place, in flat arrays, whatever parameters they belong to.

Goes in: segments of weights, gradients and state, and the hyperparameters of the groups that they belong to. Comes out:
new weights and state, in place, with the bits that they have in any other segment.

AdamW and Adam run MindSpore's own kernel (``ops.Adam``) on long arrays: MindNLP 0.4.1, which calls it for every
parameter, takes several times as long. Its SGD forgets the momentum between two updates; here it is PyTorch's.
"""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mindspore
import numpy as np

from mindnlp_dp.arrays.conversion import number_of

from .block_sums import BlockSums
from .state_shards import Piece

Group = dict[str, Any]


@dataclass
class Segment:
    """Elements that are updated in one go, one behind the other in each array.

    Attributes:
        parts: the pieces of parameters in it, with their places in these arrays.
        tensors: what a rule makes of the arrays, once.
    """

    weights: np.ndarray
    gradient: np.ndarray
    state: dict[str, np.ndarray]
    parts: Sequence[Piece]
    tensors: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Update:
    """What every rank knows of an update.

    Attributes:
        scale: gradients are multiplied by it, for they were clipped.
        scratch: memory for a segment's, as long as the longest.
        groups: the optimizer's, by parameter.
        steps: by parameter, of how many updates this is the last one.
        blocks: of the parameters.
        add: sums an array over the ranks that divide the update.
    """

    scale: float
    scratch: np.ndarray
    groups: Sequence[Group]
    steps: Sequence[int]
    blocks: BlockSums
    add: Callable[[np.ndarray], np.ndarray]


class Rule(abc.ABC):
    """One optimizer's.

    Attributes:
        state_names: of its arrays, as the optimizer calls them in its ``state_dict``.
        counts_steps: whether its state holds "step".
    """

    state_names: tuple[str, ...] = ()
    counts_steps = False

    @abc.abstractmethod
    def key(self, group: Group, step: int) -> Hashable:
        """Parameters that have the same one, and follow each other in memory, make one segment."""

    @abc.abstractmethod
    def apply(self, segments: Sequence[Segment], update: Update) -> None:
        """Change weights and state. Where ranks divide the update, it is a collective."""


@functools.lru_cache(maxsize=64)
def _scalar(value: float) -> Any:
    # As a tensor it is data; MindSpore would compile the operator anew, and keep it, for every number that it meets.
    return mindspore.Tensor(np.float32(value))


def _runs(segment: Segment, value_of: Callable[[int], float]) -> Iterator[tuple[slice, float]]:
    """The parts of a segment for which ``value_of`` their parameters is the same number, not 0, and that number."""
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
    """AdamW (``decoupled``: weights decay by themselves) and Adam (their decay is part of the gradient).

    Epsilon is added to the root of the second moment, behind its bias correction (``epsilon_is_corrected``), as PyTorch
    and MindNLP 0.5 do, or before it, as MindSpore's kernel and MindNLP 0.4 do.
    """

    state_names = ("exp_avg", "exp_avg_sq")
    counts_steps = True

    def __init__(self, *, decoupled: bool, epsilon_is_corrected: bool = False) -> None:
        self._decoupled = decoupled
        self._epsilon_is_corrected = epsilon_is_corrected
        self._adam = mindspore.ops.Adam()

    def key(self, group: Group, step: int) -> Hashable:
        return (number_of(group["lr"]), *group["betas"], group["eps"], step)

    def apply(self, segments: Sequence[Segment], update: Update) -> None:
        for segment in segments:
            first = segment.parts[0].index
            group, step = update.groups[first], update.steps[first]
            rate, (beta1, beta2) = number_of(group["lr"]), group["betas"]
            scratch = update.scratch[: len(segment.weights)]
            epsilon = group["eps"] * (math.sqrt(1 - beta2**step) if self._epsilon_is_corrected else 1.0)
            if not segment.tensors:
                segment.tensors = {
                    name: mindspore.Tensor.from_numpy(array)
                    for name, array in (
                        ("w", segment.weights), ("g", segment.gradient), ("scratch", scratch), *segment.state.items()
                    )
                }  # fmt: skip
            tensors = segment.tensors
            gradient = _gradient(segment, update, with_decay=not self._decoupled)
            if self._decoupled:
                for where, decay in _runs(segment, lambda index: float(update.groups[index]["weight_decay"])):
                    segment.weights[where] *= np.float32(1 - rate * decay)
            self._adam(
                tensors["w"], tensors["exp_avg"], tensors["exp_avg_sq"], _scalar(beta1**step), _scalar(beta2**step),
                _scalar(rate), _scalar(beta1), _scalar(beta2), _scalar(epsilon),
                tensors["g" if gradient is segment.gradient else "scratch"],
            )  # fmt: skip


def _gradient(segment: Segment, update: Update, *, with_decay: bool) -> np.ndarray:
    """The gradient, scaled; ``with_decay`` with that of the weights. In scratch memory where it is not as it was."""
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
    """SGD with momentum, dampening and Nesterov's look ahead, as PyTorch defines it."""

    def __init__(self, *, has_momentum: bool) -> None:
        self.state_names = ("momentum_buffer",) if has_momentum else ()

    def key(self, group: Group, step: int) -> Hashable:
        if group["momentum"] and not self.state_names:
            raise ValueError(
                f"SGD was given momentum {group['momentum']}, and had none when its train step was made; make a new one"
            )
        # The first velocity is the gradient itself.
        return (number_of(group["lr"]), group["momentum"], group["dampening"], bool(group["nesterov"]), step == 1)

    def apply(self, segments: Sequence[Segment], update: Update) -> None:
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
    """What LARS and LAMB share: rates that depend on how long a whole layer's weights and direction are."""

    def key(self, group: Group, step: int) -> Hashable:
        # A group may hold what is the user's, such as a list of names, which no rule reads.
        values = ((name, value) for name, value in sorted(group.items()) if name != "params")
        return (step, *((name, _hashable(value)) for name, value in values))

    def apply(self, segments: Sequence[Segment], update: Update) -> None:
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
    def _direction(self, segment: Segment, update: Update) -> np.ndarray: ...

    @abc.abstractmethod
    def _move(self, segment: Segment, part: Piece, direction: np.ndarray, lengths: Any, group: Group) -> None: ...


class LAMBRule(TrustRatioRule):
    """:class:`mindnlp_dp.optim.LAMB`."""

    state_names = ("exp_avg", "exp_avg_sq")
    counts_steps = True

    def _direction(self, segment: Segment, update: Update) -> np.ndarray:
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

    def _move(self, segment: Segment, part: Piece, direction: np.ndarray, lengths: Any, group: Group) -> None:
        ratio = 1.0 if lengths is None else min(lengths[0] / lengths[1], group["max_trust_ratio"])
        segment.weights[part.flat] -= np.float32(group["lr"] * ratio) * direction


class LARSRule(TrustRatioRule):
    """:class:`mindnlp_dp.optim.LARS`."""

    state_names = ("momentum_buffer",)

    def _direction(self, segment: Segment, update: Update) -> np.ndarray:
        # In memory of its own: all directions are there before the first is gone.
        return segment.gradient * np.float32(update.scale)

    def _move(self, segment: Segment, part: Piece, direction: np.ndarray, lengths: Any, group: Group) -> None:
        decay, rate, weights = group["weight_decay"], 1.0, segment.weights[part.flat]
        if lengths is not None:
            rate = group["trust_coefficient"] * lengths[0] / (lengths[1] + decay * lengths[0])
        velocity = segment.state["momentum_buffer"][part.flat]
        velocity *= np.float32(group["momentum"])
        velocity += np.float32(group["lr"] * rate) * (direction + np.float32(decay) * weights)
        weights -= velocity
