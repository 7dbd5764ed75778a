"""MindSpore's own collectives: HCCL on Ascend, NCCL on GPU, MCCL on CPU. Arrays are MindSpore tensors.

MCCL is the narrowest of the three. What it refuses, or gets wrong without a word
(float64; large int64 in MindSpore 2.7), goes by a path that is exact: the bytes are
gathered, and every rank reduces them in rank order. So does what MindSpore's NCCL has no kernel for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

import numpy as np

from ..bucket import BucketLayout
from .base import Backend, reduce_arrays
from .buckets import Bucket
from .device_calls import DeviceCalls, MintCalls, PrimitiveCalls, copy_of
from .dtypes import HALF_TYPES, dtype_name
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
        self._calls: DeviceCalls = PrimitiveCalls() if self.name == "nccl" else MintCalls()
        self.rank, self.world_size = communication.get_rank(), communication.get_group_size()
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

    A device computes faster than this process can tell it to, so operators are few: gradients wait until the bucket
    is full, or until its sum is wanted, and are then flattened, weighted and added at once. Until then nobody may
    write into them.
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
        # Gradients that are not in the sum yet, and what they have in common: weight and type.
        self._waiting: dict[int, Any] = {}
        self._kind: tuple[float, Any] = (0.0, None)
        # No operator writes into a sum, so that what is kept stays as it is.
        self._sum: Optional[Any] = None
        self._kept: Optional[Any] = None
        self._result: Optional[Any] = None
        self._handle: Optional[Any] = None
        self._slices: dict[int, Any] = {}

    def put(self, index: int, gradient: Any, weight: float) -> None:
        kind = (weight, gradient.dtype)
        if index in self._waiting or kind != self._kind:
            self._add_waiting()
        self._waiting[index], self._kind = gradient, kind
        if len(self._waiting) == len(self.layout.slots):
            self._add_waiting()

    def _add_waiting(self) -> None:
        if not self._waiting:
            return
        weight, dtype = self._kind
        flat = self._flattened(self._waiting, dtype)
        part = (flat if dtype == self._sum_dtype else flat.astype(self._sum_dtype)) * weight
        self._sum = part if self._sum is None else self._sum + part
        self._waiting.clear()

    def _flattened(self, gradients: Mapping[int, Any], dtype: Any) -> Any:
        """All slots one behind the other, zeros where there is no gradient; it may share a gradient's memory."""
        parts = [
            gradients[slot.index].reshape(-1) if slot.index in gradients else self._ms.ops.zeros((slot.numel,), dtype)
            for slot in self.layout.slots
        ]
        return self._ms.ops.cat(parts) if len(parts) > 1 else parts[0]

    def keep(self) -> None:
        self._add_waiting()
        self._kept = self._sum

    def restore(self) -> None:
        self._waiting.clear()
        self._sum = self._kept

    def start(self, scale: float, patience: Optional[Patience] = None) -> None:
        self._add_waiting()
        mine = self._flattened({}, self._sum_dtype) if self._sum is None else self._sum * scale
        wire = mine if self._wire_dtype == self._sum_dtype else mine.astype(self._wire_dtype)
        if self._begins:
            self._result, self._handle = self._backend.begin_all_reduce(wire)
        else:
            self._result = self._backend.all_reduce(wire, "sum")

    def wait(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.wait()
        assert self._result is not None, "wait before start"
        if self._result.dtype != self._dtype:
            self._result = self._result.astype(self._dtype)
        sizes = [slot.numel for slot in self.layout.slots]
        self._slices = dict(zip(self._slots, self._ms.ops.split(self._result, sizes)))

    def get(self, index: int) -> Any:
        # A copy: MindSpore refuses to assign to a view, and MindNLP's clip_grad_norm_ assigns to gradients.
        return copy_of(self._slices[index].reshape(self._slots[index].shape))

    def release(self) -> None:
        """Nobody else reads these tensors."""

    def clear(self) -> None:
        self._waiting.clear()
        self._slices.clear()
        self._sum = self._kept = self._result = self._handle = None
