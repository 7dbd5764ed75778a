"""The exchange of gradients: from every rank's own to the same weighted mean on all.

Goes in: each rank's gradients, with the weight of the samples behind them. Comes
out: ``sum_r(weight_r * gradient_r) / sum_r(weight_r)``, the gradient of the whole
global batch, on every rank. One window may take several micro steps::

    for inputs in window:
        sync.accumulate(gradients_of(inputs), weight=len(inputs))    # no communication
    gradients = sync.reduce()                                        # all ranks, once

A rank that had no samples reduces zeros. A parameter that no rank used in the
window comes out as None, as it would in one process. Frozen parameters are not
the synchroniser's business: pass those that train.
"""

from __future__ import annotations

import abc
import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Optional

import numpy as np

from .backends.base import HALF_TYPES, Bucket, dtype_name
from .bucket import pack_buckets
from .process_group import ProcessGroup, get_process_group
from .replicas import check_same_structure

DEFAULT_BUCKET_CAP_MB = 4.0


class _Synchronizer(abc.ABC):
    """A window of weighted gradients; subclasses say how they are stored and summed over the ranks.

    Attributes:
        total_weight: of the last window that was reduced, over all ranks.
        num_skipped: micro steps of that window that some rank left out with :meth:`skip`.
        seconds: time spent in :meth:`reduce` so far, the wait for slower ranks included.
        num_bytes: bytes of gradients handed to the exchange so far, on this rank.
    """

    def __init__(self, parameters: Iterable[Any], group: Optional[ProcessGroup] = None) -> None:
        self.group = group or get_process_group()
        named = [p if isinstance(p, tuple) else (str(i), p) for i, p in enumerate(parameters)]
        check_same_structure(named, self.group)
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.total_weight = 0.0
        self.num_skipped = 0
        self.seconds = 0.0
        self.num_bytes = 0
        self._weight = 0.0
        self._skipped = 0
        self._exchange_is_off = False
        self._used = np.zeros(len(named), np.float32)

    def __call__(self, gradients: Sequence[Optional[Any]], weight: float = 1.0) -> list[Optional[Any]]:
        """Accumulate one micro step and reduce: the whole window at once.

        Within :meth:`no_sync` nothing is exchanged, and the gradients come back as they are.
        """
        self.accumulate(gradients, weight)
        return list(gradients) if self._exchange_is_off else self.reduce()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, calls only accumulate, as with DistributedDataParallel's; the next call outside reduces them all.

        An exception within it drops what this rank has accumulated, so that no half window is ever exchanged.
        """
        before, self._exchange_is_off = self._exchange_is_off, True
        try:
            yield
        except BaseException:
            self._begin_window()
            raise
        finally:
            self._exchange_is_off = before

    def _begin_window(self) -> None:
        self._weight, self._skipped = 0.0, 0
        self._used[:] = 0
        self._clear()

    def accumulate(self, gradients: Sequence[Optional[Any]], weight: float = 1.0) -> None:
        """Add ``weight * gradient`` for every parameter, in the order of ``parameters``; None adds nothing.

        Raises:
            ValueError: the number of gradients or a shape is wrong, or the weight is negative or not finite.
        """
        if len(gradients) != len(self.parameters):
            raise ValueError(
                f"expected {len(self.parameters)} gradients, one a parameter, got {len(gradients)} "
                f"(rank {self.group.rank})"
            )
        if not 0 <= weight < float("inf"):
            raise ValueError(f"a weight must be finite and not negative, got {weight} on rank {self.group.rank}")
        self._weight += weight
        for index, gradient in enumerate(gradients):
            # A weight of zero adds nothing, not even zero times NaN.
            if gradient is None or weight == 0:
                continue
            expected = tuple(self.parameters[index].shape)
            if tuple(gradient.shape) != expected:
                raise ValueError(
                    f"the gradient of {self.names[index]!r} has shape {tuple(gradient.shape)}, expected {expected} "
                    f"(rank {self.group.rank})"
                )
            self._used[index] = 1
            self._put(index, gradient, weight)

    def skip(self) -> None:
        """Leave a micro step out, such as one whose loss is no number; all ranks learn how many there were."""
        self._skipped += 1

    def reduce(self) -> list[Optional[Any]]:
        """Exchange the window and begin a new one; a collective, called by every rank.

        Returns the weighted mean for every parameter, in memory of this rank's own; nothing but None
        when every micro step that any rank had was skipped.

        Raises:
            ValueError: on every rank, when the window weighs nothing on any of them.
        """
        began = time.perf_counter()
        mine = np.array([self._weight, self._skipped], np.float32)
        header = self.group.all_reduce(np.concatenate([mine, self._used]))
        self.total_weight, self.num_skipped = float(header[0]), int(header[1])
        used = header[2:] > 0
        try:
            if self.total_weight <= 0:
                if self.num_skipped:
                    return [None] * len(self.parameters)
                raise ValueError("no rank had a sample in this window: there is no gradient to average")
            gradients = self._exchange(used, 1.0 / self.total_weight)
        finally:
            self._begin_window()
            self.seconds += time.perf_counter() - began
        return gradients

    @abc.abstractmethod
    def _put(self, index: int, gradient: Any, weight: float) -> None: ...

    @abc.abstractmethod
    def _exchange(self, used: np.ndarray, scale: float) -> list[Optional[Any]]: ...

    @abc.abstractmethod
    def _clear(self) -> None: ...


class NaiveGradientSynchronizer(_Synchronizer):
    """One all-reduce a parameter: slow, and plainly right. The reference for the bucketed one."""

    def __init__(self, parameters: Iterable[Any], group: Optional[ProcessGroup] = None) -> None:
        super().__init__(parameters, group)
        self._sums: dict[int, Any] = {}

    def _put(self, index: int, gradient: Any, weight: float) -> None:
        if dtype_name(gradient) in HALF_TYPES:
            import mindspore

            gradient = gradient.astype(mindspore.float32)
        self._sums[index] = self._sums[index] + gradient * weight if index in self._sums else gradient * weight

    def _exchange(self, used: np.ndarray, scale: float) -> list[Optional[Any]]:
        import mindspore

        gradients: list[Optional[Any]] = [None] * len(self.parameters)
        for index in np.flatnonzero(used):
            dtype = self.parameters[index].dtype
            mine = self._sums.get(index)
            if mine is None:
                wide = mindspore.float32 if dtype_name(self.parameters[index]) in HALF_TYPES else dtype
                mine = mindspore.ops.zeros(tuple(self.parameters[index].shape), wide)
            self.num_bytes += mine.nbytes
            gradients[index] = self.group.all_reduce(mine * scale).astype(dtype)
        return gradients

    def _clear(self) -> None:
        self._sums.clear()


class GradientSynchronizer(_Synchronizer):
    """Gradients packed into buckets of ``bucket_cap_mb`` MiB, one all-reduce a bucket.

    Few large messages instead of many small ones; a bucket that no rank used is not sent.
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        group: Optional[ProcessGroup] = None,
        *,
        bucket_cap_mb: float = DEFAULT_BUCKET_CAP_MB,
    ) -> None:
        super().__init__(parameters, group)
        shapes = [tuple(p.shape) for p in self.parameters]
        layouts = pack_buckets(shapes, [dtype_name(p) for p in self.parameters], bucket_cap_mb)
        self.buckets = self.group.make_buckets(layouts)
        self._bucket_of = {slot.index: bucket for bucket in self.buckets for slot in bucket.layout.slots}

    def _put(self, index: int, gradient: Any, weight: float) -> None:
        self._bucket_of[index].put(index, gradient, weight)

    def _exchange(self, used: np.ndarray, scale: float) -> list[Optional[Any]]:
        sent = [bucket for bucket in self.buckets if any(used[slot.index] for slot in bucket.layout.slots)]
        gradients: list[Optional[Any]] = [None] * len(self.parameters)

        def finish(bucket: Bucket) -> None:
            bucket.wait()
            for slot in bucket.layout.slots:
                if used[slot.index]:
                    gradients[slot.index] = bucket.get(slot.index)
            bucket.release()

        for bucket in sent:
            self.num_bytes += bucket.layout.num_bytes
            bucket.start(scale)
            if not bucket.is_asynchronous:
                finish(bucket)
        for bucket in sent:
            if bucket.is_asynchronous:
                finish(bucket)
        return gradients

    def _clear(self) -> None:
        for bucket in self.buckets:
            bucket.clear()
