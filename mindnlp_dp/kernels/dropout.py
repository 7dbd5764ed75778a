"""This module draws dropout masks from a key with a counter-based random generator; functions.py calls it.

The generator is Philox (Salmon and others, Parallel Random Numbers: As Easy as 1, 2, 3, 2011). It keeps no state
between calls, so the same key always gives the same mask.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np

from mindnlp_dp.kernels.memory import empty
from mindnlp_dp.kernels.workers import parallel_for_blocks

_MASK = (1 << 64) - 1
_ENTROPY = int.from_bytes(os.urandom(8), "little")


def keep_mask(size: int, drop: float, key: tuple[int, int]) -> np.ndarray:
    """Return ``size`` booleans, each False with probability ``drop``, that depend on ``key`` (2 x 64 bits) only.

    An element is dropped where a uniformly distributed number is less than ``drop``. The number's first byte decides in
    255 of 256 cases; the rest is drawn only where this byte equals the first byte of ``drop``.
    """
    generator = np.random.Philox(key=np.array(key, np.uint64))
    first, others = divmod(drop * 256, 1.0)
    drawn = generator.random_raw(-(-size // 8)).view(np.uint8)[:size]
    if first > 255:
        return np.zeros(size, bool)
    keep = drawn > np.uint8(first)
    undecided = np.flatnonzero(drawn == np.uint8(first))
    keep[undecided] = np.random.Generator(generator).random(len(undecided)) >= others
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

    A training step sets the state from (seed, rank, update, micro-step), and every dropout call advances it, so masks
    depend on these only. ``mindspore.recompute`` restores the state and so gets the same masks. If no seed was ever
    set, masks differ between processes.
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
