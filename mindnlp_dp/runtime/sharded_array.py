"""This module describes arrays of which each rank has a part: shards along a dimension, and pieces of a flat array.

Tensor parallelism shards weights along a dimension (:class:`Shard`), and fully sharded models have a range of each flat
weight on each rank (:class:`FlatShard`). ZeRO shards flat arrays, so that a rank has pieces of a parameter's state
(:class:`ShardedArray`), and a checkpoint in several files holds these pieces.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Optional

import numpy as np

from mindnlp_dp.runtime.arrays import dtype_name, to_host
from mindnlp_dp.runtime.shard_bounds import shard_bounds


@dataclass(frozen=True)
class Shard:
    """Describes how a weight is sharded: dimension ``dim`` has ``num_blocks`` equal blocks, each split over the ranks.

    >>> [part.tolist() for part in (Shard(0, 2).part(np.arange(8), rank, 2) for rank in (0, 1))]
    [[0, 1, 4, 5], [2, 3, 6, 7]]
    """

    dim: int
    num_blocks: int = 1

    def part(self, full: np.ndarray, index: int, num_shards: int) -> np.ndarray:
        return np.concatenate([full[place] for place in self._places(full.shape, index, num_shards)], axis=self.dim)

    def put(self, part: np.ndarray, full: np.ndarray, index: int, num_shards: int) -> None:
        """Write a rank's part into the full array."""
        places = self._places(full.shape, index, num_shards)
        for place, piece in zip(places, np.split(part, self.num_blocks, axis=self.dim)):
            full[place] = piece

    def shape(self, full: Sequence[int], index: int, num_shards: int) -> tuple[int, ...]:
        bounds = shard_bounds(full[self.dim] // self.num_blocks, num_shards)
        size = self.num_blocks * (bounds[index + 1] - bounds[index])
        return (*full[: self.dim], size, *full[self.dim + 1 :])

    def _places(self, shape: Sequence[int], index: int, num_shards: int) -> list[tuple[slice, ...]]:
        block = shape[self.dim] // self.num_blocks
        bounds = shard_bounds(block, num_shards)
        before = (slice(None),) * self.dim
        begins = range(0, shape[self.dim], block) if block else ()
        return [(*before, slice(begin + bounds[index], begin + bounds[index + 1])) for begin in begins]


@dataclass(frozen=True)
class FlatShard:
    """Describes how a fully sharded weight is split: each rank has a range of its elements, in one dimension.

    >>> [part.tolist() for part in (FlatShard().part(np.arange(6).reshape(2, 3), rank, 3) for rank in range(3))]
    [[0, 1], [2, 3], [4, 5]]
    """

    def part(self, full: np.ndarray, index: int, num_shards: int) -> np.ndarray:
        return full.reshape(-1)[self.range(full.shape, index, num_shards)]

    def put(self, part: np.ndarray, full: np.ndarray, index: int, num_shards: int) -> None:
        """Write a rank's part into the full array, which is contiguous."""
        full.reshape(-1)[self.range(full.shape, index, num_shards)] = part

    def shape(self, full: Sequence[int], index: int, num_shards: int) -> tuple[int, ...]:
        places = self.range(full, index, num_shards)
        return (places.stop - places.start,)

    def range(self, shape: Sequence[int], index: int, num_shards: int) -> slice:
        """Return the positions of a rank's elements in the flat array."""
        begin, end = shard_bounds(math.prod(shape), num_shards)[index : index + 2]
        return slice(begin, end)


@dataclass(frozen=True)
class FlatLayout:
    """The order in which an array of ``shape`` is flattened: shard after shard if it is sharded.

    >>> FlatLayout((2, 4), Shard(1), 2).full(np.arange(8)).tolist()
    [[0, 1, 4, 5], [2, 3, 6, 7]]
    """

    shape: tuple[int, ...]
    shard: Optional[Shard] = None
    num_shards: int = 1

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def shape_of(self, index: int) -> tuple[int, ...]:
        """Return the shape of one part."""
        return self.shape if self.shard is None else self.shard.shape(self.shape, index, self.num_shards)

    def offset_of(self, index: int) -> int:
        """Return the position of a part's first element in the flat array."""
        return 0 if self.shard is None else sum(math.prod(self.shape_of(earlier)) for earlier in range(index))

    def full(self, flat: np.ndarray) -> np.ndarray:
        """Return the array, in its shape, from its elements in this order."""
        if self.shard is None:
            return flat.reshape(self.shape)
        full = np.empty(self.shape, flat.dtype)
        for index in range(self.num_shards):
            shape, begin = self.shape_of(index), self.offset_of(index)
            self.shard.put(flat[begin : begin + math.prod(shape)].reshape(shape), full, index, self.num_shards)
        return full


@dataclass(frozen=True)
class ShardedArray:
    """An array of which every rank has some pieces; together the ranks have all of it.

    Attributes:
        layout: its shape, and the order in which its elements are counted.
        dtype: the type of the tensor, such as "bfloat16".
        pieces: this rank's pieces: flat arrays, each with the position of its first element.
    """

    layout: FlatLayout
    dtype: str
    pieces: Sequence[tuple[int, np.ndarray]]

    def within(self, layout: FlatLayout, begin: int) -> ShardedArray:
        """Return the array in which this one begins at position ``begin``."""
        return ShardedArray(layout, self.dtype, [(begin + start, piece) for start, piece in self.pieces])


def as_sharded(value: Any) -> Any:
    """Return a tensor as a :class:`ShardedArray` that is all on this rank; other values as they are."""
    if not hasattr(value, "asnumpy"):
        return value
    array = to_host(value)
    return ShardedArray(FlatLayout(array.shape), dtype_name(value), [(0, array.reshape(-1))])


def without_pieces(value: Any) -> Any:
    """Return a :class:`ShardedArray` as it is on a rank that has none of it; other values as they are."""
    return replace(value, pieces=()) if isinstance(value, ShardedArray) else value
