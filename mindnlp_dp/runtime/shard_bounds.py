"""This module splits a length evenly: rows over ranks, arrays into slices, dimensions into shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional


def split_evenly(num_items: int, num_parts: int, part: int) -> tuple[int, int]:
    """Return the bounds ``(start, stop)`` of one of ``num_parts`` consecutive parts; the first ones may be larger by 1.

    >>> [split_evenly(5, 3, part) for part in range(3)]
    [(0, 2), (2, 4), (4, 5)]
    """
    small, extra = divmod(num_items, num_parts)
    start = part * small + min(part, extra)
    return start, start + small + (part < extra)


def shard_bounds(size: int, num_shards: int, multiple: int = 1) -> list[int]:
    """Return the bounds of ``num_shards`` shards of ``size`` elements, whose lengths differ by at most ``multiple``.

    Shards begin at multiples of ``multiple``; only the last one ends anywhere.

    >>> shard_bounds(10, 4), shard_bounds(200, 3, 64)
    ([0, 2, 5, 7, 10], [0, 64, 128, 200])
    """
    return [*(size * index // num_shards // multiple * multiple for index in range(num_shards)), size]


def stage_bounds(num_layers: int, num_stages: int, layers_per_stage: Optional[Sequence[int]] = None) -> list[int]:
    """Return the bounds of the layers of each pipeline stage, split evenly or as ``layers_per_stage`` says.

    Raises ValueError if ``layers_per_stage`` does not fit.

    >>> stage_bounds(5, 2), stage_bounds(5, 2, [1, 4])
    ([0, 2, 5], [0, 1, 5])
    """
    if layers_per_stage is None:
        return shard_bounds(num_layers, num_stages)
    if len(layers_per_stage) != num_stages or sum(layers_per_stage) != num_layers or min(layers_per_stage) < 1:
        raise ValueError(
            f"{list(layers_per_stage)} does not split {num_layers} layers over pp={num_stages} stages, each "
            "with at least one"
        )
    return [sum(layers_per_stage[:stage]) for stage in range(num_stages + 1)]
