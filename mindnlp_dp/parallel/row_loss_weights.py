"""Holds the loss weights of a micro-step on the ranks of a row, whose gradients are summed in the backward pass.

Expert blocks and the units of a fully sharded model read them; the train step sets them. A row has the ranks that
differ in "ep" and "fsdp".
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np

from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.parallel.device_mesh import DeviceMesh

Axes = tuple[str, ...]


class RowLossWeights:
    """The loss weights of the current micro-step on the ranks of a row.

    Attributes:
        group: the ranks of the row.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group = mesh.group("ep", "fsdp")
        self._groups: dict[Axes, ProcessGroup] = {axes: mesh.group(*axes) for axes in (("ep",), ("fsdp",))}
        self._groups["ep", "fsdp"] = self.group
        self._own = 1.0
        self._totals = {axes: float(group.world_size) for axes, group in self._groups.items()}
        self._is_in_step = False

    def total(self, axes: Axes) -> float:
        """Return the sum of the weights over the ranks that differ in these axes; without axes that of this rank.

        After a micro-step it is still that of the micro-step, whose gradients are added up then.
        """
        return self._totals[axes] if axes else self._own

    def factor(self, axes: Axes) -> float:
        """Return what the gradient of this rank's loss is multiplied by, if it is already summed over these axes.

        Outside of a micro-step every rank has a weight of 1.
        """
        if not self._is_in_step:
            return float(self._groups[axes].world_size) if axes else 1.0
        return self.total(axes)

    def share(self, axes: Axes) -> float:
        """Return this rank's fraction of the total; outside of a micro-step those of all ranks are equal."""
        if not self._is_in_step:
            return 1.0 / self._groups[axes].world_size
        return self._own / self._totals[axes] if self._totals[axes] else 0.0

    @contextlib.contextmanager
    def micro_step(self, weight: float) -> Iterator[None]:
        """Set the weight of this rank's loss for the forward and backward pass in this block. A collective."""
        sums: dict[ProcessGroup, float] = {}
        for group in self._groups.values():
            if group not in sums:
                sums[group] = float(group.all_reduce(np.array([weight]), every_step=True)[0])
        self._own, self._totals = weight, {axes: sums[group] for axes, group in self._groups.items()}
        self._is_in_step = True
        try:
            yield
        finally:
            self._is_in_step = False
