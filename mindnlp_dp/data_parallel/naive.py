"""This module is the simple reference for the exchange of gradients; synchronizer.py must give the same result."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Optional

import numpy as np

from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.data_parallel.accumulation import BufferedAccumulator
from mindnlp_dp.runtime.arrays import HALF_TYPES, dtype_name


class NaiveGradientSynchronizer(BufferedAccumulator):
    """Averages gradients with one all-reduce per parameter: slow but simple, as a reference for tests."""

    def __init__(self, parameters: Iterable[Any], group: Optional[ProcessGroup] = None) -> None:
        super().__init__(parameters, group)
        self._sums: dict[int, Any] = {}

    def _put(self, index: int, gradient: Any, weight: float) -> None:
        if dtype_name(gradient) in HALF_TYPES:
            import mindspore

            gradient = gradient.astype(mindspore.float32)
        self._sums[index] = self._sums[index] + gradient * weight if index in self._sums else gradient * weight

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
