"""Which elements dropout drops: a function of a key, by a counter-based generator.

The generator is Philox (Salmon and others, Parallel Random Numbers: As Easy as 1, 2, 3, 2011): nothing of it is kept
from one call to the next, so that whoever has the key has the mask.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np

from .memory import empty
from .workers import in_blocks

_MASK = (1 << 64) - 1
_ENTROPY = int.from_bytes(os.urandom(8), "little")


def keep_mask(size: int, drop: float, key: tuple[int, int]) -> np.ndarray:
    """Truths, ``size`` of them, each false with probability ``drop``: the same for the same ``key``, twice 64 bits.

    An element is dropped where a uniformly distributed number is less than ``drop``. One byte of that number decides
    in 255 of 256 cases; only where it equals the first byte of ``drop`` the others are drawn.
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
    """``x * keep * scale``, of ``x``'s shape; ``keep`` is flat."""
    out = empty(*x.shape)
    x, y = np.ascontiguousarray(x).reshape(-1), out.reshape(-1)

    def block(at: slice) -> None:
        np.multiply(keep[at], np.float32(scale), out=y[at])
        y[at] *= x[at]

    in_blocks(block, x.size)
    return out


def next_key() -> tuple[int, int]:
    """The state of MindSpore's default generator, which then moves on.

    A training step sets it from (seed, rank, update, micro step), and every call of dropout moves it by one: these are
    what a mask is a function of. ``mindspore.recompute`` sets it back, and gets the same masks again. Where nobody set
    a seed at all, masks differ from process to process.
    """
    import mindspore
    from mindspore.common.generator import default_generator

    seed, offset = (int(state.asnumpy().flat[0]) for state in default_generator._step(_one_call()))
    if not seed and not default_generator._generator.attrs.get("manual_seed"):
        # Nobody seeded MindSpore's generator, which begins with zero.
        own = mindspore.get_seed()
        seed = _ENTROPY if own is None else own
    return seed & _MASK, offset & _MASK


@functools.cache
def _one_call() -> Any:
    import mindspore

    return mindspore.Tensor(1, mindspore.int64)
