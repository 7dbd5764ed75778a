"""What training takes of a rank's memory, but for activations.

Goes in: what a rank has of a model. Comes out: bytes of weights, gradients and optimizer state, counted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from mindnlp_dp.replicas.weights import all_names


@dataclass(frozen=True)
class TrainingMemory:
    """In bytes.

    Attributes:
        weights: in float32, 4 a parameter.
        gradients: the backward pass's, and the sums of a window, 4 each.
        optimizer: its state; two moments of float32, 8, for Adam.
    """

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


def memory_of(model: Any, *, moments: int = 2, shared_among: int = 1) -> TrainingMemory:
    """Of what a rank has of a model, updated by an optimizer with so many moments.

    A parameter that is used under several names (a tied one) has a gradient for each, and their sum; one that stages of
    a pipeline have in common has two sums of its own besides, over the window and over the stages. Where
    ``shared_among`` ranks of a host share one set of weights and divide the update (``zero_stage=2``), a rank's share
    of these is counted, and whole gradients.
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
