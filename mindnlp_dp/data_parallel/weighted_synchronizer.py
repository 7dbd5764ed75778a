"""Averages gradients that the backward pass has weighted and summed over the ranks of a row (fully sharded models)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

from mindnlp_dp.data_parallel.synchronizer import GradientSynchronizer


class WeightedGradientSynchronizer(GradientSynchronizer):
    """Adds gradients as they are; the weight of a micro-batch counts in the total only."""

    def _add(self, gradients: Sequence[Optional[Any]], loss_weight: float) -> None:
        super()._add(gradients, 1.0)
