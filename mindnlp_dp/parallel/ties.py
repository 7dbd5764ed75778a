"""Weights that stages of a pipeline have in common, such as a word embedding that is the output layer, too.

Goes in: this stage's gradients of them, micro step by micro step. Comes out: their sums over the window and the stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import numpy as np

from mindnlp_dp.arrays.conversion import from_host, to_host
from mindnlp_dp.arrays.types import dtype_name
from mindnlp_dp.communication.collectives import ProcessGroup


class Ties:
    """Gradients of parameters that stages have in common: added up over a window, then over the stages."""

    def __init__(self, ties: Sequence[tuple[Any, ProcessGroup]], parameters: Sequence[Any]) -> None:
        places = {id(p): index for index, p in enumerate(parameters)}
        self._ties = [(places[id(p)], p, group) for p, group in ties if id(p) in places]
        self._sums = [np.zeros(tuple(p.shape), np.float32) for _, p, _ in self._ties]

    def take(self, gradients: list[Optional[Any]], weight: float) -> list[Optional[Any]]:
        """Keep a micro step's gradients back, weighted."""
        for (index, _, _), mine in zip(self._ties, self._sums):
            gradient, gradients[index] = gradients[index], None
            if gradient is not None:
                mine[...] += np.float32(weight) * to_host(gradient)
        return gradients

    def put(self, gradients: Sequence[Optional[Any]], weight: float) -> list[Optional[Any]]:
        """What was kept back, summed up over the stages, for a micro step of this weight. A collective."""
        found = list(gradients)
        for (index, parameter, group), total in zip(self._ties, self._sums):
            mean = group.all_reduce(total)
            mean /= np.float32(weight)
            found[index] = from_host(mean, dtype_name(parameter))
        return found
