"""The plainest exchange of gradients, which the fast one (synchronizer.py) must agree with."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Optional

import numpy as np

from mindnlp_dp.arrays.types import HALF_TYPES, dtype_name
from mindnlp_dp.communication.collectives import ProcessGroup

from .window import AccumulatingWindow


class NaiveGradientSynchronizer(AccumulatingWindow):
    """One all-reduce a parameter: slow, and plainly right. The reference for the others."""

    def __init__(self, parameters: Iterable[Any], group: Optional[ProcessGroup] = None) -> None:
        super().__init__(parameters, group)
        self._sums: dict[int, Any] = {}

    def _put(self, index: int, gradient: Any, weight: float) -> None:
        if dtype_name(gradient) in HALF_TYPES:
            import mindspore

            gradient = gradient.astype(mindspore.float32)
        self._sums[index] = self._sums[index] + gradient * weight if index in self._sums else gradient * weight

    def _sum_of(self, index: int) -> Any:
        """Of what was put for a parameter; half types in float32, for their weighted sum may not fit into them."""
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
