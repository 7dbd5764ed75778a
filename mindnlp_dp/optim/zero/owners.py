"""This module gives each matrix of a sharded update to one rank, its owner; the flat updater's rules call it.

Ranks have pieces of matrices, as they have of all parameters. An owner gathers its matrices, computes what needs a
full matrix, and the results go back to the ranks that have the pieces::

    pieces │ A A B │ B B C │  ── all-gather ──  owner │ A │ B C │ computes ── all-gather ──  pieces, as before

All ranks send messages of equal length, so no rank waits for the broadcasts of the other owners one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from mindnlp_dp.data_parallel.buckets.bucket_layout import ParameterSlice
from mindnlp_dp.optim.zero.parameterwise import assign_parameters
from mindnlp_dp.optim.zero.state_registry import MESSAGE_NUMEL


class MatrixOwners:
    """Distributes full parameters over the ranks that have pieces of them.

    Args:
        pieces: The pieces of every rank, in rank order.
        shapes: The shape of every parameter.
        gather: A function that returns the arrays of all ranks, given this rank's.
    """

    def __init__(
        self, pieces: Sequence[Sequence[ParameterSlice]], shapes: Sequence[tuple[int, ...]], rank: int,
        gather: Callable[[np.ndarray], Sequence[np.ndarray]],
    ) -> None:  # fmt: skip
        self._pieces, self._shapes, self._rank, self._gather = pieces, shapes, rank, gather

    def apply(
        self, mine: np.ndarray, costs: Mapping[int, int], function: Callable[[int, np.ndarray], np.ndarray]
    ) -> np.ndarray:
        """Return the results of ``function``, in the pieces that ``mine`` has. A collective.

        Args:
            mine: This rank's pieces of the parameters in ``costs``, one after another.
            costs: The cost of each parameter, by index; the owners' sums of costs are as equal as possible.
            function: It is called by the owner with the index and the values of a parameter, in its shape.
        """
        owners = assign_parameters(list(costs.values()), len(self._pieces))
        held = [_placed((p.index, p.start, p.stop) for p in theirs if p.index in costs) for theirs in self._pieces]
        owned = [
            _placed((index, 0, math.prod(self._shapes[index])) for index, owner in zip(costs, owners) if owner == rank)
            for rank in range(len(self._pieces))
        ]
        full = self._move(mine, held, owned)
        for piece in owned[self._rank]:
            full[piece.flat] = function(piece.index, full[piece.flat].reshape(self._shapes[piece.index])).reshape(-1)
        return self._move(full, owned, held)

    def _move(
        self, mine: np.ndarray, sources: Sequence[list[ParameterSlice]], targets: Sequence[list[ParameterSlice]]
    ) -> np.ndarray:
        """Return this rank's ``targets``, filled from all ranks' ``sources``."""
        copies = [
            (rank, source.offset + start - source.start, target.offset + start - target.start, stop - start)
            for target in targets[self._rank]
            for rank, theirs in enumerate(sources)
            for source in theirs
            if source.index == target.index
            and (start := max(source.start, target.start)) < (stop := min(source.stop, target.stop))
        ]
        lengths = [pieces[-1].flat.stop if pieces else 0 for pieces in (*sources, targets[self._rank])]
        result = np.empty(lengths.pop(), np.float32)
        for begin in range(0, max(lengths), MESSAGE_NUMEL):
            message = np.zeros(min(MESSAGE_NUMEL, max(lengths) - begin), np.float32)
            end, part = begin + len(message), mine[begin : begin + len(message)]
            message[: len(part)] = part
            received = self._gather(message)
            for rank, source, target, numel in copies:
                first, last = max(source, begin), min(source + numel, end)
                if first < last:
                    to = target + first - source
                    result[to : to + last - first] = received[rank][first - begin : last - begin]
        return result


def _placed(ranges: Iterable[tuple[int, int, int]]) -> list[ParameterSlice]:
    """Return pieces (index, start, stop) with the offsets that they have one after another."""
    pieces, offset = [], 0
    for index, start, stop in ranges:
        pieces.append(ParameterSlice(index, start, stop, offset))
        offset += stop - start
    return pieces
