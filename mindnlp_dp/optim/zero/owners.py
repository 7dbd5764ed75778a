"""This module gives each matrix of a sharded update to one rank as a whole; the flat updater makes it, rules call it.

Ranks have pieces of matrices, as they have of all parameters. An owner gathers its matrices, computes what needs a
whole matrix, and the results go back to the ranks that have the pieces::

    pieces │ A A B │ B B C │  ── all-gather ──  owner │ A │ B C │ computes ── all-gather ──  pieces, as before

All ranks send messages of equal length, so no rank waits for the broadcasts of the other owners one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from mindnlp_dp.data_parallel.buckets.layout import ParameterSlice
from mindnlp_dp.optim.zero.parameterwise import assign_parameters
from mindnlp_dp.optim.zero.state_registry import MESSAGE_NUMEL


class MatrixOwners:
    """Distributes full parameters over the ranks that have pieces of them.

    Args:
        pieces: The pieces of every rank, in rank order.
        gather: A function that returns the arrays of all ranks, given this rank's.
    """

    def __init__(
        self,
        pieces: Sequence[Sequence[ParameterSlice]],
        rank: int,
        gather: Callable[[np.ndarray], Sequence[np.ndarray]],
    ) -> None:
        self._pieces, self._rank, self._gather = pieces, rank, gather

    def apply(
        self,
        mine: np.ndarray,
        numels: Mapping[int, int],
        costs: Mapping[int, int],
        function: Callable[[int, np.ndarray], np.ndarray],
    ) -> np.ndarray:
        """Return the results of ``function``, in the pieces that ``mine`` has. A collective.

        Args:
            mine: This rank's pieces of the parameters in ``costs``, one after another.
            numels: The number of elements of each of these parameters, by index.
            costs: The cost of each of them; the owners' sums of costs are as equal as possible.
            function: It is called by the owner with the index and the flat values of a parameter.
        """
        owners = assign_parameters(list(costs.values()), len(self._pieces))
        held = [_placed((p.index, p.start, p.stop) for p in theirs if p.index in costs) for theirs in self._pieces]
        owned = [
            _placed((index, 0, numels[index]) for index, owner in zip(costs, owners) if owner == rank)
            for rank in range(len(self._pieces))
        ]
        whole = self._move(mine, held, owned)
        for piece in owned[self._rank]:
            whole[piece.flat] = function(piece.index, whole[piece.flat])
        return self._move(whole, owned, held)

    def _move(
        self, mine: np.ndarray, sources: Sequence[list[ParameterSlice]], targets: Sequence[list[ParameterSlice]]
    ) -> np.ndarray:
        """Return this rank's ``targets``, filled from all ranks' ``sources``."""
        wanted: dict[int, list[ParameterSlice]] = {}
        for target in targets[self._rank]:
            wanted.setdefault(target.index, []).append(target)
        result = np.empty(_numel(targets[self._rank]), np.float32)
        longest = max(map(_numel, sources))
        for begin in range(0, longest, MESSAGE_NUMEL):
            message = np.zeros(min(MESSAGE_NUMEL, longest - begin), np.float32)
            part = mine[begin : begin + len(message)]
            message[: len(part)] = part
            for theirs, received in zip(sources, self._gather(message)):
                for source in theirs:
                    # Where parameter element 0 would be in the message.
                    zero = source.offset - source.start - begin
                    for target in wanted.get(source.index, ()):
                        start = max(source.start, target.start, -zero)
                        stop = min(source.stop, target.stop, len(message) - zero)
                        if start < stop:
                            at = target.offset - target.start
                            result[at + start : at + stop] = received[zero + start : zero + stop]
        return result


def _placed(ranges: Iterable[tuple[int, int, int]]) -> list[ParameterSlice]:
    """Return pieces (index, start, stop) with the offsets that they have one after another."""
    pieces, offset = [], 0
    for index, start, stop in ranges:
        pieces.append(ParameterSlice(index, start, stop, offset))
        offset += stop - start
    return pieces


def _numel(pieces: Sequence[ParameterSlice]) -> int:
    return pieces[-1].flat.stop if pieces else 0
