"""This module splits a length evenly: rows over ranks, arrays into slices, dimensions into shards."""

from __future__ import annotations


def even_edges(numel: int, num_pieces: int, multiple: int = 1) -> list[int]:
    """Return where pieces of about the same length begin, at multiples of ``multiple``, and where the last one ends.

    >>> even_edges(10, 3), even_edges(200, 3, 64)
    ([0, 3, 6, 10], [0, 64, 128, 200])
    """
    return [*(numel * piece // num_pieces // multiple * multiple for piece in range(num_pieces)), numel]


def split_evenly(num_items: int, num_parts: int, part: int) -> tuple[int, int]:
    """Return the bounds ``(start, stop)`` of one of ``num_parts`` consecutive parts; the first ones may be larger by 1.

    >>> [split_evenly(5, 3, part) for part in range(3)]
    [(0, 2), (2, 4), (4, 5)]
    """
    small, extra = divmod(num_items, num_parts)
    start = part * small + min(part, extra)
    return start, start + small + (part < extra)


def shard_bounds(size: int, num_shards: int) -> list[int]:
    """Return the bounds of ``num_shards`` shards of ``size`` elements, whose lengths differ by at most one.

    >>> shard_bounds(10, 4)
    [0, 2, 5, 7, 10]
    """
    return [size * index // num_shards for index in range(num_shards + 1)]
