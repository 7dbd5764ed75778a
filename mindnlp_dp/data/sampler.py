"""This module computes the sample indices that each rank reads in an epoch and an update; the loaders call it.

The order of samples is a function of (seed, epoch) alone. It is split into global batches, these into micro-steps, and
a rank takes its slice of every micro-step. So any number of ranks reads the same sequence, and a run can be resumed at
any update with any number of ranks.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Optional

import numpy as np

from mindnlp_dp.runtime.shard_bounds import split_evenly


def epoch_order(num_samples: int, seed: int, epoch: int, shuffle: bool = True) -> np.ndarray:
    """Return the sample order of an epoch, int64 of shape ``(num_samples,)``; shuffled, it changes with every epoch."""
    if not shuffle:
        return np.arange(num_samples)
    return np.random.default_rng([seed, epoch]).permutation(num_samples)


def grouped_by_length(order: np.ndarray, lengths: np.ndarray, batch_size: int) -> np.ndarray:
    """Return ``order`` with samples of similar length next to each other, so that batches hold little padding.

    The order is split into stretches of a quarter of all global batches, at most 50 batches; within each the longest
    samples come first. The longest of all is the first sample, so that a batch too large for the memory fails at once.

    >>> grouped_by_length(np.array([2, 0, 1, 3]), np.array([5, 9, 7, 6]), 2)
    array([1, 0, 2, 3])
    """
    stretch = batch_size * max(1, min(50, len(order) // (4 * batch_size)))
    parts = [order[begin : begin + stretch] for begin in range(0, len(order), stretch)]
    grouped = np.concatenate([part[np.argsort(-lengths[part], kind="stable")] for part in parts])
    longest = int(np.argmax(lengths[grouped]))
    grouped[[0, longest]] = grouped[[longest, 0]]
    return grouped


@dataclass(frozen=True)
class GlobalBatchSampler:
    """Splits every epoch into global batches, and each by rank and micro step, for :class:`~.loader.IndexedLoader`.

    Args:
        num_samples: samples in the data set.
        micro_batch_size: samples of a rank in a micro step; with ``samples_per_update``, their maximum.
        world_size: number of ranks.
        accumulation_steps: micro steps per update; ignored with ``samples_per_update``.
        seed: determines the order of each epoch.
        shuffle: whether each epoch has another order; False keeps that of the data set.
        uneven: what happens to a last global batch that is not full: "keep" splits it as evenly as possible (some ranks
            may get nothing), "drop" leaves it out.
        samples_per_update: the global batch size, with as many micro steps as needed. If the number of ranks does not
            divide it, the ranks' parts differ by at most one sample.
        lengths: one length per sample; batches then hold samples of similar length (:func:`grouped_by_length`).

    Raises:
        ValueError: a size is not positive, ``uneven`` is unknown, the data set is empty, the number of lengths is not
            the number of samples, or ``"drop"`` would leave nothing.
    """

    num_samples: int
    micro_batch_size: int
    world_size: int = 1
    accumulation_steps: int = 1
    seed: int = 0
    shuffle: bool = True
    uneven: str = "keep"
    samples_per_update: Optional[int] = None
    lengths: Optional[np.ndarray] = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("micro_batch_size", "world_size", "accumulation_steps", "samples_per_update"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_samples < 1:
            raise ValueError("the data set is empty")
        if self.lengths is not None and len(self.lengths) != self.num_samples:
            raise ValueError(f"expected a length for each of {self.num_samples} samples, got {len(self.lengths)}")
        if self.uneven not in ("keep", "drop"):
            raise ValueError(f"uneven must be 'keep' or 'drop', got {self.uneven!r}")
        if self.uneven == "drop" and self.num_samples < self.global_batch_size:
            raise ValueError(
                f"{self.num_samples} samples are less than one global batch of {self.global_batch_size}, and a batch "
                "that is not full is dropped, which leaves none: keep it (uneven='keep'; of the Trainer, "
                "dataset_drop_last=False or dataloader_drop_last=False), or use smaller batches"
            )

    @property
    def global_batch_size(self) -> int:
        return self.samples_per_update or self.micro_batch_size * self.accumulation_steps * self.world_size

    @property
    def num_updates(self) -> int:
        """Number of global batches, and so of optimizer steps, in an epoch."""
        full, rest = divmod(self.num_samples, self.global_batch_size)
        return full + (rest > 0 and self.uneven == "keep")

    def place_of(self, samples_read: int) -> tuple[int, int]:
        """Return where an epoch continues after ``samples_read`` samples that were read in other batch sizes.

        Returns:
            The next update, counted so that the epoch ends with update ``num_updates``, and the offset in samples from
            where that update would usually begin.
        """
        full, rest = divmod(max(0, self.num_samples - samples_read), self.global_batch_size)
        update = self.num_updates - full - (rest > 0 and self.uneven == "keep")
        return update, samples_read - update * self.global_batch_size

    def shard_indices(self, rank: int, epoch: int, start: int = 0, offset: int = 0) -> Iterator[list[np.ndarray]]:
        """Yield the indices that ``rank`` reads in ``epoch`` from update ``start`` on: a list of micro-batches each.

        Every rank gets the same number of updates, and the same number of micro-batches in each; those of a short last
        global batch may be smaller than ``micro_batch_size``, or empty. Every update begins ``offset`` samples later
        than usual (:meth:`place_of`).
        """
        for batch in self.global_batches(epoch, start, offset):
            yield [batch[mine] for mine in self.shard_positions(len(batch), rank)]

    def global_batches(self, epoch: int, start: int = 0, offset: int = 0) -> Iterator[np.ndarray]:
        """Yield the sample indices of each global batch of ``epoch``, as :meth:`shard_indices` splits them."""
        order, size = epoch_order(self.num_samples, self.seed, epoch, self.shuffle), self.global_batch_size
        if self.lengths is not None:
            order = grouped_by_length(order, self.lengths, size)
        for first in range(start * size + offset, self.num_updates * size + offset, size):
            yield order[first : first + size]

    def shard_positions(self, num_samples: int, rank: int) -> list[np.ndarray]:
        """Return the positions in a global batch of ``num_samples`` that ``rank`` reads: an array per micro-batch.

        The micro-batches of all ranks in one micro-step are consecutive samples. So what looks at all of these (batch
        normalisation over the ranks, in-batch negatives) sees what one process would in this micro-step.
        """
        most, parts = self.micro_batch_size * self.world_size, []
        for begin in range(0, num_samples, most):
            first, last = split_evenly(min(most, num_samples - begin), self.world_size, rank)
            parts.append(np.arange(begin + first, begin + last))
        return parts


def plan_updates(updates_per_epoch: Optional[int], num_epochs: float, max_steps: int = -1) -> tuple[int, int]:
    """Return how many updates a run makes, and how many epochs it starts; ``max_steps`` overrides ``num_epochs``.

    ``updates_per_epoch`` is None for a stream of unknown length. Raises ValueError for a stream without ``max_steps``,
    and for an epoch without updates.
    """
    if updates_per_epoch == 0:
        raise ValueError(
            "the training data has no full global batch, and a batch that is not full is dropped: keep it, or use "
            "smaller batches"
        )
    if updates_per_epoch is None:
        if max_steps <= 0:
            raise ValueError(f"the training data has no length, so set max_steps, got {max_steps}")
        return max_steps, sys.maxsize
    if max_steps > 0:
        return max_steps, math.ceil(max_steps / updates_per_epoch)
    return math.ceil(num_epochs * updates_per_epoch), math.ceil(num_epochs)


def batch_size_per_rank(global_batch_size: int, world_size: int) -> int:
    """Return each rank's part of a global batch in one micro step; raise ValueError if it does not divide evenly.

    >>> batch_size_per_rank(64, 2)
    32
    """
    below = global_batch_size - global_batch_size % world_size
    if global_batch_size < 1 or below != global_batch_size:
        sizes = " or ".join(str(size) for size in (below + world_size, below) if size > 0)
        raise ValueError(
            f"global_batch_size ({global_batch_size}) must be divisible by the {world_size} ranks; use {sizes}"
        )
    return global_batch_size // world_size


def for_stages(micro_batch_size: int, num_stages: int) -> int:
    """Return the micro-batch size for a pipeline: the smallest that gives at most four micro-batches per stage.

    >>> for_stages(64, 1), for_stages(64, 2), for_stages(6, 2)
    (64, 8, 1)
    """
    most = 1 if num_stages == 1 else 4 * num_stages
    return next(micro_batch_size // n for n in range(most, 0, -1) if micro_batch_size % n == 0)


def accumulation_steps_to_keep(global_batch_size: int, per_micro_step: int) -> int:
    """Return how many micro steps a global batch needs with at most ``per_micro_step`` samples in each, over all ranks.

    >>> accumulation_steps_to_keep(24, 8), accumulation_steps_to_keep(24, 16)
    (3, 2)
    """
    return math.ceil(global_batch_size / per_micro_step)


def largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of ``number`` that is at most ``most``.

    >>> largest_divisor(24, 10), largest_divisor(7, 5)
    (8, 1)
    """
    return next(size for size in range(min(number, most), 0, -1) if number % size == 0)


def check_every_rank_has_a_sample(num_samples: int, world_size: int) -> None:
    """Raise ValueError if there are fewer training samples than ranks: some ranks would never compute anything."""
    if num_samples < world_size:
        raise ValueError(
            f"{num_samples} training samples for {world_size} ranks: every rank needs at least one; "
            f"start at most {num_samples} processes, or use more data"
        )
