"""The exchange of gradients by a reducer of another's making."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable, Optional

import numpy as np

from mindnlp_dp.communication.collectives import ProcessGroup

from .naive import NaiveGradientSynchronizer


class ReducerWindow(NaiveGradientSynchronizer):
    """Exchange by a function, such as MindSpore's ``nn.DistributedGradReducer``.

    It is called with a tuple of gradients once a window, and returns their mean over the ranks, or, when its ``mean``
    is False, their sum. What it gets is weighted beforehand, so that weights count as they do elsewhere.
    """

    def __init__(
        self, parameters: Sequence[Any], reducer: Callable[..., Any], group: Optional[ProcessGroup] = None
    ) -> None:
        super().__init__(parameters, group)
        self._reducer = reducer

    def _exchange(self, used: np.ndarray, scale: float) -> list[Optional[Any]]:
        means = getattr(self._reducer, "mean", True)
        factor = scale * self.group.world_size if means else scale
        mine = [self._sum_of(index) * factor for index in range(len(self.parameters))]
        self.num_bytes += sum(gradient.nbytes for gradient in mine)
        self.num_calls += 1
        # MindSpore's reducer ends a process that is alone with a segmentation fault.
        reduced = self._reducer(tuple(mine)) if self.group.world_size > 1 else mine
        return [
            gradient.astype(parameter.dtype) if is_used else None
            for gradient, parameter, is_used in zip(reduced, self.parameters, used)
        ]
