"""How parameters are packed into buckets: arithmetic on shapes, nothing else.

Goes in: shapes and types in the order of the model. Comes out: buckets, filled
from the last parameter to the first, the order in which a backward pass
finishes gradients. Knows no tensors and no ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

BYTES_PER_MB = 1 << 20
_ITEM_SIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Slot:
    """Where parameter ``index`` lies in its bucket: elements ``[offset, offset + numel)``."""

    index: int
    offset: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class BucketLayout:
    """One bucket: slots that follow each other without gaps, all of one type."""

    dtype: str
    slots: tuple[Slot, ...]

    @property
    def numel(self) -> int:
        return sum(slot.numel for slot in self.slots)

    @property
    def num_bytes(self) -> int:
        return self.numel * _ITEM_SIZE[self.dtype]


def first_order(num_parameters: int) -> list[int]:
    """Parameters from the last to the first: about the order in which a backward pass finishes their gradients."""
    return list(reversed(range(num_parameters)))


def completed_order(order: Sequence[int], num_parameters: int) -> list[int]:
    """``order``, and behind it those that it does not name, from the last to the first.

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

    ``order`` is that in which a backward pass finishes them; by default, from the
    last to the first. A bucket holds one type; a parameter larger than the cap gets a bucket of its
    own, for a parameter is never split.

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
        if slots and (filled + math.prod(shape)) * _ITEM_SIZE[dtype] > bucket_cap_mb * BYTES_PER_MB:
            buckets.append(BucketLayout(dtype, tuple(slots)))
            slots.clear()
            filled = 0
        slots.append(Slot(index, filled, shape))
    buckets += [BucketLayout(dtype, tuple(slots)) for dtype, slots in open_slots.items() if slots]
    return tuple(buckets)


def check_bucket_cap_mb(bucket_cap_mb: Any) -> float:
    """The cap as a number, or ValueError."""
    if isinstance(bucket_cap_mb, (int, float)) and bucket_cap_mb > 0:
        return float(bucket_cap_mb)
    raise ValueError(
        f"bucket_cap_mb must be positive, got {bucket_cap_mb!r}; 2 suits a CPU, 25 a device, and "
        "benchmarks/bench_bucket_cap.py says what suits this machine"
    )
