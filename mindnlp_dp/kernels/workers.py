"""One call, cut in parts among the cores of this rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Optional

import numpy as np

# Elements of a block: five arrays of its size fit into the second-level cache of most cores; with smaller ones, calls
# cost more than what they do.
BLOCK = 1 << 15
# Elements that are worth a second core.
SMALLEST_PART = 1 << 17

_pool: Optional[ThreadPoolExecutor] = None
_num_cores = 1


def use_cores(num_cores: int) -> None:
    """Share work among ``num_cores`` threads, the calling one among them; they start when they are first needed."""
    global _pool, _num_cores
    _num_cores = num_cores
    if _pool is not None:
        _pool.shutdown()
    _pool = ThreadPoolExecutor(num_cores - 1, "mindnlp_dp-kernels") if num_cores > 1 else None


def _alone_after_fork() -> None:
    """A process that was forked, such as a reader of data, has none of its parent's threads."""
    global _pool, _num_cores
    _pool, _num_cores = None, 1


os.register_at_fork(after_in_child=_alone_after_fork)


def in_parts(part: Callable[[int, int], None], size: int, granularity: int, smallest: int) -> None:
    """Call ``part(first, last)`` for ranges that make up ``range(size)``, as many as there are cores.

    Parts begin at multiples of ``granularity``; what is left over goes to the last. None is smaller than
    ``granularity`` or ``smallest``, unless ``size`` is.
    """
    smallest = max(granularity, smallest)
    num_parts = min(_num_cores, size // smallest)
    if _pool is None or num_parts < 2:
        _quietly(part, 0, size)
        return
    begins = [size * number // num_parts // granularity * granularity for number in range(num_parts)]
    ends = [*begins[1:], size]
    others: list[Future[None]] = []
    mine = [(begins[0], ends[0])]
    for first, last in zip(begins[1:], ends[1:]):
        try:
            others.append(_pool.submit(_quietly, part, first, last))
        except RuntimeError:
            # A process that is about to end starts no more threads.
            mine.append((first, last))
    try:
        for first, last in mine:
            _quietly(part, first, last)
    finally:
        # Whatever happens, nobody writes into these arrays any more afterwards.
        wait(others)
    for other in others:
        other.result()


def in_blocks(block: Callable[[slice], object], rows: int, columns: int = 1) -> None:
    """Call ``block(at)`` for slices that make up ``range(rows)``, each of as many rows as fit into a core's cache.

    The cores share them; they are the same however many cores there are.
    """
    size = rows_of_a_block(columns)

    def part(first: int, last: int) -> None:
        for begin in range(first, last, size):
            block(slice(begin, min(begin + size, last)))

    in_parts(part, rows, size, SMALLEST_PART // max(1, columns) + 1)


def rows_of_a_block(columns: int) -> int:
    return max(1, BLOCK // max(1, columns))


def _quietly(part: Callable[[int, int], None], first: int, last: int) -> None:
    # What a thread is told of NumPy's warnings holds for that thread alone. A model that overflows is told by its loss.
    with np.errstate(all="ignore"):
        part(first, last)
