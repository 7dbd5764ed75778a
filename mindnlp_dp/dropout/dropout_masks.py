"""This module draws dropout masks with a counter-based random generator.

The generator is Philox (Salmon and others, Parallel Random Numbers: As Easy as 1, 2, 3, 2011). It keeps no state
between calls, so the same key and counter always give the same mask. In a training step each sample has a counter of
its own, and its elements have numbers (sample_layout.py), so its mask depends neither on which rank or micro-step
computes it, nor on the length to which it is padded. runtime/random_state.py has the keys and the counters.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mindnlp_dp.dropout.sample_layout import (
    SampleLayout,
    is_known_number_of_rows,
    layout_of,
    num_elements,
    tile_number,
)
from mindnlp_dp.runtime.random_state import SampleShard, SampleStreams, ShardOf, sample_streams

_MASK = (1 << 64) - 1
_ENTROPY = int.from_bytes(os.urandom(8), "little")

# The position of a row that all samples share: no sample's.
_SHARED = np.array([_MASK], np.uint64)

# The side of the tiles in which attention's elements are numbered.
TILE = 32


def dropout_mask(shape: Sequence[int], drop: float, key: tuple[int, int]) -> np.ndarray:
    """Return the flat mask of a dropout call: booleans that are False with probability ``drop``.

    Within a training step (:class:`~mindnlp_dp.runtime.random_state.SampleStreams`) each sample has its own mask, a
    function of the update, the call and the sample's position in the global batch; ``key[1]`` is the number of the
    call. It is a function of ``key`` (2 x 64 bits) where there is no such step, or the rows are not the samples'.
    """
    streams = sample_streams()
    if streams is None:
        return keep_mask(math.prod(shape), drop, key)
    if streams.positions is None:
        streams.record.doubt = "the batches do not say where in the global batch their rows are"
        return keep_mask(math.prod(shape), drop, key)
    if not math.prod(shape):
        return np.empty(0, bool)
    num_samples, call = len(streams.positions), key[1]
    if streams.shard is not None and streams.shard.of is ShardOf.TOKENS:
        return _mask_of_tokens(shape, drop, key, streams, streams.shard)
    layout = layout_of(shape, num_samples, streams)
    if layout is None:
        streams.record.doubt = (
            f"a tensor of shape {tuple(shape)} does not have rows for {num_samples} samples, and each micro-step draws "
            "its own mask for it"
        )
        return keep_mask(math.prod(shape), drop, key)
    if not streams.record.doubt:
        streams.record.doubt = _doubt(shape, layout, streams, call)
    return keep_mask_of_samples(shape, layout, drop, (streams.key, call), streams)


def _mask_of_tokens(
    shape: Sequence[int], drop: float, key: tuple[int, int], streams: SampleStreams, shard: SampleShard
) -> np.ndarray:
    """Return the mask of a tensor (B, L, D), (B * R, L, D) or (B * L, D) that has some of the tokens of each row."""
    assert streams.positions is not None, "checked by the caller"
    here, num_samples = shard.last - shard.first, len(streams.positions)
    is_flat = len(shape) == 2 and shape[0] % here == 0
    num_rows = shape[0] // here if is_flat else shape[0]
    if num_rows % num_samples or not (is_flat or shape[1] == here):
        streams.record.doubt = f"a tensor of shape {tuple(shape)} does not have {here} tokens of {num_samples} samples"
        return keep_mask(math.prod(shape), drop, key)
    full = (num_rows * shard.total, *shape[1:]) if is_flat else (num_rows, shard.total, *shape[2:])
    streams.shard = None
    try:
        mask = dropout_mask(full, drop, key)
    finally:
        streams.shard = shard
    return mask.reshape(num_rows, shard.total, -1)[:, shard.first : shard.last].reshape(-1)


def _doubt(shape: Sequence[int], layout: SampleLayout, streams: SampleStreams, call: int) -> str:
    """Return why another number of ranks may draw other masks for this tensor; empty if it does not."""
    if layout.axis == 0 and len(shape) == 2 and not is_known_number_of_rows(layout.dims[0], streams):
        return (
            f"a tensor of shape {tuple(shape)} may have {layout.dims[0]} rows for each of {layout.num_owners} samples, "
            "or be a table that they share"
        )
    if streams.record.layouts.setdefault(call, layout.fixed) != layout.fixed:
        return (
            f"dropout call {call} had a tensor of another layout before, and has one of shape {tuple(shape)} now, in "
            "which the mask of a sample depends on the padded length or on other samples"
        )
    return ""


def keep_mask(size: int, drop: float, key: tuple[int, int]) -> np.ndarray:
    """Return ``size`` booleans, each False with probability ``drop``, that depend on ``key`` (2 x 64 bits) only."""
    keep = np.empty(size, bool)
    _draw(_generator(key), drop, keep)
    return keep


def keep_mask_of_samples(
    shape: Sequence[int], layout: SampleLayout, drop: float, key: tuple[int, int], streams: SampleStreams
) -> np.ndarray:
    """Return the flat mask of a tensor of ``shape`` whose elements belong to samples as ``layout`` says.

    The mask of a sample's element is a function of ``key`` (2 x 64 bits), the sample's position and the element's
    number, which depends neither on the padded length nor on the side of the padding. With a shard it is that part of
    the mask of the whole sample.
    """
    dims, full, mine = layout.dims, list(layout.dims), [slice(None)] * len(layout.dims)
    if (shard := streams.shard) is not None:
        sharded = layout.shard_dim(shard)
        per_block = dims[sharded] // (shard.last - shard.first)
        full[sharded] = shard.total * per_block
        mine[sharded] = slice(shard.first * per_block, shard.last * per_block)
    positions = _SHARED if layout.axis is None or streams.positions is None else streams.positions
    keep = np.empty((len(positions), *dims), bool)
    # Elements are numbered by token first: two dimensions of tokens by tiles, which follow the others.
    numbered = (*layout.inner, *layout.tokens) if len(layout.tokens) == 2 else (*layout.tokens, *layout.inner)
    of_others = [mine[number] for number in numbered if len(layout.tokens) < 2 or number in layout.inner]
    sizes = [full[number] for number in numbered]
    is_in_order = shard is None and numbered == tuple(range(len(dims))) and len(layout.tokens) < 2
    drawn = np.empty(0 if is_in_order else num_elements(layout, full, TILE), bool)
    generator = _generator(key)
    # Assigning the state takes a tenth of the time of making a generator.
    state = generator.bit_generator.state
    for own, position in zip(keep, positions.tolist()):
        state["state"]["counter"][:] = 0, position, 0, 0
        generator.bit_generator.state = state
        if is_in_order:
            _draw(generator, drop, own.reshape(-1))
            continue
        _draw(generator, drop, drawn)
        by_number = own.transpose(numbered)
        if len(layout.tokens) == 2:
            tiles = drawn.reshape(-1, *sizes[:-2], TILE, TILE)
            own_tiles = (slice(None), *of_others)
            _untile(tiles[own_tiles], by_number)
        else:
            by_number[...] = drawn.reshape(sizes)[tuple(of_others)]
    if streams.starts and layout.axis is not None:
        _shift(keep, layout, streams.starts)
    if layout.is_in_blocks:
        keep = keep.swapaxes(0, 1)
    if not layout.axis:
        return keep.reshape(-1)
    # The dimensions before the samples' come last in ``dims``.
    keep = keep.reshape(len(positions), *dims[1:])
    return np.moveaxis(keep, range(-layout.axis, 0), range(layout.axis)).reshape(-1)


def _untile(tiles: np.ndarray, out: np.ndarray) -> None:
    """Write tiles (number, ..., TILE, TILE) to matrices (..., height, width)."""
    for row, top in enumerate(range(0, out.shape[-2], TILE)):
        for column, left in enumerate(range(0, out.shape[-1], TILE)):
            part = out[..., top : top + TILE, left : left + TILE]
            part[...] = tiles[tile_number(row, column), ..., : part.shape[-2], : part.shape[-1]]


def _shift(keep: np.ndarray, layout: SampleLayout, starts: Mapping[int, np.ndarray]) -> None:
    """Move the masks (owners, rows, ...) of texts that are padded on the left to where their first tokens are."""
    owners, rows = keep.shape[:2]
    for token in layout.tokens:
        first = starts.get(layout.dims[token])
        if first is None:
            continue
        if token == 0:
            for owner in np.flatnonzero(first[:, 0]):
                keep[owner] = np.roll(keep[owner], first[owner, 0], 0)
            continue
        of_rows = np.repeat(first, max(1, rows // first.shape[1]), axis=1)[:, :rows]
        for owner, row in np.argwhere(np.broadcast_to(of_rows, (owners, rows))):
            keep[owner, row] = np.roll(keep[owner, row], of_rows[owner, row], token - 1)


def _generator(key: tuple[int, int]) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=np.array(key, np.uint64)))


def _draw(generator: np.random.Generator, drop: float, keep: np.ndarray) -> None:
    """Set each element of ``keep`` to False with probability ``drop``; it depends on its index, but not on the size.

    An element is dropped where a uniformly distributed number is less than ``drop``. The number's first byte decides in
    255 of 256 cases; where this byte equals the first byte of ``drop``, a hash of the index decides.
    """
    first, others = divmod(drop * 256, 1.0)
    words = generator.bit_generator.random_raw(1 + -(-keep.size // 8))
    drawn = words[1:].view(np.uint8)[: keep.size]
    if first > 255:
        keep[:] = False
        return
    np.greater(drawn, np.uint8(first), out=keep)
    undecided = np.flatnonzero(drawn == np.uint8(first))
    if len(undecided):
        keep[undecided] = _hashed(undecided, int(words[0])) >= others


def _hashed(numbers: np.ndarray, salt: int) -> np.ndarray:
    """Return a number in [0, 1) for each of some integers (SplitMix64; Steele and others, 2014)."""
    z = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(salt)
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return (z ^ z >> np.uint64(31)).astype(np.float64) / 2**64


def next_key() -> tuple[int, int]:
    """Return the seed and offset of MindSpore's default generator, and advance its offset by 1.

    A training step sets the state from (seed, rank, update, micro-step), and every dropout call advances it: the offset
    is the number of the call. ``mindspore.recompute`` restores the state and so gets the same masks. If no seed was
    ever set, masks differ between processes.
    """
    import mindspore
    from mindspore.common.generator import default_generator

    seed, offset = (int(state.asnumpy().flat[0]) for state in default_generator._step(_one_call()))
    if not seed and not default_generator._generator.attrs.get("manual_seed"):
        # MindSpore's generator was not seeded, and its default seed is 0.
        own = mindspore.get_seed()
        seed = _ENTROPY if own is None else own
    return seed & _MASK, offset & _MASK


@functools.cache
def _one_call() -> Any:
    import mindspore

    return mindspore.Tensor(1, mindspore.int64)
