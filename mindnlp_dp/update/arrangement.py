"""Where weights, gradients and state are, and which of them a rank updates, for buckets as they are packed now.

Goes in: the buckets of an exchange. Comes out: the pieces of parameters whose squares this rank adds up, those that it
updates, and the arrays of these, cut into segments that are updated in one go.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

import numpy as np

from mindnlp_dp.arrays.conversion import aligned_zeros
from mindnlp_dp.communication.transports.channel import Channel
from mindnlp_dp.gradients.buckets.bucket import Bucket
from mindnlp_dp.gradients.buckets.layout import BLOCK_NUMEL, aligned
from mindnlp_dp.gradients.synchronizer import GradientSynchronizer

from .flat_weights import FlatWeights
from .rules import Segment
from .state_shards import Piece

# Longer segments are cut: what is done to one in several passes then stays in the cache.
SEGMENT_NUMEL = 64 * BLOCK_NUMEL
# Of a bucket: where a part of it begins, and its sum there.
Range = tuple[int, np.ndarray]


class Arrangement:
    """Making it moves the parameters into their new place; a collective.

    Args:
        among: by whom the update is divided: "nobody", the ranks of each "host", or of the whole "job".
        may_share: whether a host's ranks may have one set of weights.

    Attributes:
        buckets: those that it is for.
        weights: the parameters' new place.
        shares_memory: whether other ranks see it, too.
        updated: the pieces that it updates, with their offsets in the arrays of its state.
        state_numel: how long those are.
    """

    def __init__(self, sync: GradientSynchronizer, *, among: str, may_share: bool) -> None:
        self.buckets: Sequence[Bucket] = sync.buckets
        self._channel: Channel = sync.channel
        self._among = among
        layouts = [bucket.layout for bucket in self.buckets]
        self._bounds = [layout.slice_bounds(self._channel.world_size) for layout in layouts]
        numel = sum(layout.numel for layout in layouts)
        shared = self._channel.share(4 * numel) if may_share and numel else None
        self.shares_memory = shared is not None
        if among == "host" and shared is None:
            # The others' slices would not be here.
            self._among = among = "job"
        # By rank, the slice that comes from it; the same on every rank.
        self._slices: list[int] = sync.group.all_gather_object(self._channel.slice_index) if among == "job" else []
        self.writes = not self.shares_memory or self._channel.is_first_of_host
        memory = aligned_zeros(numel, np.float32) if shared is None else shared.view(np.float32)
        self.weights = FlatWeights(sync.names, sync.parameters, layouts, memory, is_shared=self.shares_memory)
        if self.writes:
            self.weights.take_over()
        self.wait()
        self.weights.adopt()
        number = self._channel.slice_index
        own = [
            _within(bucket.sums(), bounds[number], bounds[number + 1])
            for bucket, bounds in zip(self.buckets, self._bounds)
        ]
        self._own = [
            [
                (piece, array[piece.flat])
                for first, array in ranges
                for piece in self._pieces(number, first, len(array), -first)
            ]
            for number, ranges in enumerate(own)
        ]
        whole = [[(first, array) for first, array in bucket.sums() if len(array)] for bucket in self.buckets]
        self._ranges = {"nobody": whole, "host": self._of_host(), "job": own}[among]
        self.updated: list[Piece] = []
        self.state_numel = 0
        for number, ranges in enumerate(self._ranges):
            for first, array in ranges:
                self.updated += self._pieces(number, first, len(array), self.state_numel - first)
                self.state_numel += len(array)

    def _of_host(self) -> list[list[Range]]:
        """This local rank's slices, which consist of a part for each host."""
        hosts = self._channel.num_hosts
        number = self._channel.slice_index // hosts
        return [
            _within(bucket.sums(), *bounds[::hosts][number : number + 2])
            for bucket, bounds in zip(self.buckets, self._bounds)
        ]

    def on_sums(self, look: Callable[[int, int, np.ndarray], None]) -> None:
        """Call ``look`` for every piece of this rank's slices: the parameter's index, where in it, and the gradient.

        Whenever a bucket's sum has come, on the thread that exchanges.
        """

        def tell(own: Sequence[tuple[Piece, np.ndarray]]) -> None:
            for piece, gradient in own:
                look(piece.index, piece.start, gradient)

        for bucket, own in zip(self.buckets, self._own):
            bucket.on_sum = functools.partial(tell, own)

    def look_at_sums(self) -> None:
        """At those that came before :meth:`on_sums` was called."""
        for bucket in self.buckets:
            assert bucket.on_sum is not None, "on_sums comes first"
            bucket.on_sum()

    def let_go(self) -> None:
        """Of the buckets, whose memory others may want; only the weights are left."""
        self.buckets, self._own, self._ranges = (), [], []

    def wait(self) -> None:
        """A barrier of those who share the weights."""
        if self.shares_memory:
            self._channel.wait_for_host()

    def _pieces(self, number: int, first: int, numel: int, shift: int) -> list[Piece]:
        """The parameters' pieces in part of a bucket, at offsets that are ``shift`` more than those in it."""
        pieces = []
        for slot in self.buckets[number].layout.slots:
            begin, end = max(slot.offset, first), min(slot.offset + slot.numel, first + numel)
            if begin < end:
                pieces.append(Piece(slot.index, begin - slot.offset, end - slot.offset, begin + shift))
        return pieces

    def segments(self, partition: Sequence[int], state: Mapping[str, np.ndarray]) -> list[Segment]:
        """What this rank updates, cut where parameters of another number begin; -1 is left out."""
        segments, length = [], 0
        for number, (base, ranges) in enumerate(zip(self.weights.bases, self._ranges)):
            for first, array in ranges:
                for run in _runs(self._pieces(number, first, len(array), 0), partition):
                    begin = run[0].offset
                    # To the end of its alignment: gaps are zeros, and a kernel's vectors have no remainder.
                    end = min(aligned(run[-1].flat.stop), first + len(array))
                    here = slice(length + begin - first, length + end - first)
                    segments.append(
                        Segment(
                            self.weights.memory[base + begin : base + end],
                            array[begin - first : end - first],
                            {name: values[here] for name, values in state.items()},
                            [Piece(part.index, part.start, part.stop, part.offset - begin) for part in run],
                        )
                    )
                length += len(array)
        return segments

    def publish(self, gather: Any) -> None:
        """Let every rank have all new weights; ``gather`` is the group's ``all_gather``."""
        if self._among == "job" and self._channel.world_size > 1:
            for base, bounds in zip(self.weights.bases, self._bounds):
                flat = self.weights.memory[base : base + bounds[-1]]
                if self.shares_memory:
                    self._channel.gather_from_hosts(flat, bounds)
                else:
                    _gather(flat, bounds, self._slices, self._channel.slice_index, gather)
        self._channel.wait_for_host()

    def release(self) -> None:
        """Let the ranks of this host write to their rows of gradients: who does not divide the update reads all."""
        if self._among == "nobody":
            self._channel.wait_for_host()


def _within(ranges: Sequence[Range], begin: int, end: int) -> list[Range]:
    """What of these is between two offsets in their bucket."""
    cut = [(max(first, begin), first, array) for first, array in ranges]
    found = [(start, array[start - first : max(end - first, 0)]) for start, first, array in cut]
    return [(start, part) for start, part in found if len(part)]


def _runs(pieces: Sequence[Piece], partition: Sequence[int]) -> list[list[Piece]]:
    """Pieces that follow each other and have the same number, cut at :data:`SEGMENT_NUMEL`."""
    runs: list[list[Piece]] = []
    previous: Optional[int] = None
    for piece in pieces:
        number = partition[piece.index]
        for start in range(piece.start, piece.stop, SEGMENT_NUMEL):
            stop = min(start + SEGMENT_NUMEL, piece.stop)
            part = Piece(piece.index, start, stop, piece.offset + start - piece.start)
            if number >= 0 and number == previous and part.flat.stop - runs[-1][0].offset <= SEGMENT_NUMEL:
                runs[-1].append(part)
            elif number >= 0:
                runs.append([part])
            previous = number
    return runs


def _gather(flat: np.ndarray, bounds: Sequence[int], slices: Sequence[int], number: int, gather: Any) -> None:
    """Every rank's slice to every rank, through messages of one length."""
    longest = max(last - first for first, last in zip(bounds, bounds[1:]))
    mine = np.zeros(longest, np.float32)
    mine[: bounds[number + 1] - bounds[number]] = flat[bounds[number] : bounds[number + 1]]
    for theirs, part in zip(slices, gather(mine)):
        first, last = bounds[theirs], bounds[theirs + 1]
        flat[first:last] = part[: last - first]
