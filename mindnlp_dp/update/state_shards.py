"""Optimizer state, of which a rank has no more than belongs to the weights that it updates.

Goes in: for which pieces of which parameters. Comes out: flat arrays, and, parameter by parameter, the whole state of
one, for checkpoints and for ranks that divide the work anew.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np

from mindnlp_dp.arrays.conversion import aligned_zeros
from mindnlp_dp.communication.collectives import ProcessGroup

# Ranks put a parameter's state together by so many elements at a time: more would take memory, and bring nothing.
MESSAGE_NUMEL = 1 << 20


@dataclass(frozen=True)
class Piece:
    """Elements ``[start, stop)`` of parameter ``index``, and where the first of them is in a flat array."""

    index: int
    start: int
    stop: int
    offset: int

    @property
    def flat(self) -> slice:
        return slice(self.offset, self.offset + self.stop - self.start)


def put_together(
    parts: Sequence[tuple[Piece, np.ndarray]], numel: int, dtype: Any, group: Optional[ProcessGroup]
) -> np.ndarray:
    """A flat array of all ranks' pieces of it. A collective of ``group``; None of whom this rank has all."""
    kind = np.dtype(f"u{np.dtype(dtype).itemsize}")
    whole = np.zeros(numel, kind)
    for piece, array in parts:
        whole[piece.start : piece.stop] = array.astype(dtype, copy=False).view(kind)
    if group is None:
        return whole.view(dtype)
    for start in range(0, numel, MESSAGE_NUMEL):
        # As integers, of which the largest has the bits of the one that is not 0, be it a negative zero's.
        bits = group.all_reduce(whole[start : start + MESSAGE_NUMEL].astype(np.int64), op="max")
        whole[start : start + MESSAGE_NUMEL] = bits
    return whole.view(dtype)


class StateShards:
    """Arrays of float32 by name, such as "exp_avg", each as long as what this rank updates.

    Args:
        pieces: what that is, offsets being those in the arrays, of ``numel`` elements.
        is_whole: whether every rank has all of it.

    Attributes:
        arrays: by name.
        steps: by parameter, in how many updates it took part; the same on every rank.
    """

    def __init__(
        self,
        names: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        pieces: Sequence[Piece],
        numel: int,
        group: ProcessGroup,
        *,
        is_whole: bool,
    ) -> None:
        self.arrays = {name: aligned_zeros(numel, np.float32) for name in names}
        self.steps = [0] * len(shapes)
        self.shapes = shapes
        self._group = group
        self._is_whole = is_whole
        self._pieces: dict[int, list[Piece]] = {}
        for piece in pieces:
            self._pieces.setdefault(piece.index, []).append(piece)

    def put(self, index: int, name: str, whole: np.ndarray) -> None:
        """Keep what is this rank's of a parameter's whole state."""
        flat = whole.reshape(-1)
        for piece in self._pieces.get(index, ()):
            self.arrays[name][piece.flat] = flat[piece.start : piece.stop]

    def whole(self, index: int, name: str) -> np.ndarray:
        """A parameter's state, in its shape, put together of all ranks' pieces. A collective, of every rank."""
        parts = [(piece, self.arrays[name][piece.flat]) for piece in self._pieces.get(index, ())]
        group = None if self._is_whole else self._group
        return put_together(parts, math.prod(self.shapes[index]), np.float32, group).reshape(self.shapes[index])

    def view(self, index: int, name: str) -> Any:
        """A parameter's whole state as a tensor in the array's own memory, where this rank has all of it."""
        import mindspore

        pieces = self._pieces.get(index, [])
        begin = pieces[0].offset if pieces else 0
        flat = self.arrays[name][begin : begin + math.prod(self.shapes[index])]
        return mindspore.Tensor.from_numpy(flat).reshape(self.shapes[index]) if len(flat) else mindspore.Tensor(flat)

    def take_over(self, old: StateShards) -> None:
        """Of shards that were cut in another way, of the same parameters, which lose it; a collective."""
        self.steps = list(old.steps)
        for name in self.arrays:
            for index, steps in enumerate(old.steps):
                if steps:
                    self.put(index, name, old.whole(index, name))
            # New memory is taken as it is written to, so that there is only one array more at a time.
            del old.arrays[name]
