"""This module exchanges gradients through a reducer that the user passes to make_train_step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable, Optional

import numpy as np

from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.data_parallel.naive import NaiveGradientSynchronizer


class ExternalReducer(NaiveGradientSynchronizer):
    """Exchanges gradients with a user's function, such as MindSpore's ``nn.DistributedGradReducer``.

    The function is called once per window with a tuple of gradients. It returns their mean over the ranks, or their
    sum if its attribute ``mean`` is False. The gradients are weighted before the call, so weights work as elsewhere.
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
        # With a single process, MindSpore's reducer ends in a segmentation fault.
        reduced = self._reducer(tuple(mine)) if self.group.world_size > 1 else mine
        return [
            gradient.astype(parameter.dtype) if is_used else None
            for gradient, parameter, is_used in zip(reduced, self.parameters, used)
        ]
