"""This module sums squares block by block, so that a norm has the same bits for any split among the ranks.

Updaters use it for the norm of all gradients, or of each parameter. A piece of a parameter consists of full blocks
(:mod:`mindnlp_dp.data_parallel.buckets.bucket_layout`), so each block belongs to exactly one rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mindnlp_dp.data_parallel.buckets.bucket_layout import BLOCK_NUMEL


def sums_of_squares(blocks: np.ndarray) -> np.ndarray:
    """Return the sum of squares of each row of up to :data:`BLOCK_NUMEL` numbers; in float64 if float32 overflows.

    Each row is one dot product of BLAS, so its result does not depend on the number of rows.
    """
    sums = np.matmul(blocks[:, None, :], blocks[:, :, None])[:, 0, 0].astype(np.float64)
    for number in np.flatnonzero(~np.isfinite(sums)):
        wide = blocks[number].astype(np.float64)
        sums[number] = np.dot(wide, wide)
    return sums


class BlockSums:
    """Maps the blocks of parameters of given sizes to places in one array of sums."""

    def __init__(self, numels: Sequence[int]) -> None:
        ends = np.cumsum([0, *(-(-numel // BLOCK_NUMEL) for numel in numels)])
        self._first: list[int] = ends[:-1].tolist()
        self._last: list[int] = ends[1:].tolist()
        # The parameter index of every block.
        self.owners = np.repeat(np.arange(len(numels)), np.diff(ends))

    def zeros(self) -> np.ndarray:
        """Return an empty array of sums. The ranks' arrays can be added, because each rank fills its own blocks."""
        return np.zeros(self._last[-1] if self._last else 0, np.float64)

    def put(self, sums: np.ndarray, index: int, start: int, piece: np.ndarray) -> None:
        """Store the sums of squares of ``piece``, which begins at element ``start`` of parameter ``index``."""
        first = self._first[index] + start // BLOCK_NUMEL
        num_full, rest = divmod(len(piece), BLOCK_NUMEL)
        last = first + num_full
        sums[first:last] = sums_of_squares(piece[: len(piece) - rest].reshape(num_full, BLOCK_NUMEL))
        if rest:
            sums[last] = sums_of_squares(piece[None, -rest:])[0]

    def norm(self, sums: np.ndarray, index: int) -> float:
        """Return the norm of one parameter."""
        return math.sqrt(sums[self._first[index] : self._last[index]].sum())
