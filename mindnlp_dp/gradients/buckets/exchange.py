"""This module exchanges the buckets of a window after the backward pass, for the gradient synchroniser."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Optional

from .bucket import Bucket


def exchange_buckets(
    buckets: Sequence[tuple[str, Bucket]],
    scale: Optional[float],
    take: Callable[[Bucket], None],
    timed: Callable[[str, float], None],
) -> None:
    """Sum the buckets over the ranks, and ``take`` each result; called by every rank with the same named buckets.

    Asynchronous buckets are all started before the first wait. If ``scale`` is None, the exchange has been started or
    finished already. ``timed`` is called with the name and the start time of each bucket that is started here.
    """
    begun: dict[str, float] = {}

    def finish(name: str, bucket: Bucket) -> None:
        bucket.wait()
        if name in begun:
            timed(name, begun[name])
        take(bucket)

    for name, bucket in buckets:
        if scale is not None:
            begun[name] = time.perf_counter()
            bucket.start(scale)
            if not bucket.is_asynchronous:
                finish(name, bucket)
    for name, bucket in buckets:
        if bucket.is_asynchronous or scale is None:
            finish(name, bucket)
