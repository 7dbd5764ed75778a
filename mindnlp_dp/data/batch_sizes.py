"""Global batches, micro batches and accumulation steps: which sizes fit, and what to use where they do not."""

from __future__ import annotations

import math


def accumulation_steps_for(global_batch_size: int, micro_batch_size: int, world_size: int) -> int:
    """How many micro steps make up a global batch.

    Raises:
        ValueError: it does not divide; the message names sizes that do.
    """
    together = micro_batch_size * world_size
    if global_batch_size < 1 or global_batch_size % together:
        above = together * math.ceil(max(global_batch_size, 1) / together)
        below = above - together
        raise ValueError(
            f"global_batch_size ({global_batch_size}) must be divisible by micro_batch_size ({micro_batch_size}) "
            f"* world_size ({world_size}) = {together}; use {above}" + (f" or {below}" if below else "")
        )
    return global_batch_size // together


def batch_size_per_rank(global_batch_size: int, world_size: int) -> int:
    """A rank's part of a global batch in one micro step; ValueError when it does not divide.

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
    """A micro batch for a pipeline: the fewest samples that make at most four micro batches a stage.

    >>> for_stages(64, 1), for_stages(64, 2), for_stages(6, 2)
    (64, 8, 1)
    """
    most = 1 if num_stages == 1 else 4 * num_stages
    return next(micro_batch_size // n for n in range(most, 0, -1) if micro_batch_size % n == 0)


def accumulation_steps_to_keep(
    global_batch_size: int, per_micro_step: int, world_size: int, setting: str = "micro_batch_size"
) -> int:
    """How many micro steps keep a given global batch, when all ranks together take ``per_micro_step`` samples in one.

    ``setting`` is what a user calls a rank's micro batch.

    Raises:
        ValueError: they do not divide it; the message says what does.
    """
    if global_batch_size % per_micro_step == 0:
        return global_batch_size // per_micro_step
    share, rest = divmod(global_batch_size, world_size)
    if rest:
        fewer = next(n for n in range(world_size, 0, -1) if global_batch_size % n == 0)
        more = next((n for n in range(world_size, global_batch_size + 1) if global_batch_size % n == 0), fewer)
        way_out = f"start {' or '.join(map(str, sorted({fewer, more})))} processes"
    else:
        sizes = [size for size in range(share, 0, -1) if share % size == 0]
        way_out = f"use {setting} {' or '.join(map(str, sizes[:3]))}"
    raise ValueError(
        f"the global batch of {global_batch_size} samples cannot be kept by {world_size} ranks whose micro batches "
        f"hold {per_micro_step} samples together; {way_out}"
    )


def check_every_rank_has_a_sample(num_samples: int, world_size: int) -> None:
    """Raise ValueError when there are more ranks than training samples: some would never compute anything."""
    if num_samples < world_size:
        raise ValueError(
            f"{num_samples} training samples for {world_size} ranks: every rank needs at least one; "
            f"start at most {num_samples} processes, or bring more data"
        )
