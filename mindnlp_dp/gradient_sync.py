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

The last micro step may say so beforehand, and what its backward pass has finished is exchanged
while it goes on (:mod:`mindnlp_dp.overlap`), with the same result::

    with sync.backward(weight=len(inputs)):
        gradients = gradients_of(inputs)
    sync.accumulate(gradients, weight=len(inputs))
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Optional, Union

import numpy as np

from .backends.base import HALF_TYPES, Bucket, dtype_name
from .bucket import pack_buckets
from .gradient_window import GradientWindow
from .overlap import Overlap
from .process_group import ProcessGroup

DEFAULT_BUCKET_CAP_MB = 4.0
COMPRESSIONS = (None, "fp16", "bf16")


class NaiveGradientSynchronizer(GradientWindow):
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


class GradientSynchronizer(GradientWindow):
    """Gradients packed into buckets of ``bucket_cap_mb`` MiB, one all-reduce a bucket.

    Few large messages instead of many small ones; a bucket that no rank used is not sent.

    Args:
        overlap: whether buckets are exchanged during the backward pass: always, never, or "auto", when a short trial
            in the first windows says that it pays. The result is the same.
        compression: "fp16" or "bf16" halves what goes over a wire, and rounds it; None does not.

    Attributes:
        overlap: its ``state`` says what became of it.
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        group: Optional[ProcessGroup] = None,
        *,
        bucket_cap_mb: float = DEFAULT_BUCKET_CAP_MB,
        overlap: Union[bool, str] = "auto",
        compression: Optional[str] = None,
    ) -> None:
        super().__init__(parameters, group)
        if overlap not in (True, False, "auto"):
            raise ValueError(f'overlap must be True, False or "auto", got {overlap!r}')
        if compression not in COMPRESSIONS:
            raise ValueError(f"compression must be one of {', '.join(map(repr, COMPRESSIONS))}, got {compression!r}")
        self.bucket_cap_mb = bucket_cap_mb
        self.compression = compression
        self._make_buckets()
        self.overlap = Overlap(self.parameters, overlap, self.group._backend)
        reason = self.group._backend.cannot_overlap if overlap else "not asked for"
        if reason or not self.parameters:
            self.overlap.turn_off(reason or "there are no parameters")
        self._is_exchanged = False
        # What was accumulated since the buckets remember; whether a backward pass was sent and not accumulated.
        self._late: list[tuple[Sequence[Optional[Any]], float]] = []
        self._sent_weight: Optional[float] = None
        self._has_compared = False

    def _make_buckets(self, order: Optional[Sequence[int]] = None) -> None:
        shapes = [tuple(p.shape) for p in self.parameters]
        layouts = pack_buckets(shapes, [dtype_name(p) for p in self.parameters], self.bucket_cap_mb, order)
        # The old ones' memory goes before the new ones take theirs.
        self.buckets: list[Bucket] = []
        self._bucket_of: dict[int, Bucket] = {}
        self.buckets = self.group.make_buckets(layouts, self.compression)
        self._bucket_of = {slot.index: bucket for bucket in self.buckets for slot in bucket.layout.slots}

    # A window.

    @contextlib.contextmanager
    def backward(self, weight: float) -> Iterator[None]:
        """Around the last forward and backward pass of a window, whose gradients :meth:`accumulate` then gets.

        ``weight`` is what they will weigh. Where exchange overlaps, it begins within.

        An exception within it leaves no thread and no half window; when some of the window was under way to the other
        ranks, they wait for the rest of it in vain, and this process cannot exchange gradients any more.
        """
        if self._exchange_is_off:
            yield
            return
        self._check_not_abandoned()
        if self._is_open:
            self.overlap.problem = "two backward passes of a window were called its last"
        else:
            self.overlap.begin(self.buckets, weight, self._weight)
            self._sent_weight = weight if self._is_open else None
        try:
            yield
        except BaseException as error:
            if self._is_open:
                self.group._backend.abandoned = f"{type(error).__name__}: {error}"
            self._begin_window()
            raise
        finally:
            self.overlap.end_backward()

    @property
    def _is_open(self) -> bool:
        """Whether this window is under way to the other ranks."""
        return self.overlap.is_open

    def _check_not_abandoned(self) -> None:
        abandoned = self.group._backend.abandoned
        if abandoned:
            raise RuntimeError(
                f"rank {self.group.rank} left the exchange of a window half way ({abandoned}), and the other ranks "
                "wait for it; end the job, or pass overlap=False to be able to go on after such an error"
            )

    def accumulate(self, gradients: Sequence[Optional[Any]], weight: float = 1.0) -> None:
        self._check_not_abandoned()
        super().accumulate(gradients, weight)

    accumulate.__doc__ = GradientWindow.accumulate.__doc__

    def _add(self, gradients: Sequence[Optional[Any]], weight: float) -> None:
        overlap = self.overlap
        if not self._is_open:
            super()._add(gradients, weight)
            if overlap.is_learning and overlap.seen:
                overlap.compare(gradients)
                self._has_compared = True
            return
        # Kept until the window has ended, in case it must be exchanged again.
        self._late.append((list(gradients), weight))
        if weight != self._sent_weight:
            overlap.problem = overlap.problem or "a micro step came behind the last one, or weighed something else"
            return
        self._sent_weight = None
        overlap.compare(gradients)
        hooked = set(overlap.seen)
        for index, gradient in enumerate(gradients):
            if gradient is not None and index not in hooked:
                self._put(index, gradient, weight)

    def _put(self, index: int, gradient: Any, weight: float) -> None:
        self._bucket_of[index].put(index, gradient, weight)

    def _reduce(self) -> list[Optional[Any]]:
        self._check_not_abandoned()
        if self.overlap.is_sending:
            self.overlap.finish(self.buckets, self._weight)
            self._is_exchanged = True
        has_problem, is_spoilt = self.overlap.problem is not None, self._sent_weight is not None
        notes = [has_problem, is_spoilt, self._has_compared and not has_problem]
        used, (num_problems, num_spoilt, num_learnt) = self._exchange_header(notes)
        if num_problems or num_spoilt:
            self._go_back(has_problem=num_problems > 0)
        gradients = self._average(used)
        if self.overlap.is_learning and num_learnt == self.group.world_size:
            self._follow_order(self.group.broadcast_object(self.overlap.seen))
        self.overlap.measure(self.group.all_reduce)
        return gradients

    def _go_back(self, *, has_problem: bool) -> None:
        """To the window as it was before its last backward pass, and what was accumulated behind that; on all ranks."""
        if self._is_exchanged:
            for bucket in self.buckets:
                bucket.restore()
            for gradients, weight in self._late:
                super()._add(gradients, weight)
            self._is_exchanged = False
        if has_problem:
            reports = self.group.all_gather_object(self.overlap.problem)
            rank, report = next((rank, report) for rank, report in enumerate(reports) if report)
            self.overlap.turn_off(f"{report} (rank {rank})")
            if self.group.is_main:
                warnings.warn(
                    f"gradients are exchanged after the backward pass from here on, for {report} on rank {rank}",
                    RuntimeWarning,
                    stacklevel=4,
                )

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
            if not self._is_exchanged:
                bucket.start(scale)
                if not bucket.is_asynchronous:
                    finish(bucket)
        for bucket in sent:
            if bucket.is_asynchronous or self._is_exchanged:
                finish(bucket)
        return gradients

    def _follow_order(self, order: list[int]) -> None:
        """Pack the buckets anew, in the order in which gradients come; those that never came are the last."""
        missing = set(range(len(self.parameters))) - set(order)
        self._make_buckets([*order, *sorted(missing, reverse=True)])
        self.overlap.learnt()

    def _clear(self) -> None:
        self.overlap.clear()
        self._late.clear()
        self._sent_weight, self._has_compared, self._is_exchanged = None, False, False
        for bucket in self.buckets:
            bucket.clear()
