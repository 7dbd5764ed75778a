"""This module averages gradients over the ranks in buckets, as PyTorch's DDP does; train steps use it.

Every rank gets ``sum_r(weight_r * gradient_r) / sum_r(weight_r)``, the gradient of the global batch. The weights are
numbers of samples, for example. With gradient accumulation one update takes several micro-batches::

    for inputs in update:
        sync.accumulate(gradients_of(inputs), loss_weight=len(inputs))    # no communication
    gradients = sync.reduce()                                        # all ranks, once

A rank without samples contributes zeros. The gradient of a parameter that no rank used in the update is None, as in a
single process. Pass only trainable parameters to the synchronizer.

If the last micro-batch is announced as below, each bucket is exchanged during its backward pass, as soon as the bucket
is full (overlap.py). The result is the same::

    with sync.backward(loss_weight=len(inputs)):
        gradients = gradients_of(inputs)
    sync.accumulate(gradients, loss_weight=len(inputs))
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Optional, Union

import numpy as np

from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.data_parallel.buckets.bucket import Bucket, exchange_buckets
from mindnlp_dp.data_parallel.buckets.bucket_factory import make_buckets
from mindnlp_dp.data_parallel.buckets.bucket_layout import (
    check_bucket_cap_mb,
    completed_order,
    first_order,
    pack_buckets,
)
from mindnlp_dp.data_parallel.buckets.device_bucket import DeviceBucket
from mindnlp_dp.data_parallel.device_header import DeviceHeader
from mindnlp_dp.data_parallel.overlap import Overlap
from mindnlp_dp.data_parallel.powersgd import DEFAULT_RANK, PowerSGD, check_powersgd_rank, is_compressed
from mindnlp_dp.data_parallel.synchronizer_base import BufferedSynchronizer, InPlace
from mindnlp_dp.runtime.arrays import dtype_name
from mindnlp_dp.runtime.versions import mindnlp_series

# The size of a bucket that fits a core's cache; and, for devices, that of PyTorch's DDP, with few calls per update.
DEFAULT_BUCKET_CAP_MB, DEVICE_BUCKET_CAP_MB = 2.0, 25.0

COMPRESSIONS = (None, "fp16", "bf16", "powersgd")


def _lacks_hooks(parameters: Iterable[Any]) -> str:
    """Return the reason why parameters do not support gradient hooks, or an empty string if they do."""
    if mindnlp_series() == "0.5" and any(type(p).__module__.startswith("mindtorch") for p in parameters):
        return "MindNLP 0.5's parameters cannot say when their gradient is there"
    return ""


class GradientSynchronizer(BufferedSynchronizer):
    """Averages gradients in buckets of ``bucket_cap_mb`` MiB, with one all-reduce per bucket that any rank used.

    Args:
        bucket_cap_mb: The maximum size of a bucket; None is 2 on CPUs, and 25 on devices.
            ``benchmarks/bench_bucket_cap.py`` finds the best for a machine.
        overlap: Whether buckets are exchanged during the backward pass: True, False, or "auto" for a short trial in
            the first updates that keeps the faster way. The result is the same.
        compression: None for exact sums; "fp16" or "bf16" halves the bytes sent, and rounds them (no effect within a
            host, where MPI sends nothing); "powersgd" approximates matrices by products of rank ``powersgd_rank``
            (powersgd.py), without overlap.

    Attributes:
        compression: The compression that the user chose.
        scatter: Whether this rank needs only its own slices of the result of ``reduce(in_place=True)``; between hosts
            that saves half of the exchange.
        keeps_tensors: Whether those slices stay on the device as tensors (:meth:`.DeviceBucket.keep_shard`).
        before_packing: A callback that runs before buckets are repacked and must release all views of their memory.
        overlap: The overlap of exchange and backward pass; its ``state`` tells whether it is on.
        order: The parameters' indices in packing order: at first from the last to the first, later in the order in
            which their gradients arrive. With three or more hosts, or with compression, it affects the rounding.
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        group: Optional[ProcessGroup] = None,
        *,
        bucket_cap_mb: Optional[float] = None,
        overlap: Union[bool, str] = "auto",
        compression: Optional[str] = None,
        powersgd_rank: int = DEFAULT_RANK,
    ) -> None:
        super().__init__(parameters, group)
        self.scatter = self.keeps_tensors = False
        self.before_packing: Callable[[], None] = lambda: None
        if overlap not in (True, False, "auto"):
            raise ValueError(f'overlap must be True, False or "auto", got {overlap!r}')
        if compression not in COMPRESSIONS:
            raise ValueError(f"compression must be one of {', '.join(map(repr, COMPRESSIONS))}, got {compression!r}")
        self._dtypes = [dtype_name(p) for p in self.parameters]
        self._powersgd: Optional[PowerSGD] = None
        self.compression, self._wire = compression, compression
        if compression == "powersgd":
            self._powersgd, self._wire = self._make_powersgd(check_powersgd_rank(powersgd_rank)), None
        default = DEVICE_BUCKET_CAP_MB if self.group.on_device else DEFAULT_BUCKET_CAP_MB
        self.bucket_cap_mb = check_bucket_cap_mb(default if bucket_cap_mb is None else bucket_cap_mb)
        self.pack_in_order(first_order(len(self.parameters)))
        self._hides = not any(b.is_asynchronous for b in self.buckets)
        self.overlap = Overlap(self.parameters, overlap, self.channel, on_device=self.group.on_device)
        reason = (self.channel.cannot_overlap or _lacks_hooks(self.parameters)) if overlap else "not asked for"
        reason = reason or ("PowerSGD needs whole gradients" if self._powersgd else "")
        if reason := reason or ("" if self.buckets else "there is nothing to exchange"):
            self.overlap.turn_off(reason)
        # PowerSGD computes on the host, and so needs each loss at once.
        self.defers_losses = self.group.on_device and self._powersgd is None and bool(self.buckets)
        self._header: Optional[DeviceHeader] = DeviceHeader() if self.defers_losses else None
        self._is_exchanged = False
        # Whether results stay in the buckets; the order to repack in after they have been used.
        self._in_place = False
        self._next_order: Optional[Sequence[int]] = None
        # Gradients accumulated since Bucket.keep(); the weight of a micro-batch that the hooks sent, but that the
        # caller has not accumulated yet. Of a late micro-batch also the number of its deferred loss.
        self._late: list[tuple[Sequence[Optional[Any]], float, Optional[int]]] = []
        self._sent_loss_weight: Optional[float] = None
        self._has_compared = False
        # Of the micro-batch that is accumulated: whether it counts, a tensor, and the number of its loss, if deferred.
        self._counts: Optional[Any] = None
        self._deferred: Optional[int] = None

    def _make_powersgd(self, rank: int) -> Optional[PowerSGD]:
        kinds = enumerate(zip(self._shapes, self._dtypes))
        matrices = {index: shape for index, (shape, dtype) in kinds if is_compressed(shape, dtype, rank)}
        return PowerSGD(matrices, rank, self.group, self.channel) if matrices else None

    def pack_in_order(self, order: Sequence[int]) -> None:
        """Repack the buckets, between two updates; parameters that ``order`` does not name come last. A collective."""
        self.order = completed_order(order, len(self.parameters))
        in_buckets = [index for index in self.order if self._powersgd is None or index not in self._powersgd]
        layouts = pack_buckets(self._shapes, self._dtypes, self.bucket_cap_mb, in_buckets)
        # The memory of the old buckets must be free before the new ones are allocated.
        self.before_packing()
        self.buckets, self._bucket_of = list[Bucket](), dict[int, Bucket]()
        self.buckets = make_buckets(layouts, self.group, self.channel, self._wire)
        self._bucket_of = {slot.index: bucket for bucket in self.buckets for slot in bucket.layout.slots}

    def reset_error_feedback(self) -> None:
        """Reset the state of PowerSGD, as a resumed process does; called by every rank."""
        if self._powersgd is not None:
            self._powersgd.forget()

    @contextlib.contextmanager
    def backward(self, loss_weight: float) -> Iterator[None]:
        """Enclose the last forward and backward pass of an update; an exchange that overlaps begins inside it.

        After an exception inside the context, no thread and no partial update remain. If the exchange had begun by
        then, the other ranks hang, and this synchronizer can no longer be used.
        """
        if self._exchange_is_off:
            yield
            return
        self.channel.check_open(self.group.rank)
        self.check_shapes()
        if self.overlap.is_open:
            self.overlap.problem = "two backward passes of an update were called its last"
        else:
            for bucket in self.buckets:
                bucket.scatter = self.scatter
            self.overlap.begin(self.buckets, loss_weight, self._loss_weight_so_far)
            self._sent_loss_weight = loss_weight if self.overlap.is_open else None
        try:
            yield
        except BaseException as error:
            if self.overlap.is_open:
                self.channel.abandon(error)
            self._begin_update()
            raise
        finally:
            self.overlap.end_backward()

    @property
    def _loss_weight_so_far(self) -> float:
        """Return the weight of this update if all of its deferred losses are finite."""
        return self._loss_weight + (0.0 if self._header is None else self._header.loss_weight)

    def accumulate(
        self, gradients: Sequence[Optional[Any]], loss_weight: float = 1.0, *, loss: Optional[Any] = None
    ) -> None:
        """Add ``loss_weight * gradient`` for every parameter, in the order of ``parameters``; None adds nothing.

        Raises:
            ValueError: If the number of gradients or a shape is wrong, or the weight is negative or not finite.
        """
        self.channel.check_open(self.group.rank)
        super().accumulate(gradients, loss_weight, loss=loss)

    def _count(self, gradients: Sequence[Optional[Any]], loss_weight: float, loss: Optional[Any]) -> None:
        self._counts, self._deferred = None, None
        if loss is None or self._header is None:
            super()._count(gradients, loss_weight, loss)
        else:
            self._counts = self._header.add(loss, loss_weight, [gradient is not None for gradient in gradients])
            self._deferred = self._header.last

    def _add(self, gradients: Sequence[Optional[Any]], loss_weight: float) -> None:
        overlap = self.overlap
        if not self.overlap.is_open:
            super()._add(gradients, loss_weight)
            if overlap.is_learning and overlap.seen:
                overlap.compare(gradients)
                self._has_compared = True
            return
        # Gradients are kept until the update ends, because the exchange may have to be repeated.
        self._late.append((list(gradients), loss_weight, self._deferred))
        if loss_weight != self._sent_loss_weight:
            overlap.problem = overlap.problem or "a micro-step came after the last one, or had another weight"
            return
        self._sent_loss_weight = None
        overlap.compare(gradients)
        hooked = set(overlap.seen)
        for index, gradient in enumerate(gradients):
            if gradient is not None and index not in hooked:
                self._put(index, gradient, loss_weight)

    def _put(self, index: int, gradient: Any, loss_weight: float) -> None:
        if self._powersgd is not None and index in self._powersgd:
            self._powersgd.put(index, gradient, loss_weight)
            return
        bucket = self._bucket_of[index]
        if self._counts is None:
            bucket.put(index, gradient, loss_weight)
        else:
            assert isinstance(bucket, DeviceBucket), "losses are deferred on devices only"
            bucket.put(index, gradient, loss_weight, self._counts)

    def _reduce(self) -> list[Optional[Any]]:
        self.channel.check_open(self.group.rank)
        if self.scatter and self.overlap.is_sending and not self._in_place:
            raise RuntimeError("gradients were exchanged for a sharded update: call reduce(in_place=True)")
        if self._header is not None and not self.overlap.is_open:
            for bucket in self.buckets:
                bucket.scatter = self.scatter and self._in_place
        # On a device all buckets are exchanged before the header is read, which then has the norm of their sums.
        if self.overlap.is_sending or self._header is not None:
            try:
                self._spans += self.overlap.finish(self.buckets, self._loss_weight_so_far)
            except BaseException as error:
                self.channel.abandon(error)
                raise
            self._is_exchanged = True
        has_problem, has_nonfinite_peer = self.overlap.problem is not None, self._sent_loss_weight is not None
        notes = [has_problem, has_nonfinite_peer, self._has_compared and not has_problem]
        used, (num_problems, num_spoilt, num_learnt, num_bad, num_changed) = self._exchange_header(
            notes, self.overlap.has_changed
        )
        if num_problems or num_spoilt or num_bad or num_changed:
            self._roll_back(has_problem=num_problems + num_changed > 0)
            num_learnt = 0
        gradients = self._average(used)
        if self.overlap.is_learning and num_learnt == self.group.world_size:
            self._next_order = self.group.broadcast_object(list(self.overlap.seen))
            self.overlap.recorded_order()
            if not self._in_place:
                self.repack_if_learned()
        else:
            self.overlap.measure(self.group.all_reduce)
        return gradients

    def _exchange_header(self, notes: Sequence[float], last_note: Any = 0.0) -> tuple[np.ndarray, np.ndarray]:
        """Return the used parameters and the sums of the notes, of the bad losses and of the changes.

        On a device, the losses and the norm come with it.
        """
        if self._header is None:
            used, sums = super()._exchange_header(notes, last_note)
            # Bad losses were known before, and skipped.
            return used, np.insert(sums, len(notes), 0.0)
        buckets = [bucket for bucket in self.buckets if isinstance(bucket, DeviceBucket) and bucket.has_result]
        values = self._header.exchange(
            self.group, np.append(self._used, np.float32(self._loss_weight)),
            np.array([self._skipped, *notes], np.float32), changed=last_note,
            squares=[bucket.sum_of_squares() for bucket in buckets],
            are_slices=any(bucket.is_scattered for bucket in buckets),
        )  # fmt: skip
        skipped, *theirs = values.sums
        self._total_loss_weight = values.loss_weight
        self._num_skipped = int(skipped) + values.num_bad
        self.losses, self.sum_of_squares = values.losses, values.sum_of_squares
        return values.used > 0, np.array([*theirs, values.num_bad, values.num_changed])

    def reduce(self, *, in_place: InPlace = False) -> Any:
        self._in_place = bool(in_place)
        try:
            gradients = super().reduce()
        finally:
            self._in_place = False
        if not in_place:
            return gradients
        marks = np.array([mark is not None for mark in gradients])
        return marks if self.total_loss_weight > 0 else None

    def repack_if_learned(self) -> None:
        """Repack the buckets in the order that was learned in this update, if any; called after the update.

        A collective.
        """
        if self._next_order is not None:
            self.pack_in_order(self._next_order)
            self._next_order = None

    def _roll_back(self, *, has_problem: bool) -> None:
        """Undo an exchange that went wrong on any rank, so that all ranks can repeat it without overlap.

        Restore the buckets as they were before the last backward pass, and add what was accumulated since then.
        """
        if self._is_exchanged:
            for bucket in self.buckets:
                bucket.rollback()
            self._counts = self.sum_of_squares = None
            for gradients, loss_weight, deferred in self._late:
                if deferred is None or np.isfinite(self.losses[deferred]):
                    super()._add(gradients, loss_weight)
            self._is_exchanged = False
        if has_problem:
            changed = "a gradient was changed after its backward pass" if float(self.overlap.has_changed) else None
            reports = self.group.all_gather_object(self.overlap.problem or changed)
            rank, report = next((rank, report) for rank, report in enumerate(reports) if report)
            self.overlap.turn_off(f"{report} (rank {rank})")
            if self.group.is_main:
                warnings.warn(
                    f"gradients are exchanged after the backward pass from here on, for {report} on rank {rank}",
                    RuntimeWarning,
                    stacklevel=4,
                )

    def _exchange(self, used: np.ndarray, scale: float) -> list[Optional[Any]]:
        numbered = [
            (f"bucket {number}", bucket)
            for number, bucket in enumerate(self.buckets)
            if any(used[slot.index] for slot in bucket.layout.slots)
        ]
        gradients: list[Optional[Any]] = [None] * len(self.parameters)

        def take(bucket: Bucket) -> None:
            for slot in bucket.layout.slots:
                if used[slot.index]:
                    gradients[slot.index] = True if self._in_place else bucket.get(slot.index)
            leave = bucket.keep_shard if self.keeps_tensors else bucket.copy_to_host
            leave() if self._in_place else bucket.release()

        for _, bucket in numbered:
            self.num_bytes += bucket.layout.num_bytes
            self.num_calls += 1
            bucket.scatter = self.scatter and self._in_place
        exchange_buckets(numbered, None if self._is_exchanged else scale, take, self._timed)
        if self._powersgd is not None:
            began, num_bytes, num_calls = time.perf_counter(), self._powersgd.num_bytes, self._powersgd.num_calls
            for index, gradient in self._powersgd.exchange(used, scale).items():
                gradients[index] = gradient
            self.num_bytes += self._powersgd.num_bytes - num_bytes
            self.num_calls += self._powersgd.num_calls - num_calls
            self._timed("PowerSGD", began)
        return gradients

    def _clear(self) -> None:
        self.overlap.clear()
        self._late.clear()
        self._sent_loss_weight, self._has_compared, self._is_exchanged = None, False, False
        self._counts = self._deferred = None
        if self._header is not None:
            self._header.clear()
        for bucket in self.buckets:
            bucket.clear()
        if self._powersgd is not None:
            self._powersgd.clear()
