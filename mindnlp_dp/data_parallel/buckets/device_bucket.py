"""This module sums gradients that stay on their device; bucket_factory.py creates it for device channels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional

import numpy as np

from mindnlp_dp.communication.transports.mindspore.mindspore_transport import MindSporeChannel
from mindnlp_dp.communication.transports.polling_wait import PollingWait
from mindnlp_dp.data_parallel.buckets.bucket import Bucket
from mindnlp_dp.data_parallel.buckets.bucket_layout import ALIGN_NUMEL, BucketLayout
from mindnlp_dp.data_parallel.buckets.host_bucket import sum_dtype
from mindnlp_dp.runtime.arrays import HALF_TYPES, aligned_zeros, copy_of, to_host


class DeviceBucket(Bucket):
    """A bucket of tensors that stay on their device, flattened for the exchange.

    They are exchanged in their parameters' type, or in the half type of ``compression``. Before that, half types are
    weighted and summed in float32, because a sum of half-precision gradients, weighted by samples, may overflow.

    A device computes faster than this process can launch operators, so there are few of them: gradients are held until
    the bucket is full, or its sum is needed, and are then flattened, weighted and added together. Until then no caller
    may write to them.

    Attributes:
        own_range: The begin and end of this rank's slice, in elements of the slots without gaps. All slices have the
            same length, so the last ones may extend beyond the slots.
        own_slice: This rank's slice of the last sum, after :meth:`keep_shard`, with zeros beyond the slots; it is not
            written to.
    """

    is_asynchronous = True

    def __init__(self, layout: BucketLayout, channel: MindSporeChannel, compression: Optional[str] = None) -> None:
        super().__init__(layout)
        import mindspore

        self._ms = mindspore
        self._channel = channel
        self._dtype = getattr(mindspore, layout.dtype)
        self._sum_dtype = mindspore.float32 if layout.dtype in HALF_TYPES else self._dtype
        half = {"fp16": mindspore.float16, "bf16": mindspore.bfloat16}.get(compression or "")
        self._wire_dtype = half if half is not None and layout.dtype == "float32" else self._dtype
        # MCCL sums in half precision only if the user asked for this rounding with compression.
        self._begins = self._wire_dtype != self._dtype or channel.reduces_natively(layout.dtype)
        # Gradients that are not in the sum yet, and what they have in common: weight, type, and whether they count.
        self._waiting: dict[int, Any] = {}
        self._kind: tuple[float, Any, Optional[Any]] = (0.0, None, None)
        # No operator writes into a sum in place, so keep() needs no copy.
        self._sum: Optional[Any] = None
        self._kept: Optional[Any] = None
        self._result: Optional[Any] = None
        self._handle: Optional[Any] = None
        self._slices: dict[int, Any] = {}
        # Flat tensors here do not have the gaps that slots have in host memory.
        self._numel = sum(slot.numel for slot in layout.slots)
        length = -(-self._numel // (ALIGN_NUMEL * channel.world_size)) * ALIGN_NUMEL
        self._padding = length * channel.world_size - self._numel
        self.own_range = (channel.slice_index * length, (channel.slice_index + 1) * length)
        self._is_scattered = False
        self.own_slice: Optional[Any] = None
        self._on_host: Optional[np.ndarray] = None

    def put(self, index: int, gradient: Any, loss_weight: float, counts: Optional[Any] = None) -> None:
        """Add ``loss_weight * gradient`` to a slot, or zeros if ``counts``, a boolean on the device, is false."""
        loss_weight_before, dtype_before, counts_before = self._kind
        is_alike = loss_weight == loss_weight_before and gradient.dtype == dtype_before and counts is counts_before
        if index in self._waiting or not is_alike:
            self._add_waiting()
        self._waiting[index], self._kind = gradient, (loss_weight, gradient.dtype, counts)
        if len(self._waiting) == len(self.layout.slots):
            self._add_waiting()

    def _add_waiting(self) -> None:
        if not self._waiting:
            return
        loss_weight, dtype, counts = self._kind
        flat = self._flattened(self._waiting, dtype)
        part = (flat if dtype == self._sum_dtype else flat.astype(self._sum_dtype)) * loss_weight
        if counts is not None:
            # Not a product: zero times NaN is NaN.
            part = self._ms.ops.where(counts, part, self._ms.ops.zeros_like(part))
        self._sum = part if self._sum is None else self._sum + part
        self._waiting.clear()

    def _flattened(self, gradients: Mapping[int, Any], dtype: Any) -> Any:
        """Concatenate all slots, with zeros for missing gradients; the result may share a gradient's memory."""
        parts = [
            gradients[slot.index].reshape(-1) if slot.index in gradients else self._ms.ops.zeros((slot.numel,), dtype)
            for slot in self.layout.slots
        ]
        return self._ms.ops.cat(parts) if len(parts) > 1 else parts[0]

    def snapshot(self) -> None:
        self._add_waiting()
        self._kept = self._sum

    def rollback(self) -> None:
        self._waiting.clear()
        self._sum = self._kept

    def start(self, scale: Any, waiter: Optional[PollingWait] = None) -> None:
        self._add_waiting()
        mine = self._flattened({}, self._sum_dtype) if self._sum is None else self._sum * scale
        wire = mine if self._wire_dtype == self._sum_dtype else mine.astype(self._wire_dtype)
        self._is_scattered = self.scatter and self._begins
        if self._is_scattered:
            self._result, self._handle = self._channel.reduce_scatter_async(self._padded(wire))
        elif self._begins:
            self._result, self._handle = self._channel.all_reduce_async(wire)
        else:
            self._result = self._channel.sum(wire)

    def _finish(self) -> Any:
        """Make the operators that follow wait for the sum, and return it; the host does not wait."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.wait()
        assert self._result is not None, "wait before start"
        if self._result.dtype != self._dtype:
            self._result = self._result.astype(self._dtype)
        return self._result

    def sum_of_squares(self) -> Any:
        """Return the sum of squares of the exchanged gradients, a float32 scalar on the device.

        If the exchange has scattered them, it is that of this rank's slice.
        """
        wide = self._finish().astype(self._ms.float32)
        return (wide * wide).sum()

    @property
    def has_result(self) -> bool:
        """Return whether the exchange has begun."""
        return self._result is not None

    @property
    def is_scattered(self) -> bool:
        """Return whether the last exchange has left only this rank's slice here."""
        return self._is_scattered

    def wait(self) -> None:
        self._finish()
        if self._is_scattered:
            return
        sizes = [slot.numel for slot in self.layout.slots]
        self._slices = dict(zip(self._slots, self._ms.ops.split(self._result, sizes)))

    def _padded(self, flat: Any) -> Any:
        if not self._padding:
            return flat
        return self._ms.ops.cat([flat, self._ms.ops.zeros((self._padding,), flat.dtype)])

    def get(self, index: int) -> Any:
        # The copy is necessary: MindNLP's clip_grad_norm_ assigns to gradients, and MindSpore cannot assign to a view.
        return copy_of(self._slices[index].reshape(self._slots[index].shape))

    def sums(self) -> list[tuple[int, np.ndarray]]:
        if self._on_host is None:
            self._on_host = aligned_zeros(self.layout.numel, sum_dtype(self.layout))
        return [(0, self._on_host)]

    def keep_shard(self) -> None:
        self.own_slice = self._result
        if not self._is_scattered:
            self.own_slice = copy_of(self._padded(self._result)[slice(*self.own_range)])

    def copy_to_host(self) -> None:
        [(_, on_host)] = self.sums()
        for slot in self.layout.slots:
            on_host[slot.offset : slot.offset + slot.numel] = to_host(self._slices[slot.index]).reshape(-1)
        self._has_sum()

    def release(self) -> None:
        """Do nothing: no other rank reads these tensors."""

    def clear(self) -> None:
        self._waiting.clear()
        self._slices.clear()
        self._sum = self._kept = self._result = self._handle = None
