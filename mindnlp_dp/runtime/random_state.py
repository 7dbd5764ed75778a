"""Seeds the randomness inside a model, and of what reads its data, from the run's seed, the rank and the update.

Dropout does not depend on the rank and the micro-step if each sample's position in the global batch is known
(:class:`SampleStreams`). The ranks of a tensor-parallel group draw the same random numbers for replicated tensors, and
different ones for sharded tensors (:func:`rank_local_rng`).
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Optional

import numpy as np

# Take the place of a micro-step in the seeds for what reads the data, and for what a user's code draws between updates.
_READING, _BETWEEN_UPDATES = 2**32 - 1, 2**32 - 2

# The seed in use, and the number of :func:`rank_local_rng` and :func:`replicated_rng` blocks since it was set.
_current: Optional[int] = None

_num_rank_local = 0

# The rank and the shard of the innermost block; None where ranks draw the same numbers.
_part: Optional[tuple[int, SampleShard]] = None

_streams: Optional[SampleStreams] = None


class ShardOf(enum.Enum):
    """The dimension of a sample's elements of which a rank has a part."""

    HEADS = "attention heads"
    WIDTH = "the last dimension"
    TOKENS = "tokens"


@dataclass(frozen=True)
class SampleShard:
    """The part of each sample's elements that a rank has: blocks ``first`` to ``last`` of ``total`` of a dimension."""

    first: int
    last: int
    total: int
    of: ShardOf = ShardOf.HEADS


@dataclass
class MaskRecord:
    """What the dropout masks of a run were drawn for, from update to update.

    Attributes:
        layouts: by the number of the dropout call, the sizes that must not change.
        batches_end_to_end: the numbers of batches that tensors had, one after the other, as chosen and rejected texts.
        doubt: why another number of ranks or micro-steps would draw other masks; empty if none would.
        has_warned: whether the user knows it.
    """

    layouts: dict[int, tuple[Optional[int], ...]] = field(default_factory=dict)
    batches_end_to_end: set[int] = field(default_factory=set)
    doubt: str = ""
    has_warned: bool = False


@dataclass
class SampleStreams:
    """Gives each sample of an update its own stream of random numbers; dropout draws from them.

    All ranks and micro-steps so draw their parts of the mask that one process with the whole batch would draw.

    Attributes:
        key: the key of the update's streams, 64 bits, equal on all ranks.
        positions: the position in the global batch of each of this micro-batch's rows; None if unknown.
        lengths: the lengths of this micro-batch's rows, such as the number of tokens.
        choices: the numbers of texts that a row may have, as in multiple choice.
        starts: by length, the index of the first token of each text, of shape (rows, choices or 1), where texts are
            padded on the left.
        record: what masks were drawn for, in all updates of the run.
        shard: the part of each sample that this rank has; None if it has all.
        is_shared: whether all samples share the tensors that are dropped now.
    """

    key: int
    positions: Optional[np.ndarray]
    lengths: frozenset[int] = frozenset()
    choices: frozenset[int] = frozenset()
    starts: Mapping[int, np.ndarray] = field(default_factory=dict)
    record: MaskRecord = field(default_factory=MaskRecord)
    shard: Optional[SampleShard] = None
    is_shared: bool = False


@contextlib.contextmanager
def shared_by_samples() -> Iterator[None]:
    """Take the tensors that are dropped in this block for tables that all samples share: all ranks drop the same."""
    if _streams is None:
        yield
        return
    _streams.is_shared = True
    try:
        yield
    finally:
        _streams.is_shared = False


def sample_streams() -> Optional[SampleStreams]:
    """Return the streams of the current :func:`seeded` block; None if it has none."""
    return _streams


def step_seed(seed: int, rank: int, step: int, micro_step: int) -> int:
    """Return the seed of the randomness inside the model for one micro-step, in ``[0, 2**31)``.

    It depends on the arguments only, so that a resumed run gets the same seeds. Ranks, steps and micro-steps all get
    different seeds.
    """
    return _mixed(seed, rank, step, micro_step)


def update_key(seed: int, step: int) -> int:
    """Return the key of an update's :class:`SampleStreams`, in ``[0, 2**64)``."""
    return int(np.random.SeedSequence((seed, step)).generate_state(1, np.uint64)[0])


def _mixed(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1)[0] >> 1)


@contextlib.contextmanager
def seeded(seed: int, streams: Optional[SampleStreams] = None, *, num_calls: int = 0) -> Iterator[None]:
    """Set MindSpore's generators to ``seed`` for the block, and those of NumPy and Python, which are restored after it.

    Dropout draws from ``streams``, where given. It numbers its calls from ``num_calls`` on.
    """
    global _current, _num_rank_local, _part, _streams
    before = _current, _num_rank_local, _part, _streams
    _current, _num_rank_local, _part, _streams = seed, 0, None, streams
    _set(seed, num_calls)
    try:
        with restored_generators():
            _seed_generators(seed)
            yield
    finally:
        _current, _num_rank_local, _part, _streams = before


@contextlib.contextmanager
def reading(seed: int, rank: int, epoch: int, number: int) -> Iterator[None]:
    """Seed what a data set and a collator draw while a rank reads update ``number`` of an epoch; restore all after it.

    Ranks draw different numbers, and a resumed run the same ones.
    """
    before = RandomState.current()
    try:
        with seeded(_mixed(seed, rank, epoch, number, _READING)):
            yield
    finally:
        before.restore()


def seed_between_updates(seed: int, rank: int, update: int) -> None:
    """Seed what callbacks and the body of a user's loop draw with NumPy and Python, so that a resumed run draws it."""
    _seed_generators(_mixed(seed, rank, update, _BETWEEN_UPDATES))


@contextlib.contextmanager
def restored_generators() -> Iterator[None]:
    """Restore the generators of NumPy and Python after the block."""
    numpy_state, python_state = np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)


def _seed_generators(seed: int) -> None:
    np.random.seed(seed)
    random.seed(seed)


@contextlib.contextmanager
def rank_local_rng(rank: int, shard: SampleShard) -> Iterator[None]:
    """Let each ``rank`` draw the numbers of its ``shard`` in this block; has no effect outside of :func:`seeded`.

    With :class:`SampleStreams` they are its part of what one process would draw, otherwise they differ by rank. All
    ranks must enter the same blocks in the same order. After the block, ranks draw as before it, from a new seed.
    """
    with _drawing((rank, shard)):
        yield


@contextlib.contextmanager
def replicated_rng() -> Iterator[None]:
    """Let all ranks draw the same numbers in this block within one of :func:`rank_local_rng`."""
    with _drawing(None):
        yield


@contextlib.contextmanager
def _drawing(part: Optional[tuple[int, SampleShard]]) -> Iterator[None]:
    global _num_rank_local
    if _current is None:
        yield
        return
    before = _part
    _num_rank_local += 1
    number = _num_rank_local
    _draw_as(part, number)
    try:
        yield
    finally:
        _draw_as(before, number)


def _draw_as(part: Optional[tuple[int, SampleShard]], number: int) -> None:
    global _part
    assert _current is not None, "called in a seeded block"
    _part = part
    _set(_mixed(_current, number, 0 if part is None else part[0] + 1), num_calls())
    if _streams is not None:
        _streams.shard = None if part is None else part[1]


@dataclass(frozen=True)
class RandomState:
    """The state of all random numbers that a model may draw: MindSpore's, MindNLP's, NumPy's and Python's."""

    drawn_from: tuple[Optional[int], int, Optional[tuple[int, SampleShard]], Optional[SampleStreams]]
    generators: tuple[Any, ...]
    global_seed: Optional[int]
    kernel_seeds: dict[Any, int]
    numpy_state: Any
    python_state: Any

    @classmethod
    def current(cls) -> RandomState:
        """Return a copy of the state now."""
        generators = tuple(generator.get_state() for generator in _generators())
        seeds = _seeds()
        return cls(
            (_current, _num_rank_local, _part, _streams), generators, seeds._GLOBAL_SEED, dict(seeds._KERNEL_SEED),
            np.random.get_state(), random.getstate(),
        )  # fmt: skip

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Draw the same numbers as after :meth:`current` in this block; afterwards continue as if it had drawn none."""
        before = RandomState.current()
        self.restore()
        try:
            yield
        finally:
            before.restore()

    def restore(self) -> None:
        """Make all generators continue from this state."""
        global _current, _num_rank_local, _part, _streams
        _current, _num_rank_local, _part, _streams = self.drawn_from
        for generator, state in zip(_generators(), self.generators):
            generator.set_state(state)
        seeds = _seeds()
        seeds._GLOBAL_SEED = self.global_seed
        seeds._KERNEL_SEED.clear()
        seeds._KERNEL_SEED.update(self.kernel_seeds)
        np.random.set_state(self.numpy_state)
        random.setstate(self.python_state)


def _generators() -> list[Any]:
    from mindspore.common.generator import default_generator

    mindtorch = sys.modules.get("mindtorch")
    # MindNLP 0.5 (mindtorch) has its own generator.
    return [default_generator] if mindtorch is None else [default_generator, mindtorch.default_generator]


def _seeds() -> Any:
    """Return MindSpore's module with the seed, and by operator the number of the next call, without its generator."""
    return importlib.import_module("mindspore.common.seed")


def num_calls() -> int:
    """Return the number of the next dropout call: how far MindSpore's generator has advanced since it was seeded."""
    return _step(0)


def _set(seed: int, num_calls: int) -> None:
    import mindspore

    # MindSpore seeds those of NumPy and Python, too.
    with restored_generators():
        mindspore.set_seed(seed)
        mindspore.manual_seed(seed)
        # MindNLP 0.5 (mindtorch) has its own generator.
        if (mindtorch := sys.modules.get("mindtorch")) is not None:
            mindtorch.manual_seed(seed)
    if num_calls:
        _step(num_calls)


def _step(by: int) -> int:
    import mindspore
    from mindspore.common.generator import default_generator

    state: Any = default_generator._step(mindspore.Tensor(by, mindspore.int64))
    return int(state[1].asnumpy().flat[0])
