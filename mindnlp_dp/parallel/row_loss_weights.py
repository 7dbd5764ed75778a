"""Holds the loss weights of a micro-step on the ranks of a row, whose gradients are summed in the backward pass.

Expert blocks and the units of a fully sharded model read them; the train step sets them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np

from mindnlp_dp.communication.process_group import ProcessGroup


class RowLossWeights:
    """The loss weights of the current micro-step on the ranks of a row.

    Attributes:
        group: the ranks of the row.
        own: the weight of this rank.
        total: sum of the weights over all ranks of the row.
        share: this rank's fraction of the total.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.own, self.total = 1.0, float(group.world_size)
        self.share = 1.0 / group.world_size

    @contextlib.contextmanager
    def micro_step(self, weight: float) -> Iterator[None]:
        """Set the weight of this rank's loss for the forward and backward pass in this block. A collective."""
        self.total = float(self.group.all_reduce(np.array([weight]), every_step=True)[0])
        self.own, self.share = weight, weight / self.total if self.total else 0.0
        try:
            yield
        finally:
            self.own, self.share = 1.0, 1.0 / self.group.world_size
