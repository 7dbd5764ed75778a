"""This module computes how parameters are packed into buckets, and how a bucket is split into one slice per rank.

It uses only shapes and types, no tensors. By default buckets are filled from the last parameter to the first, which is
about the order in which a backward pass computes gradients.

A slice ends only where a block of a parameter ends (:data:`BLOCK_NUMEL`). So a sum that is computed block by block,
such as the squares of a norm, has the same bits for any number of slices.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

BYTES_PER_MB = 1 << 20

# In memory every parameter begins at a multiple of this many elements: a multiple of a cache line, of the widest vector
# register and of the blocks that are sent between hosts or skipped (transports/mpi/ring.py). So no result depends on
# its place.
ALIGN_NUMEL = 64

# The elements of a block, which is never split between ranks; less than what OpenBLAS would split among threads.
BLOCK_NUMEL = 8192

_ITEM_SIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Slot:
    """Gives the place of parameter ``index`` in its bucket: elements ``[offset, offset + numel)``."""

    index: int
    offset: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class BucketLayout:
    """Describes one bucket: consecutive slots of one type, each at a multiple of :data:`ALIGN_NUMEL`.

    Attributes:
        numel: The elements of the bucket, gaps included.
        num_bytes: The bytes of its parameters, without gaps.
    """

    dtype: str
    slots: tuple[Slot, ...]

    @property
    def numel(self) -> int:
        return aligned(self.slots[-1].offset + self.slots[-1].numel) if self.slots else 0

    @property
    def num_bytes(self) -> int:
        return sum(slot.numel for slot in self.slots) * _ITEM_SIZE[self.dtype]

    def slice_bounds(self, num_slices: int) -> tuple[int, ...]:
        """Return the begin of each of ``num_slices`` slices and the end of the last: as even as full blocks allow.

        >>> BucketLayout("float32", (Slot(1, 0, (10000,)), Slot(0, 10048, (30,)))).slice_bounds(2)
        (0, 8192, 10112)
        """
        boundaries = [slot.offset + block for slot in self.slots for block in range(0, max(slot.numel, 1), BLOCK_NUMEL)]
        boundaries.append(self.numel)
        bounds = [_nearest(boundaries, self.numel * number / num_slices) for number in range(num_slices)]
        return (0, *bounds[1:], self.numel)


def aligned(numel: int) -> int:
    """Round up to a multiple of :data:`ALIGN_NUMEL`."""
    return -(-numel // ALIGN_NUMEL) * ALIGN_NUMEL


def _nearest(boundaries: Sequence[int], wanted: float) -> int:
    after = min(bisect.bisect_left(boundaries, wanted), len(boundaries) - 1)
    return min(boundaries[max(after - 1, 0)], boundaries[after], key=lambda boundary: abs(boundary - wanted))


def first_order(num_parameters: int) -> list[int]:
    """Return parameters from the last to the first: about the order in which a backward pass computes gradients."""
    return list(reversed(range(num_parameters)))


def completed_order(order: Sequence[int], num_parameters: int) -> list[int]:
    """Return ``order``, followed by the parameters that it does not name, from the last to the first.

    >>> completed_order([1, 3], 5)
    [1, 3, 4, 2, 0]
    """
    named = set(order)
    return [*order, *(index for index in first_order(num_parameters) if index not in named)]


def pack_buckets(
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[str],
    bucket_cap_mb: float,
    order: Optional[Sequence[int]] = None,
) -> tuple[BucketLayout, ...]:
    """Pack parameters into buckets of at most ``bucket_cap_mb`` MiB.

    ``order`` is the order in which a backward pass computes their gradients; by default, from the last to the first.
    All parameters of a bucket have the same type. A parameter is never split: one larger than the cap gets its own
    bucket.

    >>> [[s.index for s in b.slots] for b in pack_buckets([(4,), (2, 2), (3,)], ["float32"] * 3, 28 / 2**20)]
    [[2, 1], [0]]
    """
    check_bucket_cap_mb(bucket_cap_mb)
    buckets: list[BucketLayout] = []
    open_slots: dict[str, list[Slot]] = {}
    for index in first_order(len(shapes)) if order is None else order:
        dtype, shape = dtypes[index], tuple(shapes[index])
        if dtype not in _ITEM_SIZE:
            raise TypeError(f"parameter {index} is {dtype}; gradients can be {', '.join(_ITEM_SIZE)}")
        slots = open_slots.setdefault(dtype, [])
        filled = sum(slot.numel for slot in slots)
        end = aligned(slots[-1].offset + slots[-1].numel) if slots else 0
        if slots and (filled + math.prod(shape)) * _ITEM_SIZE[dtype] > bucket_cap_mb * BYTES_PER_MB:
            buckets.append(BucketLayout(dtype, tuple(slots)))
            slots.clear()
            end = 0
        slots.append(Slot(index, end, shape))
    buckets += [BucketLayout(dtype, tuple(slots)) for dtype, slots in open_slots.items() if slots]
    return tuple(buckets)


def check_bucket_cap_mb(bucket_cap_mb: Any) -> float:
    """Return the cap as a float; raise ValueError if it is not positive."""
    if isinstance(bucket_cap_mb, (int, float)) and bucket_cap_mb > 0:
        return float(bucket_cap_mb)
    raise ValueError(
        f"bucket_cap_mb must be positive, got {bucket_cap_mb!r}; 2 suits a CPU, 25 a device, and "
        "benchmarks/bench_bucket_cap.py says what suits this machine"
    )


@dataclass(frozen=True)
class ParameterSlice:
    """Elements ``[start, stop)`` of parameter ``index``, and the ``offset`` of the first one in a flat array."""

    index: int
    start: int
    stop: int
    offset: int

    @property
    def flat(self) -> slice:
        return slice(self.offset, self.offset + self.stop - self.start)
