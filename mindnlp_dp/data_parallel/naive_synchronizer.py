"""This module has simple exchanges of gradients: the reference for synchronizer.py, and one by a user's reducer."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, Callable, Optional

import numpy as np

from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.data_parallel.synchronizer_base import BufferedSynchronizer
from mindnlp_dp.runtime.arrays import HALF_TYPES, dtype_name


class NaiveGradientSynchronizer(BufferedSynchronizer):
    """Averages gradients with one all-reduce per parameter: slow but simple, as a reference for tests."""

    def __init__(self, parameters: Iterable[Any], group: Optional[ProcessGroup] = None) -> None:
        super().__init__(parameters, group)
        self._sums: dict[int, Any] = {}

    def _put(self, index: int, gradient: Any, loss_weight: float) -> None:
        if dtype_name(gradient) in HALF_TYPES:
            import mindspore

            gradient = gradient.astype(mindspore.float32)
        self._sums[index] = (
            self._sums[index] + gradient * loss_weight if index in self._sums else gradient * loss_weight
        )

    def _sum_of(self, index: int) -> Any:
        """Return a parameter's accumulated sum; half types in float32, because their weighted sum may overflow."""
        if index in self._sums:
            return self._sums[index]
        import mindspore

        parameter = self.parameters[index]
        wide = mindspore.float32 if dtype_name(parameter) in HALF_TYPES else parameter.dtype
        return mindspore.ops.zeros(tuple(parameter.shape), wide)

    def _exchange(self, used: np.ndarray, scale: float) -> list[Optional[Any]]:
        gradients: list[Optional[Any]] = [None] * len(self.parameters)
        for index in np.flatnonzero(used):
            mine = self._sum_of(index)
            self.num_bytes += mine.nbytes
            self.num_calls += 1
            began = time.perf_counter()
            gradients[index] = self.group.all_reduce(mine * scale).astype(self.parameters[index].dtype)
            self._timed(self.names[index], began)
        return gradients

    def _clear(self) -> None:
        self._sums.clear()


class ExternalReducer(NaiveGradientSynchronizer):
    """Exchanges gradients with a user's function, such as MindSpore's ``nn.DistributedGradReducer``.

    The function is called once per update with a tuple of gradients. It returns their mean over the ranks, or their
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
