"""Finds which elements of a tensor belong to which sample and token, for the masks that dropout_masks.py draws.

The layout follows from the tensor's shape, the number of samples, and the lengths of the batch's columns. Elements are
numbered so that padding does not change the number of an element: along a dimension of tokens, the first numbers are
those of the first tokens, whatever the padded length is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

from mindnlp_dp.runtime.random_state import SampleShard, SampleStreams, ShardOf


@dataclass(frozen=True)
class SampleLayout:
    """The layout of a tensor whose elements belong to samples, or that all samples share.

    Attributes:
        axis: the dimension of the samples; None if all samples share the tensor.
        num_owners: the number of samples, 1 if they share the tensor.
        dims: the dimensions of one sample's elements. The first is the number of its rows in dimension ``axis``, then
            follow the dimensions after ``axis``, and those before it.
        tokens: the numbers of those of ``dims`` that count tokens, at most two.
        is_in_blocks: whether the first rows of all samples come first, then their second ones, as after
            ``concat([chosen, rejected])``; else the rows of a sample follow each other.
    """

    axis: Optional[int]
    num_owners: int
    dims: tuple[int, ...]
    tokens: tuple[int, ...]
    is_in_blocks: bool = False

    @property
    def inner(self) -> tuple[int, ...]:
        """The numbers of the ``dims`` that do not count tokens."""
        return tuple(number for number in range(len(self.dims)) if number not in self.tokens)

    @property
    def fixed(self) -> tuple[Optional[int], ...]:
        """What must be equal for two tensors if the same elements are to have the same numbers."""
        sizes = [None if number in self.tokens else size for number, size in enumerate(self.dims)]
        return self.axis, self.is_in_blocks, *sizes

    def shard_dim(self, shard: SampleShard) -> int:
        """Return the number of the dimension in ``dims`` that a shard has a part of."""
        if shard.of is ShardOf.WIDTH:
            return len(self.dims) - 1 - (self.axis or 0)
        # Attention heads have their own dimension, or are flattened into the rows.
        return 1 if len(self.dims) == 4 else 0


def layout_of(shape: Sequence[int], num_samples: int, streams: SampleStreams) -> Optional[SampleLayout]:
    """Return the layout of a tensor in a micro-batch of ``num_samples``; None if its rows are not those of samples.

    Known are, with B samples, L tokens, R rows per sample (such as choices), N heads and D features: (B, D),
    (B * L, D), (B, L, D), (B * R, L, D), (B, D, L) and (L, B, D); attention as (B, N, L, L), (B * R, N, L, L),
    (B * N, L, L) and (L, L, B, N), with two lengths in cross-attention; and tables that all samples share, (L, D) and
    (1, L, D). Rows that are not a column's choices are taken for several batches end to end: (R * B, L, D).
    """
    shape, lengths = tuple(shape), streams.lengths
    if streams.is_shared:
        return SampleLayout(None, 1, shape, (0,))
    axis = _axis_of_samples(shape, num_samples, streams)
    if axis:
        # Models that compute with the length first.
        dims = (1, *shape[axis + 1 :], *shape[:axis])
        before = range(len(dims) - axis, len(dims))
        return SampleLayout(axis, num_samples, dims, tuple(each for each in before if dims[each] in lengths)[-2:])
    if axis is None:
        is_shared = shape and (shape[0] == 1 or shape[0] in lengths)
        return SampleLayout(None, 1, shape, (int(shape[0] == 1 < len(shape)),)) if is_shared else None
    dims = (shape[0] // num_samples, *shape[1:])
    tokens = _tokens(dims, streams)
    has_flat_heads = len(dims) == 3 and len(tokens) == 2
    is_in_blocks = dims[0] > 1 and dims[0] not in streams.choices and not has_flat_heads
    if len(dims) == 2:
        is_in_blocks &= dims[0] in streams.record.batches_end_to_end
    elif is_in_blocks:
        streams.record.batches_end_to_end.add(dims[0])
    return SampleLayout(0, num_samples, dims, tokens, is_in_blocks)


def _axis_of_samples(shape: Sequence[int], num_samples: int, streams: SampleStreams) -> Optional[int]:
    """Return the dimension that has one or several rows for each sample; None if there is none.

    It is the first dimension, or it follows dimensions of tokens, or of XLNet's relative positions, two per token.
    """
    for axis, size in enumerate(shape):
        if size == num_samples:
            return axis
        if size not in streams.lengths and size / 2 not in streams.lengths:
            break
    is_table = len(shape) == 2 and shape[0] in streams.lengths and num_samples > 1
    return 0 if shape and shape[0] % num_samples == 0 and not is_table else None


def _tokens(dims: tuple[int, ...], streams: SampleStreams) -> tuple[int, ...]:
    """Return the dimensions of a sample's elements (rows, ...) that count tokens."""
    rows, *others = dims
    is_length = [size in streams.lengths for size in dims]
    has_shard_of_heads = streams.shard is not None and streams.shard.of is ShardOf.HEADS
    if len(dims) <= 2:
        return (0,) if is_known_number_of_rows(rows, streams) else ()
    if len(dims) == 3:
        has_heads = rows > 1 and rows not in streams.choices and (all(is_length[1:]) or others[0] == others[1])
        if has_shard_of_heads or has_heads:
            return 1, 2
        return (2,) if is_length[2] and not is_length[1] else (1,)
    if len(dims) == 4:
        is_attention = any(is_length[2:]) or others[1] == others[2]
        # Longformer has (B, L, N, window).
        is_windowed = is_length[1] and not all(is_length[2:])
        return (2, 3) if has_shard_of_heads or (is_attention and not is_windowed) else (1,)
    return (1,)


def is_known_number_of_rows(rows: int, streams: SampleStreams) -> bool:
    """Return whether a sample can have so many rows: one, or one for each token, choice, or token of each choice."""
    return (
        rows == 1
        or rows in streams.record.batches_end_to_end
        or rows in streams.lengths
        or rows in streams.choices
        or any(rows == each * length for each in streams.choices for length in streams.lengths)
    )


def tile_number(row: int, column: int) -> int:
    """Return the number of an entry of a matrix, counted by shells of the larger index.

    The first n * n numbers are those of the n x n entries at the beginning, for every n (Rosenberg and Strong, 1972).
    """
    return row * row + column if row >= column else column * column + 2 * column - row


def num_elements(layout: SampleLayout, dims: Sequence[int], tile: int) -> int:
    """Return the number of elements to draw for each owner, with sides of whole tiles if two dimensions are tokens."""
    if len(layout.tokens) < 2:
        return math.prod(dims)
    tiles = -(-max(dims[number] for number in layout.tokens) // tile)
    return (tiles * tile) ** 2 * math.prod(dims[number] for number in layout.inner)
