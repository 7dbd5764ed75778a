"""This module computes micro-batch sizes and gradient accumulation steps for a global batch; the loaders call it."""

from __future__ import annotations

import math


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
            f"start at most {num_samples} processes, or bring more data"
        )
