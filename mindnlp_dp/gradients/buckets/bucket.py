"""Where gradients wait for their exchange, and where its result is taken from.

Goes in: weighted gradients, one by one. Comes out: their sums over the ranks. What a bucket's memory is depends on what
moves it: host.py for libraries of host memory, shared.py where the ranks of a host share it, device.py for tensors.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, Optional

import numpy as np

from mindnlp_dp.communication.transports.patience import Patience

from .layout import BucketLayout


class Bucket(abc.ABC):
    """Memory for the gradients of one bucket, from accumulation to the exchanged result.

    ``put`` adds ``weight * gradient`` to a slot, ``start`` scales what was put and
    begins the sum over the ranks, ``wait`` ends it, ``get`` returns a slot of the
    result, in memory of its own, ``release`` says that this rank has got what it wanted, and
    ``clear`` makes the bucket empty again. A slot into which nothing was put counts as zeros.
    ``keep`` remembers what was put so far, and ``restore`` goes back to it, be the sum made or not.

    Attributes:
        scatter: whether a rank's own slice of the sum is all that it will look at; set before the exchange begins.
        on_sum: called whenever this rank's slice of a sum has come to where :meth:`sums` says, on the thread that
            exchanges; the slice is in the cache then.
        is_asynchronous: whether ``start`` returns while the exchange is under way. If not, buckets are best
            exchanged one after the other, each while it is in the cache; or on a thread, which gives ``start`` its
            patience, so that waiting leaves the core to the thread that computes.
    """

    scatter = False
    on_sum: Optional[Callable[[], None]] = None
    is_asynchronous = False

    def __init__(self, layout: BucketLayout) -> None:
        self.layout = layout
        self._slots = {slot.index: slot for slot in layout.slots}

    @abc.abstractmethod
    def put(self, index: int, gradient: Any, weight: float) -> None: ...

    @abc.abstractmethod
    def keep(self) -> None: ...

    @abc.abstractmethod
    def restore(self) -> None: ...

    @abc.abstractmethod
    def start(self, scale: Any, patience: Optional[Patience] = None) -> None: ...

    @abc.abstractmethod
    def wait(self) -> None: ...

    @abc.abstractmethod
    def get(self, index: int) -> Any: ...

    @abc.abstractmethod
    def sums(self) -> list[tuple[int, np.ndarray]]:
        """Where results are in host memory, once they have come to :meth:`land`: offsets in the bucket, and arrays.

        It is the same place for as long as the bucket is there.
        """

    def land(self) -> None:  # noqa: B027
        """Behind ``wait``: bring the result to where :meth:`sums` says, if it is not there."""

    def keep_slice(self) -> None:
        """Behind ``wait``: keep this rank's slice of the result as a tensor."""
        raise NotImplementedError("gradients of a device stay there, and no others")

    def _has_sum(self) -> None:
        if self.on_sum is not None:
            self.on_sum()

    @abc.abstractmethod
    def release(self) -> None: ...

    @abc.abstractmethod
    def clear(self) -> None: ...
