"""Seeds the randomness inside a model, such as dropout, from the run's seed, the rank, the update and the micro-step.

The ranks of a tensor-parallel group draw the same random numbers for replicated tensors, and different ones for sharded
tensors (:func:`rank_local_rng`). Afterwards they draw the same numbers again.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Optional

import numpy as np

# The micro-step number for the seed that is set while the batches of an update are read.
READING = 2**32 - 1

# The seed in use, and the number of :func:`rank_local_rng` blocks since it was set.
_current: Optional[int] = None

_num_apart = 0


def step_seed(seed: int, rank: int, step: int, micro_step: int) -> int:
    """Return the seed of the randomness inside the model (dropout) for one micro-step, in ``[0, 2**31)``.

    It depends on the arguments only, so that a resumed run gets the same seeds. Ranks, steps and micro-steps all get
    different seeds.
    """
    return _mixed(seed, rank, step, micro_step)


def _mixed(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1)[0] >> 1)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Set MindSpore's generators to ``seed`` for the block, without changing NumPy's random state."""
    global _current, _num_apart
    before = _current, _num_apart
    _current, _num_apart = seed, 0
    _set(seed)
    try:
        yield
    finally:
        _current, _num_apart = before


@contextlib.contextmanager
def rank_local_rng(rank: int) -> Iterator[None]:
    """Let each ``rank`` draw different random numbers in this block; has no effect outside of :func:`seeded`.

    All ranks must enter the same blocks in the same order. After the block all ranks draw the same numbers again, from
    a new seed.
    """
    global _num_apart
    if _current is None:
        yield
        return
    _num_apart += 1
    number = _num_apart
    _set(_mixed(_current, number, rank + 1))
    yield
    _set(_mixed(_current, number, 0))


def _set(seed: int) -> None:
    import mindspore

    numpy_state = np.random.get_state()
    mindspore.set_seed(seed)
    mindspore.manual_seed(seed)
    # MindNLP 0.5 (mindtorch) has its own generator.
    if (mindtorch := sys.modules.get("mindtorch")) is not None:
        mindtorch.manual_seed(seed)
    np.random.set_state(numpy_state)
