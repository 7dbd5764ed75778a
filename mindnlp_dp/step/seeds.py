"""The randomness inside a model, such as dropout: a function of the seed, the rank, the update and the micro step.

What the ranks of a tensor-parallel group compute alike, they draw alike; what is cut among them draws apart
(:func:`draws_apart`), and behind it they draw alike again.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Optional

import numpy as np

# In the place of a micro step: while the batches of an update are read.
READING = 2**32 - 1
# The seed that counts, and how often ranks have drawn apart since it was set.
_current: Optional[int] = None
_num_apart = 0


def step_seed(seed: int, rank: int, step: int, micro_step: int) -> int:
    """The seed of the randomness inside the model (dropout) for one micro step.

    A function of its arguments alone, in ``[0, 2**31)``: a resumed run replays it,
    and ranks, steps and micro steps all differ.
    """
    return _mixed(seed, rank, step, micro_step)


def _mixed(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1)[0] >> 1)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run a block with MindSpore's generators at ``seed``; NumPy's own state is kept around it."""
    global _current, _num_apart
    before = _current, _num_apart
    _current, _num_apart = seed, 0
    _set(seed)
    try:
        yield
    finally:
        _current, _num_apart = before


@contextlib.contextmanager
def draws_apart(rank: int) -> Iterator[None]:
    """Within :func:`seeded`, a block in which each ``rank`` draws other numbers; elsewhere nothing happens.

    All ranks come to the same blocks in the same order. Behind one they begin to draw alike again, with numbers that
    none of them has drawn yet.
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
    # MindNLP 0.5's, which has a generator of its own.
    if (mindtorch := sys.modules.get("mindtorch")) is not None:
        mindtorch.manual_seed(seed)
    np.random.set_state(numpy_state)
