"""Keeps tied weights equal on several pipeline stages, such as a word embedding that is also the output layer.

The pipeline sums their gradients over the update and then over the stages. If the stages differ in the number of ranks
that exchange gradients, the sums are rounded differently; then the first stage's weights are copied to the other stages
after every update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np

from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.parallel.placement import Placement, Placements
from mindnlp_dp.runtime.arrays import dtype_name, from_host, set_weight, to_host


@dataclass(frozen=True)
class TiedParameter:
    """A tied parameter that several stages have.

    Attributes:
        parameter: this stage's parameter.
        group: group of the ranks of these stages that sum its gradients.
        placements: placements of all weights of the model.
        placement: placement of the parameter if stages differ, so that full gradients must be summed; otherwise None.
    """

    parameter: Any
    group: ProcessGroup
    placements: Placements
    placement: Optional[Placement] = None

    def sum(self, mine: np.ndarray) -> np.ndarray:
        """Return the sum of a gradient over the ranks of ``group``, as this rank's shard. A collective of ``group``."""
        placement, mesh = self.placement, self.placements.mesh
        if placement is None:
            return self.group.all_reduce(mine)
        full = np.zeros(placement.shape, mine.dtype)
        if placement.shard is not None:
            placement.shard.put(mine, full, mesh.index("tp"), mesh.sizes["tp"])
        elif mesh.index("tp") == 0:
            full = mine
        return np.ascontiguousarray(self.placements.part(placement, self.group.all_reduce(full)))

    def resync(self) -> None:
        """Copy the first stage's value to all stages, if stages differ. It is then a collective of ``group``."""
        placement = self.placement
        if placement is None or not self.parameter.requires_grad:
            return
        value = self.placements.full(placement, to_host(self.parameter), group=self.group)
        if self.placements.mesh.index("pp") != min(placement.stages):
            mine = np.ascontiguousarray(self.placements.part(placement, value))
            set_weight(self.parameter, from_host(mine, placement.dtype))


class TiedGradients:
    """Sums the gradients of tied parameters over an update, then over the stages; the pipeline uses it."""

    def __init__(self, ties: Sequence[TiedParameter], parameters: Sequence[Any]) -> None:
        places = {id(p): index for index, p in enumerate(parameters)}
        self._ties = [(places[id(tie.parameter)], tie) for tie in ties if id(tie.parameter) in places]
        self._sums = [np.zeros(tuple(tie.parameter.shape), np.float32) for _, tie in self._ties]

    def take(self, gradients: list[Optional[Any]], loss_weight: float) -> list[Optional[Any]]:
        """Add the weighted tied gradients of a micro-step to the sums, and replace them by None."""
        for (index, _), mine in zip(self._ties, self._sums):
            gradient, gradients[index] = gradients[index], None
            if gradient is not None:
                mine[...] += np.float32(loss_weight) * to_host(gradient)
        return gradients

    def put(self, gradients: Sequence[Optional[Any]], loss_weight: float) -> list[Optional[Any]]:
        """Return the gradients with their sums over the stages, divided by ``loss_weight``. A collective."""
        found = list(gradients)
        for (index, tie), total in zip(self._ties, self._sums):
            mean = tie.sum(total)
            mean /= np.float32(loss_weight)
            found[index] = from_host(mean, dtype_name(tie.parameter))
        return found
