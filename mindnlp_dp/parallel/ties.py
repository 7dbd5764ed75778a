"""Weights that stages of a pipeline have in common, such as a word embedding that is the output layer, too.

Goes in: this stage's gradients of them, micro step by micro step. Comes out: their sums over the window and the stages.
Where stages exchange gradients among different numbers of ranks, these round such sums in different ways; then the
first stage's weights are the others' after every update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np

from mindnlp_dp.arrays.conversion import from_host, set_weight, to_host
from mindnlp_dp.arrays.types import dtype_name
from mindnlp_dp.communication.collectives import ProcessGroup

from .placement import Placement, Placements


@dataclass(frozen=True)
class Tie:
    """A parameter that several stages have.

    Attributes:
        group: the ranks of these stages that sum up what they have of its gradient.
        placement: where the stages cut it in different ways, so that whole gradients are summed up; else None.
    """

    parameter: Any
    group: ProcessGroup
    placements: Placements
    placement: Optional[Placement] = None

    def sum(self, mine: np.ndarray) -> np.ndarray:
        """Over the stages, and the ranks that share out their micro batches. A collective of ``group``."""
        placement, mesh = self.placement, self.placements.mesh
        if placement is None:
            return self.group.all_reduce(mine)
        whole = np.zeros(placement.shape, mine.dtype)
        if placement.cut is not None:
            placement.cut.put(mine, whole, mesh.index("tp"), mesh.sizes["tp"])
        elif mesh.index("tp") == 0:
            whole = mine
        return np.ascontiguousarray(self.placements.part(placement, self.group.all_reduce(whole)))

    def settle(self) -> None:
        """The first stage's value, on all ranks. A collective of ``group``, where stages differ."""
        placement = self.placement
        if placement is None:
            return
        value = self.placements.whole(placement, to_host(self.parameter), group=self.group)
        if self.placements.mesh.index("pp") != min(placement.stages):
            mine = np.ascontiguousarray(self.placements.part(placement, value))
            set_weight(self.parameter, from_host(mine, placement.dtype))


class Ties:
    """Gradients of parameters that stages have in common: added up over a window, then over the stages."""

    def __init__(self, ties: Sequence[Tie], parameters: Sequence[Any]) -> None:
        places = {id(p): index for index, p in enumerate(parameters)}
        self._ties = [(places[id(tie.parameter)], tie) for tie in ties if id(tie.parameter) in places]
        self._sums = [np.zeros(tuple(tie.parameter.shape), np.float32) for _, tie in self._ties]

    def take(self, gradients: list[Optional[Any]], weight: float) -> list[Optional[Any]]:
        """Keep a micro step's gradients back, weighted."""
        for (index, _), mine in zip(self._ties, self._sums):
            gradient, gradients[index] = gradients[index], None
            if gradient is not None:
                mine[...] += np.float32(weight) * to_host(gradient)
        return gradients

    def put(self, gradients: Sequence[Optional[Any]], weight: float) -> list[Optional[Any]]:
        """What was kept back, summed up over the stages, for a micro batch of this weight. A collective."""
        found = list(gradients)
        for (index, tie), total in zip(self._ties, self._sums):
            mean = tie.sum(total)
            mean /= np.float32(weight)
            found[index] = from_host(mean, dtype_name(tie.parameter))
        return found
