"""MindSpore's own collectives: HCCL on Ascend, NCCL on GPU, MCCL on CPU. Arrays are MindSpore tensors.

MCCL is the narrowest of the three. What it refuses, or gets wrong without a word
(float64; large int64 in MindSpore 2.7), goes by a path that is exact: the bytes are
gathered, and every rank reduces them in rank order. So does what MindSpore's NCCL has no kernel for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Optional

import numpy as np

from ..bucket import BucketLayout
from .base import Backend, reduce_arrays
from .buckets import Bucket
from .device_bucket import DeviceBucket
from .device_calls import DeviceCalls, MintCalls, PrimitiveCalls
from .dtypes import HALF_TYPES, dtype_name
from .late_ranks import WatchedCollectives
from .ring import Patience

# What the hint at MPI measures, and what its exchange takes over a copy in and out (benchmarks/bench_gradient_sync.py).
_HINT_BYTES = 1 << 20
_MPI_OVER_COPIES = 1.6
_LIBRARY = {"Ascend": "hccl", "GPU": "nccl", "CPU": "mccl"}
# What each sums itself, exactly as it should.
_REDUCES = {
    "hccl": {"float32", "float16", "bfloat16", "int8", "int32", "int64"},
    "nccl": {"float32", "float16", "int8", "int32", "int64"},
    "mccl": {"float32"},
}


class MindSporeBackend(Backend):
    def __init__(self) -> None:
        import mindspore
        from mindspore import communication

        # In MindSpore's scheduler process this call serves the job and never returns.
        communication.init()

        self._ms = mindspore
        self._communication = communication
        self.name = _LIBRARY[mindspore.get_context("device_target")]
        self.waits_for_a_device = self.name != "mccl"
        self.rank, self.world_size = communication.get_rank(), communication.get_group_size()
        calls: Any = PrimitiveCalls() if self.name == "nccl" else MintCalls()
        if self.name == "mccl":
            calls = WatchedCollectives(calls, self.rank)
        self._calls: DeviceCalls = calls
        self.local_rank = communication.get_local_rank()
        self.local_world_size = communication.get_local_rank_size()
        if self.world_size == 1:
            self.cannot_overlap = "there is one rank"
        self._has_hinted = False

    def to_native(self, x: Any) -> Any:
        if isinstance(x, np.ndarray):
            return self._ms.Tensor(np.ascontiguousarray(self.to_host(x)).reshape(x.shape))
        return x.astype(self._ms.float32) if dtype_name(x) == "bfloat16" and self.name != "hccl" else x

    def from_native(self, y: Any, like: Any) -> Any:
        if isinstance(like, np.ndarray):
            return y.asnumpy().astype(like.dtype, copy=False)
        return y if y.dtype == like.dtype else y.astype(like.dtype)

    def widened(self, x: Any) -> Any:
        return x.astype(self._ms.float32)

    def reduces_natively(self, dtype: str) -> bool:
        """Whether the library itself sums this type, exactly as it should."""
        return dtype in _REDUCES[self.name]

    def all_reduce(self, x: Any, op: str) -> Any:
        dtype = dtype_name(x)
        # Whether NaN is larger than a number depends on its rank in MCCL.
        if self.reduces_natively(dtype) and (op == "sum" or self.name != "mccl"):
            return self._calls.all_reduce(x, op)
        if dtype in HALF_TYPES:
            return self.all_reduce(x.astype(self._ms.float32), op).astype(x.dtype)
        array = x.asnumpy()
        parts = [part.view(array.dtype) for part in self._gather(_as_bytes(array))]
        return self._ms.Tensor(np.asarray(reduce_arrays(parts, op), array.dtype).reshape(array.shape))

    # On a device, what is only passed on to it stays there.

    def are_finite(self, arrays: Sequence[Any]) -> bool:
        if not self.waits_for_a_device or not arrays:
            return super().are_finite(arrays)
        bad = [self._ms.ops.logical_not(self._ms.ops.isfinite(x)).astype(self._ms.float32).sum() for x in arrays]
        return not float(self._ms.ops.stack(bad).sum().asnumpy())

    def fingerprint(self, gradient: Any) -> Any:
        if not self.waits_for_a_device:
            return super().fingerprint(gradient)
        wide = gradient.astype(self._ms.float32)
        return self._ms.ops.stack([wide.sum(), wide.abs().sum()])

    def have_changed(self, before: Sequence[Any], after: Sequence[Any]) -> Any:
        if not self.waits_for_a_device or not before:
            return super().have_changed(before, after)
        old, new = self._ms.ops.cat(list(before)), self._ms.ops.cat(list(after))
        # NaN is no change where it was NaN before: only such numbers are not equal to themselves.
        is_same = self._ms.ops.logical_or(old == new, self._ms.ops.logical_and(old != old, new != new))  # noqa: PLR0124
        return self._ms.ops.logical_not(is_same).astype(self._ms.float32).sum().reshape(1)

    def inverse_total(self, number: float, patience: Optional[Patience] = None) -> Any:
        if not self.waits_for_a_device:
            return super().inverse_total(number, patience)
        # Without any weight it is infinite, and nobody takes what is scaled by it.
        return 1.0 / self.all_reduce(self._ms.Tensor(np.array([number], np.float32)), "sum")

    def sum_header(self, numbers: np.ndarray, last: Any) -> np.ndarray:
        if not isinstance(last, self._ms.Tensor):
            return super().sum_header(numbers, last)
        return self.to_host(self.all_reduce(self._ms.ops.cat([self._ms.Tensor(numbers), last]), "sum"))

    def begin_all_reduce(self, x: Any) -> tuple[Any, Optional[Any]]:
        """Begin to sum a float32, float16 or bfloat16 tensor, in its memory or new one; the sum, and its handle if any.

        On a device its stream goes on with it. MCCL, dispatched synchronously as a CPU wants it, has ended by then.
        """
        return self._calls.begin_sum(x)

    def broadcast(self, x: Any, src: int) -> Any:
        if self.name == "hccl":
            return self._calls.broadcast(x, src)
        array = x.asnumpy()
        return self._from_bytes(self._broadcast_uint8(_as_bytes(array), src), array)

    def all_gather(self, x: Any) -> list[Any]:
        if self.name == "hccl":
            return self._calls.all_gather(x, self.world_size)
        array = x.asnumpy()
        return [self._from_bytes(part, array) for part in self._gather(_as_bytes(array))]

    # MCCL and NCCL move every type as its bytes. All ranks' arrays are of one length here.

    def _from_bytes(self, data: np.ndarray, like: np.ndarray) -> Any:
        return self._ms.Tensor(data.view(like.dtype).reshape(like.shape).copy())

    def _broadcast_uint8(self, array: np.ndarray, src: int) -> np.ndarray:
        return self._calls.broadcast(self._ms.Tensor(array), src).asnumpy()

    def _gather(self, array: np.ndarray) -> list[np.ndarray]:
        return [part.asnumpy() for part in self._calls.all_gather(self._ms.Tensor(array), self.world_size)]

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
        self._calls.send(x, dst)

    def recv(self, like: Any, src: int) -> Any:
        self._refuse_point_to_point("recv")
        return self._calls.recv(like, src)

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
        if self.name == "nccl" and compression == "bf16":
            raise ValueError(
                f'compression="bf16" on rank {self.rank}: MindSpore has no sum of bfloat16 for GPUs; use "fp16"'
            )
        return [DeviceBucket(layout, self, compression) for layout in layouts]

    def reopen(self) -> None:
        """MCCL's calls had ended, on all ranks, or none would have come here; a device's are still under way."""
        if not self.waits_for_a_device:
            super().reopen()

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
