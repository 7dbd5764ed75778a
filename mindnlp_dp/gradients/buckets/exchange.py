"""The exchange of buckets behind a backward pass, each as what moves it wants it."""

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
    """Sum the buckets over the ranks, and ``take`` each one's result; called by every rank, with the same buckets.

    Asynchronous ones are begun all together. Without a ``scale`` they are under way or exchanged already. ``timed`` is
    told their names and when they began.
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
