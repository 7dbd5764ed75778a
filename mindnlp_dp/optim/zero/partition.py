"""This module computes which pieces of weights, gradients and state a rank updates, for the current buckets.

The flat updater (flat_updater.py) creates a :class:`Partition` whenever buckets are packed. It gives the pieces of
parameters whose squares this rank sums, the pieces that it updates, and their arrays, split into segments for the
rules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

import numpy as np

from mindnlp_dp.communication.transports.channel import Channel
from mindnlp_dp.data_parallel.buckets.bucket import Bucket
from mindnlp_dp.data_parallel.buckets.bucket_layout import BLOCK_NUMEL, ParameterSlice, aligned
from mindnlp_dp.data_parallel.synchronizer import GradientSynchronizer
from mindnlp_dp.optim.fused.flat_weights import FlatWeights
from mindnlp_dp.optim.fused.rules import Segment
from mindnlp_dp.runtime.arrays import aligned_zeros

# Longer segments are split, so that a segment stays in the cache while a rule goes over it several times.
SEGMENT_NUMEL = 64 * BLOCK_NUMEL

# A part of a bucket: its offset in the bucket, and the sum there.
Range = tuple[int, np.ndarray]


class Partition:
    """Maps buckets to flat weights and optimizer state, for the flat updater.

    The constructor moves the parameters into the flat array; it is a collective.

    Args:
        shard_scope: The ranks that shard the update: those of each "host", those of the whole "world", or None if no
            rank does.
        may_share: Whether the ranks of a host may share one set of weights.

    Attributes:
        buckets: The buckets that this partition is for.
        weights: The flat array that the parameters now point into.
        shares_memory: Whether the ranks of this host share that array.
        updated: The pieces that this rank updates, with their offsets in the arrays of its state.
        state_numel: The length of the arrays of its state.
    """

    def __init__(self, sync: GradientSynchronizer, *, shard_scope: Optional[str], may_share: bool) -> None:
        self.buckets: Sequence[Bucket] = sync.buckets
        self._channel: Channel = sync.channel
        self._shard_scope = shard_scope
        layouts = [bucket.layout for bucket in self.buckets]
        self._bounds = [layout.slice_bounds(self._channel.world_size) for layout in layouts]
        numel = sum(layout.numel for layout in layouts)
        shared = self._channel.share(4 * numel) if may_share and numel else None
        self.shares_memory = shared is not None
        if shard_scope == "host" and shared is None:
            # Without shared memory this rank would not get the slices of the host's other ranks.
            self._shard_scope = shard_scope = "world"
        # The slice index of each rank; the same list on every rank.
        self._slices: list[int] = (
            sync.group.all_gather_object(self._channel.slice_index) if shard_scope == "world" else []
        )
        self.writes = not self.shares_memory or self._channel.is_first_of_host
        memory = aligned_zeros(numel, np.float32) if shared is None else shared.view(np.float32)
        self.weights = FlatWeights(sync.names, sync.parameters, layouts, memory, is_shared=self.shares_memory)
        if self.writes:
            self.weights.attach()
        self.wait()
        self.weights.bind()
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
        full = [[(first, array) for first, array in bucket.sums() if len(array)] for bucket in self.buckets]
        self._ranges = {None: full, "host": self._of_host(), "world": own}[shard_scope]
        self.updated: list[ParameterSlice] = []
        self.state_numel = 0
        for number, ranges in enumerate(self._ranges):
            for first, array in ranges:
                self.updated += self._pieces(number, first, len(array), self.state_numel - first)
                self.state_numel += len(array)

    def _of_host(self) -> list[list[Range]]:
        """Return this local rank's slices of the buckets; each slice has one part for each host."""
        hosts = self._channel.num_hosts
        number = self._channel.slice_index // hosts
        return [
            _within(bucket.sums(), *bounds[::hosts][number : number + 2])
            for bucket, bounds in zip(self.buckets, self._bounds)
        ]

    def sums_view(self, function: Callable[[int, int, np.ndarray], None]) -> None:
        """Call ``function`` with parameter index, start and gradient for every piece of this rank's slices.

        It is called on the exchanging thread whenever the sum of a bucket is complete.
        """

        def report(own: Sequence[tuple[ParameterSlice, np.ndarray]]) -> None:
            for piece, gradient in own:
                function(piece.index, piece.start, gradient)

        for bucket, own in zip(self.buckets, self._own):
            bucket.on_sum = functools.partial(report, own)

    def read_sums(self) -> None:
        """Run the callbacks for sums that were complete before :meth:`sums_view` was called."""
        for bucket in self.buckets:
            assert bucket.on_sum is not None, "sums_view comes first"
            bucket.on_sum()

    def release_views(self) -> None:
        """Release the buckets, so that their memory can be reused; only the weights remain."""
        self.buckets, self._own, self._ranges = (), [], []

    def wait(self) -> None:
        """Wait for all ranks that share the weights (a barrier)."""
        if self.shares_memory:
            self._channel.wait_for_host()

    def _pieces(self, number: int, first: int, numel: int, shift: int) -> list[ParameterSlice]:
        """Return the parameters' pieces in a part of a bucket, with offsets that are larger by ``shift``."""
        pieces = []
        for slot in self.buckets[number].layout.slots:
            begin, end = max(slot.offset, first), min(slot.offset + slot.numel, first + numel)
            if begin < end:
                pieces.append(ParameterSlice(slot.index, begin - slot.offset, end - slot.offset, begin + shift))
        return pieces

    def segments(self, partition: Sequence[int], state: Mapping[str, np.ndarray]) -> list[Segment]:
        """Return this rank's segments; each has parameters of one ``partition`` number. Number -1 is left out."""
        segments, length = [], 0
        for number, (base, ranges) in enumerate(zip(self.weights.bases, self._ranges)):
            for first, array in ranges:
                for run in _runs(self._pieces(number, first, len(array), 0), partition):
                    begin = run[0].offset
                    # The gap at the end is included: it has zeros, and vectorized kernels then have no remainder.
                    end = min(aligned(run[-1].flat.stop), first + len(array))
                    here = slice(length + begin - first, length + end - first)
                    segments.append(
                        Segment(
                            self.weights.memory[base + begin : base + end],
                            array[begin - first : end - first],
                            {name: values[here] for name, values in state.items()},
                            [ParameterSlice(part.index, part.start, part.stop, part.offset - begin) for part in run],
                        )
                    )
                length += len(array)
        return segments

    def publish(self, gather: Any) -> None:
        """Give all new weights to every rank; ``gather`` is the group's ``all_gather``. A collective."""
        if self._shard_scope == "world" and self._channel.world_size > 1:
            for base, bounds in zip(self.weights.bases, self._bounds):
                flat = self.weights.memory[base : base + bounds[-1]]
                if self.shares_memory:
                    self._channel.gather_from_hosts(flat, bounds)
                else:
                    _gather(flat, bounds, self._slices, self._channel.slice_index, gather)
        self._channel.wait_for_host()

    def release(self) -> None:
        """Wait until this host's ranks may overwrite their rows of gradients: a replicated update reads all rows."""
        if self._shard_scope is None:
            self._channel.wait_for_host()


def _within(ranges: Sequence[Range], begin: int, end: int) -> list[Range]:
    """Return the parts of these ranges that are between two offsets in their bucket."""
    cut = [(max(first, begin), first, array) for first, array in ranges]
    found = [(start, array[start - first : max(end - first, 0)]) for start, first, array in cut]
    return [(start, part) for start, part in found if len(part)]


def _runs(pieces: Sequence[ParameterSlice], partition: Sequence[int]) -> list[list[ParameterSlice]]:
    """Group consecutive pieces with the same number into runs of at most :data:`SEGMENT_NUMEL` elements."""
    runs: list[list[ParameterSlice]] = []
    previous: Optional[int] = None
    for piece in pieces:
        number = partition[piece.index]
        for start in range(piece.start, piece.stop, SEGMENT_NUMEL):
            stop = min(start + SEGMENT_NUMEL, piece.stop)
            part = ParameterSlice(piece.index, start, stop, piece.offset + start - piece.start)
            if number >= 0 and number == previous and part.flat.stop - runs[-1][0].offset <= SEGMENT_NUMEL:
                runs[-1].append(part)
            elif number >= 0:
                runs.append([part])
            previous = number
    return runs


def _gather(flat: np.ndarray, bounds: Sequence[int], slices: Sequence[int], number: int, gather: Any) -> None:
    """All-gather the ranks' slices, padded to messages of equal length."""
    longest = max(last - first for first, last in zip(bounds, bounds[1:]))
    mine = np.zeros(longest, np.float32)
    mine[: bounds[number + 1] - bounds[number]] = flat[bounds[number] : bounds[number + 1]]
    for theirs, part in zip(slices, gather(mine)):
        first, last = bounds[theirs], bounds[theirs + 1]
        flat[first:last] = part[: last - first]
