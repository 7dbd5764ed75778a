"""Sums of squares whose bits do not depend on who adds them up: block by block, in the order of the blocks.

Goes in: pieces of parameters, on the rank that has them. Comes out: norms, of all parameters or of each. A piece is
made of whole blocks of its parameter (:mod:`mindnlp_dp.gradients.buckets.layout`), so every block is one rank's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mindnlp_dp.gradients.buckets.layout import BLOCK_NUMEL


def sums_of_squares(blocks: np.ndarray) -> np.ndarray:
    """Of each row, of up to :data:`BLOCK_NUMEL` numbers; what float32 cannot hold is added up in float64.

    Each is one dot product of BLAS's: what it comes to does not depend on how many rows there are.
    """
    sums = np.matmul(blocks[:, None, :], blocks[:, :, None])[:, 0, 0].astype(np.float64)
    for number in np.flatnonzero(~np.isfinite(sums)):
        wide = blocks[number].astype(np.float64)
        sums[number] = np.dot(wide, wide)
    return sums


class BlockSums:
    """Where the blocks of parameters of given sizes are in one array of sums."""

    def __init__(self, numels: Sequence[int]) -> None:
        ends = np.cumsum([0, *(-(-numel // BLOCK_NUMEL) for numel in numels)])
        self._first: list[int] = ends[:-1].tolist()
        self._last: list[int] = ends[1:].tolist()
        # Of every block, which parameter's it is.
        self.owners = np.repeat(np.arange(len(numels)), np.diff(ends))

    def zeros(self) -> np.ndarray:
        """No block summed up yet; ranks' arrays are added, for each has its own blocks."""
        return np.zeros(self._last[-1] if self._last else 0, np.float64)

    def put(self, sums: np.ndarray, index: int, start: int, piece: np.ndarray) -> None:
        """Sum up the elements from ``start`` on of parameter ``index``."""
        first = self._first[index] + start // BLOCK_NUMEL
        num_full, rest = divmod(len(piece), BLOCK_NUMEL)
        last = first + num_full
        sums[first:last] = sums_of_squares(piece[: len(piece) - rest].reshape(num_full, BLOCK_NUMEL))
        if rest:
            sums[last] = sums_of_squares(piece[None, -rest:])[0]

    def norm(self, sums: np.ndarray, index: int) -> float:
        """Of one parameter."""
        return math.sqrt(sums[self._first[index] : self._last[index]].sum())
