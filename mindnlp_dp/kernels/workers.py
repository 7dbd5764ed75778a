"""This module splits one kernel call into parts that run on the cores of this rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Optional

import numpy as np

# Elements of a block: five arrays of this size fit into the L2 cache of most cores; with smaller blocks the overhead of
# the calls dominates.
BLOCK = 1 << 15
# The smallest number of elements that is worth a second core.
SMALLEST_PART = 1 << 17

_pool: Optional[ThreadPoolExecutor] = None
_num_cores = 1


def use_cores(num_cores: int) -> None:
    """Distribute work over ``num_cores`` threads, including the calling one; the others start at first use."""
    global _pool, _num_cores
    _num_cores = num_cores
    if _pool is not None:
        _pool.shutdown()
    _pool = ThreadPoolExecutor(num_cores - 1, "mindnlp_dp-kernels") if num_cores > 1 else None


def _alone_after_fork() -> None:
    """Switch to one thread: a forked process, such as a data loader worker, has none of its parent's threads."""
    global _pool, _num_cores
    _pool, _num_cores = None, 1


os.register_at_fork(after_in_child=_alone_after_fork)


def parallel_for(part: Callable[[int, int], None], size: int, granularity: int, smallest: int) -> None:
    """Call ``part(first, last)`` for consecutive ranges that cover ``range(size)``, at most one for each core.

    Parts begin at multiples of ``granularity``, and the last part takes the remainder. No part is smaller than
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
            # The pool accepts no work while the interpreter shuts down.
            mine.append((first, last))
    try:
        for first, last in mine:
            _quietly(part, first, last)
    finally:
        # No thread may write into the arrays after this call, even if it raises.
        wait(others)
    for other in others:
        other.result()


def parallel_for_blocks(block: Callable[[slice], object], rows: int, columns: int = 1) -> None:
    """Call ``block(at)`` for slices that cover ``range(rows)``, each of as many rows as fit into a core's cache.

    The slices are distributed over the cores and do not depend on their number.
    """
    size = rows_of_a_block(columns)

    def part(first: int, last: int) -> None:
        for begin in range(first, last, size):
            block(slice(begin, min(begin + size, last)))

    parallel_for(part, rows, size, SMALLEST_PART // max(1, columns) + 1)


def rows_of_a_block(columns: int) -> int:
    """Return how many rows of this length one block of :func:`parallel_for_blocks` has."""
    return max(1, BLOCK // max(1, columns))


def _quietly(part: Callable[[int, int], None], first: int, last: int) -> None:
    # NumPy's error state is local to a thread. The loss reports an overflow; warnings are not needed.
    with np.errstate(all="ignore"):
        part(first, last)
