"""This module implements the transport of MindSpore's own libraries: HCCL on Ascend, NCCL on GPU, MCCL on CPU.

It exchanges MindSpore tensors. MCCL supports the fewest types. Types that it refuses or silently sums wrong
(float64; large int64 in MindSpore 2.7) take an exact path: the bytes are gathered, and every rank reduces them in rank
order. Types for which MindSpore's NCCL has no kernel, and those that HCCL does not sum on this chip, take the same
path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Optional

import numpy as np

from mindnlp_dp.communication.operations import Operation
from mindnlp_dp.communication.transports.channel import Channel
from mindnlp_dp.communication.transports.mindspore.collective_calls import (
    DeviceCalls,
    MCCLCalls,
    MintCalls,
    OneRankCalls,
    PrimitiveCalls,
    TimeoutReportingCalls,
)
from mindnlp_dp.communication.transports.mindspore.mindspore_cluster import (
    AllReduceOnlyCalls,
    create_group,
    init_cluster,
    restore_sigint_handler,
)
from mindnlp_dp.communication.transports.polling_wait import PollingWait
from mindnlp_dp.communication.transports.single import SingleProcessTransport, reduce_arrays
from mindnlp_dp.communication.transports.transport import Transport
from mindnlp_dp.runtime.arrays import HALF_TYPES, dtype_name, to_host
from mindnlp_dp.runtime.versions import mindspore_is_before

_LIBRARY = {"Ascend": "hccl", "GPU": "nccl", "CPU": "mccl"}

# The types that each library sums correctly itself.
_REDUCES = {
    "hccl": {"float32", "float16", "bfloat16", "int8", "int32", "int64"},
    "nccl": {"float32", "float16", "int8", "int32", "int64"},
    "mccl": {"float32"},
}

# Those of them that HCCL does not sum on a chip, by MindSpore's name of the chip: the 910A and the 310P have no
# bfloat16 at all (CANN 8.0 to 8.5, HcclAllReduce).
_NOT_ON_CHIP = {"ascend910": {"bfloat16"}, "ascend310p": {"bfloat16", "int64"}}

# The operations that a library does not have. NCCL: MindSpore 2.7 to 2.10 documents ops.AlltoAllV for Ascend only.
# 310P: HcclSend and HcclRecv are not for this chip (CANN 8.0 to 8.5).
_LACKS = {
    "mccl": ("MindSpore's CPU library (mccl)", {Operation.ALL_TO_ALL}),
    "mccl before 2.8": (
        "MindSpore's CPU library (mccl) before MindSpore 2.8",
        {Operation.MESSAGES, Operation.ALL_TO_ALL},
    ),
    "nccl": ("MindSpore's library for GPUs (nccl)", {Operation.ALL_TO_ALL}),
    "ascend310p": ("HCCL on this chip (ascend310p)", {Operation.MESSAGES}),
}


# The types of which MCCL and NCCL can send messages; others go as bytes. MCCL fails for int16, and MindSpore
# has no kernel of float64 for NCCL. HCCL sends every type but bool.
_SENDS = {"float32", "float16", "int8", "int32", "int64", "uint8"}


class MindSporeChannel(Channel):
    """Sums MindSpore tensors of float64, float32, float16 and bfloat16 on their device, over MindSpore's libraries."""

    def __init__(self, transport: MindSporeTransport) -> None:
        self._transport = transport
        self.world_size, self.slice_index = transport.world_size, transport.rank
        if transport.world_size == 1:
            self.cannot_overlap = "there is one rank"

    def sum(self, x: Any) -> Any:
        """Return the sum over the ranks as a new tensor."""
        return self._transport.all_reduce(x, "sum")

    def all_reduce_async(self, x: Any) -> tuple[Any, Optional[Any]]:
        """Begin to sum a tensor, in its memory or in new memory; return the future sum, and a handle or None.

        On a device, its stream completes the sum. MCCL has finished it by then, because a CPU dispatches synchronously.
        """
        return self._transport.calls.all_reduce_async(x)

    def reduce_scatter_async(self, x: Any) -> tuple[Any, Optional[Any]]:
        """Begin to reduce-scatter a flat tensor of one equal slice per rank; return this rank's slice, and a handle."""
        return self._transport.calls.reduce_scatter_async(x, self.world_size)

    def all_gather_flat_async(self, x: Any) -> tuple[Any, Optional[Any]]:
        """Begin :meth:`all_gather_flat`; return the future tensor, and a handle to wait for or None."""
        return self._transport.calls.all_gather_flat_async(x, self.world_size)

    def all_gather_flat(self, x: Any) -> Any:
        """Return every rank's flat tensor, all of one length and type, concatenated."""
        return self._transport.calls.all_gather_flat(x, self.world_size)

    def reduces_natively(self, dtype: str) -> bool:
        """Return whether the library itself sums this type correctly."""
        return self._transport.reduces_natively(dtype)

    def check_types(self, dtypes: Iterable[str], compression: Optional[str]) -> None:
        """Raise ValueError if the library cannot sum in the type of ``compression``, or the chip lacks a parameter's.

        ``dtypes`` are the types of the parameters.
        """
        transport = self._transport
        if not transport.waits_for_a_device or transport.reduces_natively("bfloat16"):
            return
        if compression == "bf16":
            kind = f"this chip ({transport.chip})" if transport.chip else "GPUs"
            raise ValueError(
                f'compression="bf16" on rank {transport.rank}: MindSpore has no sum of bfloat16 for {kind}; use "fp16"'
            )
        if transport.chip and "bfloat16" in dtypes:
            raise ValueError(
                f"parameters of bfloat16 on rank {transport.rank}: this chip ({transport.chip}) has no bfloat16; "
                "load the model in float32 or float16"
            )

    def inverse_total(self, number: float, waiter: Optional[PollingWait] = None) -> Any:
        total = self.sum(self._transport.to_native(np.array([number], np.float32)))
        if self._transport.waits_for_a_device:
            # If the total is 0, this is infinite, and results scaled by it are not used.
            return 1.0 / total
        value = float(to_host(total)[0])
        return 1.0 / value if value > 0 else None


class MindSporeTransport(Transport):
    """Moves tensors over HCCL, NCCL or MCCL.

    Attributes:
        chip: MindSpore's name of the NPU, such as "ascend910b"; empty for other devices.
    """

    # mint.distributed's tag is documented as reserved, and not passed on to HCCL.
    matches_in_order = True

    def __init__(self, ranks: Optional[Sequence[int]] = None) -> None:
        """Create a transport of all ranks, or of these ``ranks`` of the job, in this order; each of them calls it."""
        import mindspore
        from mindspore import communication

        if ranks is None:
            init_cluster()

        self._ms = mindspore
        self._communication = communication
        self.name = _LIBRARY[mindspore.get_context("device_target")]
        self.waits_for_a_device = self.name != "mccl"
        self.chip = _chip() if self.name == "hccl" else ""
        self._reduces = _REDUCES[self.name] - _NOT_ON_CHIP.get(self.chip, set())
        self._is_world = ranks is None
        # A group of one rank needs no communicator, whose creation takes seconds, and whose buffers 400 MB on Ascend.
        self._is_alone = ranks is not None and len(ranks) == 1
        self._group = None if ranks is None or self._is_alone else create_group(ranks)
        restore_sigint_handler()
        self._in_job = range(communication.get_group_size()) if ranks is None else ranks
        self.rank, self.world_size = self._in_job.index(communication.get_rank()), len(self._in_job)
        self.calls = self._make_calls()
        self.local_rank = communication.get_local_rank()
        self.local_world_size = communication.get_local_rank_size()
        self.channel = self._new_channel()

    def _make_calls(self) -> DeviceCalls:
        if self._is_alone:
            return OneRankCalls()
        kinds: dict[str, Callable[..., DeviceCalls]] = {"hccl": MintCalls, "nccl": PrimitiveCalls, "mccl": MCCLCalls}
        kind = kinds[self.name]
        calls: Any = kind() if self._group is None else kind(self._group, self._in_job)
        if self.name == "mccl":
            calls = calls if self._group is None else AllReduceOnlyCalls(self._group, self._in_job, self.rank)
            calls = TimeoutReportingCalls(calls, self.rank)
        return calls

    def _new_channel(self) -> MindSporeChannel:
        return MindSporeChannel(self)

    def reopen_channel(self) -> None:
        """Open a new channel for MCCL, whose calls have ended on all ranks; on a device they are pending: keep it."""
        if not self.waits_for_a_device:
            super().reopen_channel()

    def to_native(self, x: Any) -> Any:
        if isinstance(x, np.ndarray):
            return self._ms.Tensor(np.ascontiguousarray(to_host(x)).reshape(x.shape))
        is_unknown = dtype_name(x) == "bfloat16" and not self.reduces_natively("bfloat16")
        return x.astype(self._ms.float32) if is_unknown else x

    def from_native(self, y: Any, like: Any) -> Any:
        if isinstance(like, np.ndarray):
            return y.asnumpy().astype(like.dtype, copy=False)
        return y if y.dtype == like.dtype else y.astype(like.dtype)

    def widened(self, x: Any) -> Any:
        return x.astype(self._ms.float32)

    def reduces_natively(self, dtype: str) -> bool:
        """Return whether the library itself sums this type correctly."""
        return self._is_alone or dtype in self._reduces

    def all_reduce(self, x: Any, op: str) -> Any:
        dtype = dtype_name(x)
        # In MCCL, whether NaN is larger than a number depends on the rank that has it.
        if self.reduces_natively(dtype) and (op == "sum" or self.name != "mccl"):
            return self.calls.all_reduce(x, op)
        if dtype in HALF_TYPES:
            return self.all_reduce(x.astype(self._ms.float32), op).astype(x.dtype)
        array = x.asnumpy()
        parts = [part.view(array.dtype) for part in self._gather(_as_bytes(array))]
        return self._ms.Tensor(np.asarray(reduce_arrays(parts, op), array.dtype).reshape(array.shape))

    @property
    def _moves_tensors(self) -> bool:
        """Whether tensors of every type are moved as they are; the others are moved as bytes."""
        return self.name == "hccl" or self._is_alone

    def all_reduce_header(self, numbers: np.ndarray, last: Any) -> np.ndarray:
        if not isinstance(last, self._ms.Tensor):
            return super().all_reduce_header(numbers, last)
        return to_host(self.all_reduce(self._ms.ops.cat([self._ms.Tensor(numbers), last]), "sum"))

    def broadcast(self, x: Any, src: int) -> Any:
        if self._moves_tensors:
            return self.calls.broadcast(x, src)
        array = x.asnumpy()
        return self._from_bytes(self._broadcast_uint8(_as_bytes(array), src), array)

    def all_gather(self, x: Any) -> list[Any]:
        if self._moves_tensors:
            parts = self.calls.all_gather(self._without_bool(x), self.world_size)
            return [self.from_native(part, x) for part in parts]
        array = x.asnumpy()
        return [self._from_bytes(part, array) for part in self._gather(_as_bytes(array))]

    # Versions: MindSpore 2.7.0 (2.8 and 2.9 are unknown; 2.10 accepts it). Cause: on Ascend, it refuses bool in
    # all-gather, all-to-all and messages, though not in broadcast. Goes when: the oldest supported version accepts it
    # (op_comm_func_impl.cc, CheckInferType).
    def _without_bool(self, x: Any) -> Any:
        return x.astype(self._ms.uint8) if dtype_name(x) == "bool" else x

    # MCCL and NCCL move every type as bytes. All ranks' arrays have the same length here.

    def _from_bytes(self, data: np.ndarray, like: np.ndarray) -> Any:
        return self._ms.Tensor(data.view(like.dtype).reshape(like.shape).copy())

    def _broadcast_uint8(self, array: np.ndarray, src: int) -> np.ndarray:
        return self.calls.broadcast(self._ms.Tensor(array), src).asnumpy()

    def _gather(self, array: np.ndarray) -> list[np.ndarray]:
        return [part.asnumpy() for part in self.calls.all_gather(self._ms.Tensor(array), self.world_size)]

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

    def all_to_all(self, x: Any, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Any:
        if library := self.library_without(Operation.ALL_TO_ALL):
            raise NotImplementedError(
                f"all_to_all on rank {self.label(self.rank)}: {library} has no all-to-all; "
                "the mpi backend has it, on CPU: mindnlp-dp run --backend mpi"
            )
        return self.from_native(self.calls.all_to_all(self._without_bool(x), send_counts, recv_counts), x)

    def library_without(self, operation: Operation) -> str:
        name = "mccl before 2.8" if self.name == "mccl" and mindspore_is_before("2.8") else self.chip or self.name
        library, lacks = _LACKS.get(name, ("", set[Operation]()))
        return library if operation in lacks and not self._is_alone else ""

    def send(self, x: Any, dst: int) -> None:
        self._check_messages("send")
        self.calls.send(self._message(x), dst)

    def begin_send(self, x: Any, dst: int, tag: int) -> Any:
        self._check_messages("send")
        return self.calls.begin_send(self._message(x), dst, tag)

    def recv(self, like: Any, src: int, tag: int = 0) -> Any:
        self._check_messages("recv")
        if self._sends_natively(like):
            return self.from_native(self.calls.recv(self._without_bool(like), src, tag), like)
        array = like.asnumpy()
        return self._from_bytes(self.calls.recv(self._ms.Tensor(_as_bytes(array)), src, tag).asnumpy(), array)

    def _sends_natively(self, x: Any) -> bool:
        return self.name == "hccl" or dtype_name(x) in _SENDS

    def _message(self, x: Any) -> Any:
        return self._without_bool(x) if self._sends_natively(x) else self._ms.Tensor(_as_bytes(x.asnumpy()))

    def split(self, ranks: Sequence[int]) -> Transport:
        # On a device, the tensors of a one-rank group stay there.
        alone = len(ranks) == 1 and not self.waits_for_a_device
        return SingleProcessTransport() if alone else MindSporeTransport([self._in_job[rank] for rank in ranks])

    def _check_messages(self, call: str) -> None:
        if library := self.library_without(Operation.MESSAGES):
            raise NotImplementedError(
                f"{call} on rank {self.label(self.rank)}: {library} has no messages between two ranks; "
                "the mpi backend has them, on CPU: mindnlp-dp run --backend mpi"
            )

    def barrier(self) -> None:
        # mint's own barrier works on CPU, but then reports an error.
        self.all_reduce(self._ms.Tensor(np.zeros(1, np.int32)), "sum").asnumpy()

    def close(self) -> None:
        if self._is_world:
            self._communication.release()
        elif self._group is not None:
            self._communication.destroy_group(self._group)


def _chip() -> str:
    from mindspore._c_expression import MSContext

    return str(MSContext.get_instance().get_ascend_soc_version())


def _as_bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
