"""Sums of squares whose bits do not depend on who adds them up: block by block, in the order of the blocks.

Goes in: pieces of parameters, on the rank that has them. Comes out: norms, of all parameters or of each. A piece is
made of whole blocks of its parameter (:mod:`mindnlp_dp.gradients.buckets.layout`), so every block is one rank's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mindnlp_dp.gradients.buckets.layout import BLOCK_NUMEL


def sum_of_squares(block: np.ndarray) -> float:
    """Of up to :data:`BLOCK_NUMEL` numbers; what float32 cannot hold is added up in float64."""
    total = float(np.dot(block, block))
    if math.isfinite(total):
        return total
    wide = block.astype(np.float64)
    return float(np.dot(wide, wide))


class BlockSums:
    """Where the blocks of parameters of given sizes are in one array of sums."""

    def __init__(self, numels: Sequence[int]) -> None:
        ends = np.cumsum([0, *(-(-numel // BLOCK_NUMEL) for numel in numels)])
        self._first: list[int] = ends[:-1].tolist()
        self._last: list[int] = ends[1:].tolist()

    def zeros(self) -> np.ndarray:
        """No block summed up yet; ranks' arrays are added, for each has its own blocks."""
        return np.zeros(self._last[-1] if self._last else 0, np.float64)

    def put(self, sums: np.ndarray, index: int, start: int, piece: np.ndarray) -> None:
        """Sum up the elements from ``start`` on of parameter ``index``."""
        number = self._first[index] + start // BLOCK_NUMEL
        for begin in range(0, len(piece), BLOCK_NUMEL):
            sums[number] = sum_of_squares(piece[begin : begin + BLOCK_NUMEL])
            number += 1

    def norm(self, sums: np.ndarray, index: int) -> float:
        """Of one parameter."""
        return math.sqrt(sums[self._first[index] : self._last[index]].sum())
