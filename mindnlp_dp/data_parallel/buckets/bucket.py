"""This module defines the interface of a bucket, in which gradients are accumulated and summed, and exchanges buckets.

The memory of a bucket depends on the library that transports it: host_bucket.py is for libraries of host memory,
shared_memory_bucket.py for memory that the ranks of a host share, device_bucket.py for tensors on a device.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Sequence
from typing import Any, Optional

import numpy as np

from mindnlp_dp.communication.transports.polling_wait import PollingWait
from mindnlp_dp.data_parallel.buckets.bucket_layout import BucketLayout


class Bucket(abc.ABC):
    """Holds the gradients of one bucket, from accumulation to the exchanged result.

    ``put`` adds ``loss_weight * gradient`` to a slot, ``start`` scales the accumulated values and begins the sum over
    the ranks, ``wait`` waits for the sum, ``get`` returns a copy of one slot of the result, ``release`` says that this
    rank does not need the result any more, and ``clear`` empties the bucket. An empty slot counts as zeros.
    ``snapshot`` saves the accumulated values, and ``rollback`` returns to them, before or after the exchange.

    Attributes:
        scatter: Whether this rank reads only its own slice of the sum; set before the exchange begins.
        on_sum: A callback for the exchanging thread, called when this rank's slice of a sum is in the memory that
            :meth:`sums` returns; the slice is in the processor's cache at that time.
        is_asynchronous: Whether ``start`` returns before the exchange has ended. If not, it is best to exchange
            buckets one after another, while each is in the cache, or on a separate thread. That thread passes its
            ``waiter`` to ``start``, so that its waits leave the core to the computing thread.
    """

    scatter = False
    on_sum: Optional[Callable[[], None]] = None
    is_asynchronous = False

    def __init__(self, layout: BucketLayout) -> None:
        self.layout = layout
        self._slots = {slot.index: slot for slot in layout.slots}

    @abc.abstractmethod
    def put(self, index: int, gradient: Any, loss_weight: float) -> None: ...

    @abc.abstractmethod
    def snapshot(self) -> None: ...

    @abc.abstractmethod
    def rollback(self) -> None: ...

    @abc.abstractmethod
    def start(self, scale: Any, waiter: Optional[PollingWait] = None) -> None: ...

    @abc.abstractmethod
    def wait(self) -> None: ...

    @abc.abstractmethod
    def get(self, index: int) -> Any: ...

    @abc.abstractmethod
    def sums(self) -> list[tuple[int, np.ndarray]]:
        """Return host memory for the result, which :meth:`copy_to_host` fills: pairs of an offset and an array.

        The arrays are the same for the lifetime of the bucket.
        """

    def copy_to_host(self) -> None:  # noqa: B027
        """Copy the result to the memory of :meth:`sums` if it is not there; called after ``wait``."""

    def keep_shard(self) -> None:
        """Keep this rank's slice of the result as a tensor; called after ``wait``."""
        raise NotImplementedError("gradients of a device stay there, and no others")

    def _has_sum(self) -> None:
        if self.on_sum is not None:
            self.on_sum()

    @abc.abstractmethod
    def release(self) -> None: ...

    @abc.abstractmethod
    def clear(self) -> None: ...


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
