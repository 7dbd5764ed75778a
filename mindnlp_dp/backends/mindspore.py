"""MindSpore's own collectives: HCCL on Ascend, NCCL on GPU, MCCL on CPU. Arrays are MindSpore tensors.

MCCL is the narrowest of the three. What it refuses, or gets wrong without a word
(float64; large int64 in MindSpore 2.7), goes by a path that is exact: the bytes are
gathered, and every rank reduces them in rank order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Optional

import numpy as np

from ..bucket import BucketLayout
from .base import Backend, reduce_arrays
from .buckets import Bucket
from .dtypes import HALF_TYPES, dtype_name
from .late_ranks import WatchedCollectives
from .ring import Patience

# What the hint at MPI measures, and what its exchange takes over a copy in and out (benchmarks/bench_gradient_sync.py).
_HINT_BYTES = 1 << 20
_MPI_OVER_COPIES = 1.6
_LIBRARY = {"Ascend": "hccl", "GPU": "nccl", "CPU": "mccl"}
_DEVICES_REDUCE = {"float32", "float16", "bfloat16", "int8", "int32", "int64"}


class MindSporeBackend(Backend):
    def __init__(self) -> None:
        import mindspore
        from mindspore import communication

        # In MindSpore's scheduler process this call serves the job and never returns.
        communication.init()
        from mindspore.mint import distributed

        self._ms = mindspore
        self._communication = communication
        self.name = _LIBRARY[mindspore.get_context("device_target")]
        self.rank, self.world_size = communication.get_rank(), communication.get_group_size()
        self._collectives = WatchedCollectives(distributed, self.rank) if self.name == "mccl" else distributed
        self.local_rank = communication.get_local_rank()
        self.local_world_size = communication.get_local_rank_size()
        if self.world_size == 1:
            self.cannot_overlap = "there is one rank"
        self._has_hinted = False

    def to_native(self, x: Any) -> Any:
        if isinstance(x, np.ndarray):
            return self._ms.Tensor(np.ascontiguousarray(self.to_host(x)).reshape(x.shape))
        return x.astype(self._ms.float32) if dtype_name(x) == "bfloat16" and self.name == "mccl" else x

    def from_native(self, y: Any, like: Any) -> Any:
        if isinstance(like, np.ndarray):
            return y.asnumpy().astype(like.dtype, copy=False)
        return y if y.dtype == like.dtype else y.astype(like.dtype)

    def reduces_natively(self, dtype: str) -> bool:
        """Whether the library itself sums this type, exactly as it should."""
        return dtype == "float32" if self.name == "mccl" else dtype in _DEVICES_REDUCE

    def all_reduce(self, x: Any, op: str) -> Any:
        if dtype_name(x) in HALF_TYPES and self.name == "mccl":
            return self.all_reduce(x.astype(self._ms.float32), op).astype(x.dtype)
        if not self.reduces_natively(dtype_name(x)):
            array = x.asnumpy()
            parts = [part.view(array.dtype) for part in self._gather(_as_bytes(array))]
            return self._ms.Tensor(np.asarray(reduce_arrays(parts, op), array.dtype).reshape(array.shape))
        out = x.copy()
        self._collectives.all_reduce(out, op=op)
        return out

    def begin_all_reduce(self, x: Any) -> Any:
        """Begin to sum a float32, float16 or bfloat16 tensor in place; returns a handle to wait for.

        On a device its stream goes on with it. MCCL, dispatched synchronously as a CPU wants it, has ended by then.
        """
        return self._collectives.all_reduce(x, op="sum", async_op=True)

    def broadcast(self, x: Any, src: int) -> Any:
        if self.name != "mccl":
            out = x.copy()
            self._collectives.broadcast(out, src=src)
            return out
        array = x.asnumpy()
        return self._from_bytes(self._broadcast_uint8(_as_bytes(array), src), array)

    def all_gather(self, x: Any) -> list[Any]:
        if self.name != "mccl":
            out = [self._ms.mint.empty_like(x) for _ in range(self.world_size)]
            self._collectives.all_gather(out, x.contiguous())
            return out
        array = x.asnumpy()
        return [self._from_bytes(part, array) for part in self._gather(_as_bytes(array))]

    # MCCL moves every type as its bytes. All ranks' arrays are of one length here.

    def _from_bytes(self, data: np.ndarray, like: np.ndarray) -> Any:
        return self._ms.Tensor(data.view(like.dtype).reshape(like.shape).copy())

    def _broadcast_uint8(self, array: np.ndarray, src: int) -> np.ndarray:
        out = self._ms.Tensor(array.copy())
        self._collectives.broadcast(out, src=src)
        return out.asnumpy()

    def _gather(self, array: np.ndarray) -> list[np.ndarray]:
        out = [self._ms.Tensor(np.zeros_like(array)) for _ in range(self.world_size)]
        self._collectives.all_gather(out, self._ms.Tensor(array))
        return [part.asnumpy() for part in out]

    # Byte strings may differ in length.

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        lengths = [int(length[0]) for length in self._gather(np.array([len(data)], np.int64))]
        longest = max(lengths)
        if longest == 0:
            return [b""] * self.world_size
        padded = np.zeros(longest, np.uint8)
        padded[: len(data)] = np.frombuffer(data, np.uint8)
        return [part[:length].tobytes() for part, length in zip(self._gather(padded), lengths)]

    def broadcast_bytes(self, data: bytes, src: int) -> bytes:
        length = int(self._gather(np.array([len(data)], np.int64))[src][0])
        mine = np.frombuffer(data, np.uint8) if self.rank == src else np.zeros(length, np.uint8)
        return self._broadcast_uint8(mine, src).tobytes() if length else b""

    def send(self, x: Any, dst: int) -> None:
        self._refuse_point_to_point("send")
        self._collectives.send(x, dst=dst)

    def recv(self, like: Any, src: int) -> Any:
        self._refuse_point_to_point("recv")
        out = like.copy()
        self._collectives.recv(out, src=src)
        return out

    def _refuse_point_to_point(self, call: str) -> None:
        if self.name == "mccl":
            raise NotImplementedError(
                f"{call} on rank {self.rank}: MindSpore's CPU library (mccl) has no point-to-point calls; "
                "the mpi backend has them: mindnlp-dp run --backend mpi"
            )

    def barrier(self) -> None:
        # mint's own barrier reports an error on CPU, after having worked.
        self.all_reduce(self._ms.Tensor(np.zeros(1, np.int32)), "sum").asnumpy()

    def make_buckets(self, layouts: Sequence[BucketLayout], compression: Optional[str] = None) -> list[Bucket]:
        if self.name == "mccl" and not self._has_hinted:
            self._hint_at_mpi()
        return [DeviceBucket(layout, self, compression) for layout in layouts]

    def _hint_at_mpi(self) -> None:
        """Say once how much faster MPI would be here. A collective."""
        self._has_hinted = True
        if self.world_size == 1 or self.local_world_size < self.world_size:
            return
        array = np.zeros(_HINT_BYTES // 4, np.float32)
        x, staged, out = self._ms.Tensor(array), array.copy(), array.copy()

        def copy_in_and_out() -> None:
            np.copyto(staged, array)
            np.copyto(out, staged)

        mccl, copies = (_best_seconds(call) for call in (lambda: self.all_reduce(x, "sum").asnumpy(), copy_in_and_out))
        mpi = _MPI_OVER_COPIES * copies
        if self.rank == 0 and mccl > 2 * mpi:
            print(
                f"hint: MCCL takes {1e3 * mccl:.1f} ms for a MiB of gradients here; the mpi backend needs about "
                f"{1e3 * mpi:.2f} ms, {mccl / mpi:.0f} times less: mindnlp-dp run --nproc {self.world_size} SCRIPT",
                flush=True,
            )

    def close(self) -> None:
        self._communication.release()


def _best_seconds(call: Callable[[], object]) -> float:
    times = []
    for _ in range(3):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)


def _as_bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


class DeviceBucket(Bucket):
    """A bucket of tensors that stay on their device, flattened for the exchange.

    On the wire they have their parameters' type, or the half type of ``compression``; before that they are weighted
    and summed in float32, because a sum of half-precision gradients, weighted by samples, may
    not fit into its own range.
    """

    is_asynchronous = True

    def __init__(self, layout: BucketLayout, backend: MindSporeBackend, compression: Optional[str] = None) -> None:
        super().__init__(layout)
        import mindspore

        self._ms = mindspore
        self._backend = backend
        self._dtype = getattr(mindspore, layout.dtype)
        self._sum_dtype = mindspore.float32 if layout.dtype in HALF_TYPES else self._dtype
        half = {"fp16": mindspore.float16, "bf16": mindspore.bfloat16}.get(compression or "")
        self._wire_dtype = half if half is not None and layout.dtype == "float32" else self._dtype
        # Only what the user asked to be rounded is summed in half precision by MCCL.
        self._begins = self._wire_dtype != self._dtype or backend.reduces_natively(layout.dtype)
        self._parts: dict[int, Any] = {}
        self._kept: dict[int, Any] = {}
        self._result: Optional[Any] = None
        self._handle: Optional[Any] = None

    def put(self, index: int, gradient: Any, weight: float) -> None:
        part = gradient.astype(self._sum_dtype).reshape(-1) * weight
        self._parts[index] = self._parts[index] + part if index in self._parts else part

    def keep(self) -> None:
        self._kept = dict(self._parts)

    def restore(self) -> None:
        self._parts = dict(self._kept)

    def start(self, scale: float, patience: Optional[Patience] = None) -> None:
        parts: Sequence[Any] = [
            self._parts[slot.index] if slot.index in self._parts else self._ms.ops.zeros((slot.numel,), self._sum_dtype)
            for slot in self.layout.slots
        ]
        flat = self._ms.ops.cat(list(parts)) if len(parts) > 1 else parts[0]
        self._result = (flat * scale).astype(self._wire_dtype)
        if self._begins:
            self._handle = self._backend.begin_all_reduce(self._result)
        else:
            self._result = self._backend.all_reduce(self._result, "sum")

    def wait(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.wait()
        assert self._result is not None, "wait before start"
        self._result = self._result.astype(self._dtype)

    def get(self, index: int) -> Any:
        slot = self._slots[index]
        assert self._result is not None, "get before start"
        return self._result[slot.offset : slot.offset + slot.numel].reshape(slot.shape).copy()

    def release(self) -> None:
        """Nobody else reads these tensors."""

    def clear(self) -> None:
        self._parts.clear()
        self._kept.clear()
        self._result = self._handle = None
