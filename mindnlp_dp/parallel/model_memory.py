"""Computes the memory that a rank needs for weights, gradients and optimizer state in training, without activations."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from mindnlp_dp.runtime.named_weights import all_names


@dataclass(frozen=True)
class TrainingMemory:
    """The training memory of a rank in bytes, without activations.

    Attributes:
        weights: weights in float32, 4 bytes per parameter.
        gradients: gradients of the backward pass and their sums over the update, 4 bytes each per parameter.
        optimizer: optimizer state; 8 bytes per parameter for Adam (two moments in float32).
    """

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


def memory_of(model: Any, *, moments: int = 2, shared_among: int = 1) -> TrainingMemory:
    """Return the training memory for this rank's part of a model.

    A tied parameter, which has several names, has one gradient per name and their sum. A parameter that several
    pipeline stages have needs two more sums, over the update and over the stages.

    Args:
        model: the model, sharded or not.
        moments: number of moments that the optimizer keeps per parameter.
        shared_among: number of ranks of a host that share one set of weights and divide the update
            (``zero_stage=2``); weights and optimizer state are divided by it, gradients are not.
    """
    numel = trained = made = 0
    weights = list(all_names(model).values())
    uses = Counter(map(id, weights))
    for weight in {id(weight): weight for weight in weights}.values():
        size, trains = int(weight.size), bool(getattr(weight, "requires_grad", False))
        numel, trained = numel + size, trained + size * trains
        made += size * trains * (uses[id(weight)] + (uses[id(weight)] > 1))
    parallel = getattr(model, "parallel", None)
    if parallel is not None and parallel.pipeline is not None:
        made += 2 * parallel.pipeline.num_tied
    return TrainingMemory(4 * numel // shared_among, 4 * (made + trained), 4 * moments * trained // shared_among)
