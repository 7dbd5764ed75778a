"""This module sums numbers over a model that is sharded over ranks; updaters use it for the norm of all gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import numpy as np

from mindnlp_dp.communication.process_group import ProcessGroup


class ModelScope:
    """Knows which ranks together have the model, and which of them counts each parameter in a sum.

    Without a group, every rank has the full model. With a group, the constructor is a collective of the group.

    Args:
        group: The ranks that together have the model.
        counts: For each parameter of this rank, whether this rank is the one of its replicas that adds it.
        is_sharded: For each parameter of this rank, whether this rank has only a shard of it.

    Attributes:
        has_sharded_parameters: Whether any rank of the group has only a shard of a parameter.
    """

    def __init__(
        self,
        group: Optional[ProcessGroup] = None,
        counts: Sequence[bool] = (),
        is_sharded: Sequence[bool] = (),
    ) -> None:
        self.group = group if group is not None and group.world_size > 1 else None
        self._counts, self._is_sharded = np.array(counts, bool), np.array(is_sharded, bool)
        has_one = bool(self._is_sharded.any())
        self.has_sharded_parameters = has_one if self.group is None else any(self.group.all_gather_object(has_one))

    @property
    def is_full(self) -> bool:
        """Return whether every rank has the full model."""
        return self.group is None

    def total(self, numbers: np.ndarray) -> float:
        """Return the sum of ``numbers``, one per parameter, over the full model, on every rank. A collective."""
        if self.group is None:
            return float(numbers.sum())
        mine = numbers[self._counts].sum()
        return float(self.group.all_reduce(np.array([mine], np.float64), every_step=True)[0])

    def part(self, places: Sequence[int]) -> ModelScope:
        """Return a scope of the parameters at ``places`` only. A collective."""
        if self.group is None:
            return ModelScope()
        return ModelScope(self.group, self._counts[places].tolist(), self._is_sharded[places].tolist())
