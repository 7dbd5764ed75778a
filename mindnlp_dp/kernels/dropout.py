"""This module draws dropout masks with a counter-based random generator; functions.py calls it.

The generator is Philox (Salmon and others, Parallel Random Numbers: As Easy as 1, 2, 3, 2011). It keeps no state
between calls, so the same key and counter always give the same mask. In a training step each sample has a counter of
its own, so its mask does not depend on which rank or micro-step computes it.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Container, Sequence
from typing import Any, Optional

import numpy as np

from mindnlp_dp.kernels.memory import empty
from mindnlp_dp.kernels.workers import parallel_for_blocks
from mindnlp_dp.runtime.random_state import Shard, sample_streams

_MASK = (1 << 64) - 1
_ENTROPY = int.from_bytes(os.urandom(8), "little")

# The position of a row that all samples share: no sample's.
_SHARED = np.array([_MASK], np.uint64)


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
        streams.fallback = "the batches do not say where in the global batch their rows are"
        return keep_mask(math.prod(shape), drop, key)
    num_samples, key_of_call = len(streams.positions), (streams.key, key[1])
    if not math.prod(shape):
        return np.empty(0, bool)
    axis = _axis_of_samples(shape, num_samples, streams.lengths)
    if axis is not None:
        order = (axis, *(each for each in range(len(shape)) if each != axis))
        moved = tuple(shape[each] for each in order)
        keep = keep_mask_of_samples(moved, drop, key_of_call, streams.positions, streams.shard)
        return keep if not axis else np.moveaxis(keep.reshape(moved), 0, axis).reshape(-1)
    if shape and (shape[0] == 1 or shape[0] in streams.lengths):
        # All samples share it, such as embeddings of positions: all ranks drop the same elements.
        return keep_mask_of_samples(shape, drop, key_of_call, _SHARED, streams.shard)
    streams.fallback = f"a tensor of shape {tuple(shape)} does not have rows for {num_samples} samples"
    return keep_mask(math.prod(shape), drop, key)


def _axis_of_samples(shape: Sequence[int], num_samples: int, lengths: Container[int]) -> Optional[int]:
    """Return the dimension of a tensor that has a row, or several rows, for each sample; None if there is none.

    It is the first dimension, or it follows dimensions of a batch's ``lengths`` in models that compute with the length
    first, such as XLNet.
    """
    for axis, size in enumerate(shape):
        if size == num_samples:
            return axis
        if size not in lengths:
            break
    is_table = len(shape) == 2 and shape[0] in lengths and num_samples > 1
    return 0 if shape and shape[0] % num_samples == 0 and not is_table else None


def keep_mask(size: int, drop: float, key: tuple[int, int]) -> np.ndarray:
    """Return ``size`` booleans, each False with probability ``drop``, that depend on ``key`` (2 x 64 bits) only."""
    return _draw(_generator(key), size, drop)


def keep_mask_of_samples(
    shape: Sequence[int], drop: float, key: tuple[int, int], positions: np.ndarray, shard: Optional[Shard] = None
) -> np.ndarray:
    """Return the flat mask of a tensor whose rows belong to samples, equally many to each, in the samples' order.

    The mask of a sample is a function of ``key`` (2 x 64 bits), its number in ``positions``, and its size. With a
    ``shard`` it is that part of the mask of the whole sample.
    """
    generator, per_sample = _generator(key), math.prod(shape) // len(positions)
    # Assigning the state takes a tenth of the time of making a generator.
    state = generator.bit_generator.state
    keep = np.empty((len(positions), per_sample), bool)
    for row, position in zip(keep, positions.tolist()):
        state["state"]["counter"][:] = 0, position, 0, 0
        generator.bit_generator.state = state
        if shard is None:
            row[:] = _draw(generator, per_sample, drop)
            continue
        outer, size = _around(shape, len(positions), shard)
        whole = _draw(generator, outer * shard.total * size, drop).reshape(outer, shard.total, size)
        row.reshape(outer, -1, size)[:] = whole[:, shard.first : shard.last]
    return keep.reshape(-1)


def _around(shape: Sequence[int], num_samples: int, shard: Shard) -> tuple[int, int]:
    """Return into how many parts the sharded blocks split a sample before them, and the number of elements of a block.

    Attention heads are dimension 1 of four, or flattened into the rows.
    """
    if shard.is_last_dim:
        return math.prod(shape[:-1]) // num_samples, 1
    outer = shape[0] // num_samples if len(shape) == 4 else 1
    return outer, math.prod(shape) // num_samples // outer // (shard.last - shard.first)


def _generator(key: tuple[int, int]) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=np.array(key, np.uint64)))


def _draw(generator: np.random.Generator, size: int, drop: float) -> np.ndarray:
    """Return the generator's next ``size`` booleans, each False with probability ``drop``.

    An element is dropped where a uniformly distributed number is less than ``drop``. The number's first byte decides in
    255 of 256 cases; the rest is drawn only where this byte equals the first byte of ``drop``.
    """
    first, others = divmod(drop * 256, 1.0)
    drawn = generator.bit_generator.random_raw(-(-size // 8)).view(np.uint8)[:size]
    if first > 255:
        return np.zeros(size, bool)
    keep = drawn > np.uint8(first)
    undecided = np.flatnonzero(drawn == np.uint8(first))
    if len(undecided):
        keep[undecided] = generator.random(len(undecided)) >= others
    return keep


def masked(x: np.ndarray, keep: np.ndarray, scale: float) -> np.ndarray:
    """Return ``x * keep * scale``, in the shape of ``x``; ``keep`` is flat."""
    out = empty(*x.shape)
    x, y = np.ascontiguousarray(x).reshape(-1), out.reshape(-1)

    def block(at: slice) -> None:
        np.multiply(keep[at], np.float32(scale), out=y[at])
        y[at] *= x[at]

    parallel_for_blocks(block, x.size)
    return out


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
