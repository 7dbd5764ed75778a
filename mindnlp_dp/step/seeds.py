"""The randomness inside a model, such as dropout: a function of the seed, the rank, the update and the micro step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np


def step_seed(seed: int, rank: int, step: int, micro_step: int) -> int:
    """The seed of the randomness inside the model (dropout) for one micro step.

    A function of its arguments alone, in ``[0, 2**31)``: a resumed run replays it,
    and ranks, steps and micro steps all differ.
    """
    return int(np.random.SeedSequence([seed, rank, step, micro_step]).generate_state(1)[0] >> 1)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run a block with MindSpore's generators at ``seed``; NumPy's own state is kept around it."""
    import mindspore

    numpy_state = np.random.get_state()
    mindspore.set_seed(seed)
    mindspore.manual_seed(seed)
    np.random.set_state(numpy_state)
    yield
