"""This module defines a micro-step: one forward and backward pass of a gradient accumulation window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np


@dataclass(frozen=True)
class MicroStep:
    """The result of one forward and backward pass on this rank.

    Attributes:
        loss: the mean loss of the micro-batch.
        gradients: gradients in the order of the synchronizer's parameters; None if the micro-batch has no weight and
            was not computed.
        weight: the weight of the loss in the mean over ranks and micro-batches.
        indices: indices of the samples, if known.
        has_nonfinite_peer: whether the gradients contain NaN or infinity from another rank's loss; experts get
            gradients from several ranks.
        loss_replication: number of ranks that split this micro-batch. Each has the full loss, and the gradients of its
            rows times ``loss_replication``, so that the weighted mean of the exchange is the full gradient.
    """

    loss: float
    gradients: Optional[Sequence[Optional[Any]]]
    weight: float
    indices: Optional[np.ndarray] = None
    has_nonfinite_peer: bool = False
    loss_replication: int = 1

    @classmethod
    def without_weight(cls, indices: Optional[np.ndarray] = None) -> MicroStep:
        """Return a micro-step that was not computed because nothing in it counts, such as when all labels are -100."""
        return cls(0.0, None, 0.0, indices)
