"""Over which ranks a model is spread, for numbers that are about all of it, such as the norm of its gradient.

Goes in: a number for each of this rank's parameters. Comes out: their sum over the whole model, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import numpy as np

from mindnlp_dp.communication.collectives import ProcessGroup


class ModelScope:
    """Without a group, every rank has the whole model. Making it with one is a collective of the group.

    Args:
        group: the ranks that together have it.
        counts: of this rank's parameters, whether it is the one rank of those with the same numbers that adds them.
        is_cut: of this rank's parameters, whether it has a part of it.

    Attributes:
        has_cut_parameters: whether some rank of the group has a part of one.
    """

    def __init__(
        self,
        group: Optional[ProcessGroup] = None,
        counts: Sequence[bool] = (),
        is_cut: Sequence[bool] = (),
    ) -> None:
        self.group = group if group is not None and group.world_size > 1 else None
        self._counts, self._is_cut = np.array(counts, bool), np.array(is_cut, bool)
        has_one = bool(self._is_cut.any())
        self.has_cut_parameters = has_one if self.group is None else any(self.group.all_gather_object(has_one))

    @property
    def is_whole(self) -> bool:
        """Whether every rank has the whole model."""
        return self.group is None

    def total(self, numbers: np.ndarray) -> float:
        """The sum over the model of ``numbers``, one a parameter. A collective."""
        if self.group is None:
            return float(numbers.sum())
        mine = numbers[self._counts].sum()
        return float(self.group.all_reduce(np.array([mine], np.float64), is_hot=True)[0])

    def part(self, places: Sequence[int]) -> ModelScope:
        """The same, of the parameters at some places."""
        if self.group is None:
            return ModelScope()
        return ModelScope(self.group, self._counts[places].tolist(), self._is_cut[places].tolist())
