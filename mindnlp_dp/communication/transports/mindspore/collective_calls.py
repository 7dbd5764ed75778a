"""This module wraps the calls of MindSpore's collective libraries, whose names only it knows, for the transport.

Calls take tensors of types that the library supports, and return new tensors; only :meth:`DeviceCalls.all_reduce_async`
may change its argument. ``mindspore.mint.distributed`` is documented for Ascend and CPU, the older primitives of
``mindspore.ops`` for GPU; the transport chooses once.
"""

from __future__ import annotations

import abc
import functools
import os
import re
import sys
import time
from collections.abc import Sequence
from typing import Any, Optional

from mindnlp_dp.runtime import heartbeat
from mindnlp_dp.runtime.arrays import copy_of
from mindnlp_dp.runtime.versions import mindspore_is_before


# Versions: MindSpore 2.7. Cause: mint.empty and mint.empty_like, called without a device, create a tensor on Ascend,
# whatever the device is. Goes when: 2.7 is no longer supported.
def _options_of_empty() -> dict[str, str]:
    import mindspore

    on_cpu = mindspore.get_context("device_target") == "CPU"
    return {"device": "CPU"} if on_cpu and mindspore_is_before("2.8") else {}


class DeviceCalls(abc.ABC):
    """Collectives of all ranks, and messages between two; used after MindSpore's communication is initialized."""

    @abc.abstractmethod
    def all_reduce(self, x: Any, op: str) -> Any: ...

    @abc.abstractmethod
    def all_reduce_async(self, x: Any) -> tuple[Any, Optional[Any]]:
        """Begin to sum ``x``, whose memory may be reused; return the future sum, and a handle to wait for or None."""

    @abc.abstractmethod
    def reduce_scatter_async(self, x: Any, world_size: int) -> tuple[Any, Optional[Any]]:
        """Begin to reduce-scatter flat ``x`` of equal slices; return this rank's future slice, and a handle or None."""

    @abc.abstractmethod
    def all_gather_flat_async(self, x: Any, world_size: int) -> tuple[Any, Optional[Any]]:
        """Begin to gather every rank's flat ``x``; return the future tensor with all, and a handle or None."""

    def all_gather_flat(self, x: Any, world_size: int) -> Any:
        """Return every rank's flat ``x``, concatenated in one tensor."""
        out, handle = self.all_gather_flat_async(x, world_size)
        if handle is not None:
            handle.wait()
        return out

    @abc.abstractmethod
    def broadcast(self, x: Any, src: int) -> Any: ...

    @abc.abstractmethod
    def all_gather(self, x: Any, world_size: int) -> list[Any]:
        """Return every rank's ``x``, which has at least one dimension under :class:`PrimitiveCalls`."""

    @abc.abstractmethod
    def all_to_all(self, x: Any, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Any:
        """Send rows of ``x`` to the ranks in order; return the received rows, in rank order."""

    @abc.abstractmethod
    def send(self, x: Any, dst: int) -> None: ...

    @abc.abstractmethod
    def begin_send(self, x: Any, dst: int, tag: int) -> Any:
        """Begin to send, and return a handle with ``wait()``."""

    @abc.abstractmethod
    def recv(self, like: Any, src: int, tag: int = 0) -> Any: ...


class MintCalls(DeviceCalls):
    """Calls ``mindspore.mint.distributed``, on Ascend and CPU: in place, and asynchronous where requested.

    A call is among all ranks, or those of a ``group``; mint numbers ranks as in the full job.
    """

    def __init__(self, group: Optional[str] = None, ranks: Sequence[int] = ()) -> None:
        from mindspore import mint
        from mindspore.mint import distributed

        self._mint = mint
        self._here = _options_of_empty()
        self._distributed = distributed
        self._group = group
        self._ranks = ranks

    def _in_job(self, rank: int) -> int:
        return self._ranks[rank] if self._ranks else rank

    def all_reduce(self, x: Any, op: str) -> Any:
        out = copy_of(x)
        self._distributed.all_reduce(out, op=op, group=self._group)
        return out

    def all_reduce_async(self, x: Any) -> tuple[Any, Optional[Any]]:
        return x, self._distributed.all_reduce(x, op="sum", group=self._group, async_op=True)

    def reduce_scatter_async(self, x: Any, world_size: int) -> tuple[Any, Optional[Any]]:
        out = self._mint.empty(x.shape[0] // world_size, dtype=x.dtype, **self._here)
        handle = self._distributed.reduce_scatter_tensor(out, x, op="sum", group=self._group, async_op=True)
        return out, handle

    def all_gather_flat_async(self, x: Any, world_size: int) -> tuple[Any, Optional[Any]]:
        out = self._mint.empty(x.shape[0] * world_size, dtype=x.dtype, **self._here)
        return out, self._distributed.all_gather_into_tensor(out, x, group=self._group, async_op=True)

    def broadcast(self, x: Any, src: int) -> Any:
        out = copy_of(x)
        self._distributed.broadcast(out, src=self._in_job(src), group=self._group)
        return out

    def all_gather(self, x: Any, world_size: int) -> list[Any]:
        out = [self._mint.empty_like(x, **self._here) for _ in range(world_size)]
        self._distributed.all_gather(out, x.contiguous(), group=self._group)
        return out

    def all_to_all(self, x: Any, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Any:
        # An empty tensor has no address on a device. If there are no rows, one row is passed that is not sent.
        mine = x.contiguous() if x.shape[0] else self._rows(1, x)
        out = self._rows(max(sum(recv_counts), 1), x)
        self._distributed.all_to_all_single(out, mine, list(recv_counts), list(send_counts), group=self._group)
        return out if sum(recv_counts) else self._rows(0, x)

    def _rows(self, number: int, like: Any) -> Any:
        return self._mint.empty((number, *like.shape[1:]), dtype=like.dtype, **self._here)

    def send(self, x: Any, dst: int) -> None:
        # A device reads the memory as it lies there, and refuses views that are not contiguous.
        self._distributed.send(x.contiguous(), dst=self._in_job(dst), group=self._group)

    def begin_send(self, x: Any, dst: int, tag: int) -> Any:
        return self._distributed.isend(x.contiguous(), dst=self._in_job(dst), group=self._group, tag=tag)

    def recv(self, like: Any, src: int, tag: int = 0) -> Any:
        out = self._mint.empty_like(like, **self._here)
        self._distributed.recv(out, src=self._in_job(src), group=self._group, tag=tag)
        return out


class MCCLCalls(MintCalls):
    """Calls ``mindspore.mint.distributed`` on CPU, whose messages are sent from a buffer of the library."""

    def __init__(self, group: Optional[str] = None, ranks: Sequence[int] = ()) -> None:
        super().__init__(group, ranks)
        _use_the_group_of_all_ranks(self._distributed)

    def begin_send(self, x: Any, dst: int, tag: int) -> Any:
        self.send(x, dst)
        return _Done()


# Versions: MindSpore 2.8 to 2.10. Cause: a default argument of mint.distributed is the name that the group of all ranks
# has at import, "hccl_world_group". A CPU does not have this group, so that send() fails.
# Remove when: mint.distributed.send() works on CPU without it.
def _use_the_group_of_all_ranks(distributed: Any) -> None:
    from mindspore.communication import GlobalComm

    rank_of = getattr(sys.modules[distributed.send.__module__], "get_cache_group_rank", None)
    if rank_of is not None:
        rank_of.__defaults__ = (GlobalComm.WORLD_COMM_GROUP,)


class OneRankCalls(DeviceCalls):
    """Copies tensors, in a group of one rank on a device, which so needs no communicator."""

    def all_reduce(self, x: Any, op: str) -> Any:
        return copy_of(x)

    def all_reduce_async(self, x: Any) -> tuple[Any, Optional[Any]]:
        return x, None

    def reduce_scatter_async(self, x: Any, world_size: int) -> tuple[Any, Optional[Any]]:
        return x, None

    def all_gather_flat_async(self, x: Any, world_size: int) -> tuple[Any, Optional[Any]]:
        return copy_of(x), None

    def broadcast(self, x: Any, src: int) -> Any:
        return copy_of(x)

    def all_gather(self, x: Any, world_size: int) -> list[Any]:
        return [copy_of(x)]

    def all_to_all(self, x: Any, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Any:
        return copy_of(x)

    def send(self, x: Any, dst: int) -> None:
        raise AssertionError("the group refuses to send to this rank itself")

    def begin_send(self, x: Any, dst: int, tag: int) -> Any:
        raise AssertionError("the group refuses to send to this rank itself")

    def recv(self, like: Any, src: int, tag: int = 0) -> Any:
        raise AssertionError("the group refuses to receive from this rank itself")


class PrimitiveCalls(DeviceCalls):
    """Calls the primitives of ``mindspore.ops``, on GPU: they return new tensors, and the stream orders them."""

    # Messages between two ranks arrive in the order in which they were sent.
    _TAG = 0

    def __init__(self, group: Optional[str] = None, ranks: Sequence[int] = ()) -> None:
        from mindspore import ops

        self._ops = ops
        # Without a name, MindSpore uses its own group of all ranks.
        self._among: dict[str, Any] = {} if group is None else {"group": group}
        self._ranks = ranks

    def all_reduce(self, x: Any, op: str) -> Any:
        return self._ops.AllReduce(op, **self._among)(x)

    def all_reduce_async(self, x: Any) -> tuple[Any, Optional[Any]]:
        return self.all_reduce(x, "sum"), None

    def reduce_scatter_async(self, x: Any, world_size: int) -> tuple[Any, Optional[Any]]:
        return self._ops.ReduceScatter("sum", **self._among)(x), None

    def all_gather_flat_async(self, x: Any, world_size: int) -> tuple[Any, Optional[Any]]:
        return self._ops.AllGather(**self._among)(x), None

    def broadcast(self, x: Any, src: int) -> Any:
        return self._ops.Broadcast(self._ranks[src] if self._ranks else src, **self._among)((x,))[0]

    def all_gather(self, x: Any, world_size: int) -> list[Any]:
        # AllGather concatenates the ranks' arrays.
        gathered = self._ops.AllGather(**self._among)(x).reshape(world_size, *x.shape)
        return [gathered[rank] for rank in range(world_size)]

    def all_to_all(self, x: Any, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Any:
        raise AssertionError("the transport refuses it: ops.AlltoAllV is for Ascend only")

    def send(self, x: Any, dst: int) -> None:
        self.begin_send(x, dst, self._TAG)

    def begin_send(self, x: Any, dst: int, tag: int) -> Any:
        # The stream keeps the order, so the handle has nothing to wait for.
        self._ops.Send(tag, dst, **self._among)(x)
        return _Done()

    def recv(self, like: Any, src: int, tag: int = _TAG) -> Any:
        return self._ops.Receive(tag, src, list(like.shape), like.dtype, **self._among)()


class _Done:
    def wait(self) -> None:
        pass


VARIABLE = "MS_NODE_TIMEOUT"

DEFAULT_SECONDS = 30.0

# Fraction of the timeout from which a failure counts as one: MCCL starts its own clock, and retries in steps.
_NEARLY = 0.8

_FAILED = re.compile(r"\b(AllGather|AllReduce|Broadcast|ReduceScatter) failed\b")


# The timeouts of MCCL, MindSpore's CPU library.
#
# MindSpore's cluster fails a collective on CPU if a rank does not arrive within MS_NODE_TIMEOUT seconds, or if a
# neighbor in the ring has exited; for both it says "AllGather failed". The MindSpore transport wraps its calls here,
# so that errors say which rank waited, how long, and in which call.


class CollectiveTimeoutError(RuntimeError):
    """A rank did not arrive at a collective before MindSpore's timeout, or exited during it."""


def timeout_seconds() -> float:
    """Return how long one collective may wait under MCCL."""
    try:
        return float(os.environ.get(VARIABLE, DEFAULT_SECONDS))
    except ValueError:
        return DEFAULT_SECONDS


class MissingMessageError(CollectiveTimeoutError, ValueError):
    """A rank failed before it could send a message that this rank waited for; its own error says why."""


class TimeoutReportingCalls:
    """Wraps the methods of ``collectives``, which return when all ranks have arrived.

    The launcher's monitor sees which call this rank is blocked in, even when a backward pass begins the exchange of a
    gradient. A call that fails after a long wait, or because a neighbor exited, raises
    :class:`CollectiveTimeoutError`.
    """

    def __init__(self, collectives: Any, rank: int) -> None:
        self._collectives = collectives
        self._rank = rank

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._collectives, name)

        @functools.wraps(call)
        def watched(*args: Any, **kwargs: Any) -> Any:
            began = time.monotonic()
            try:
                with heartbeat.waiting(f"MindSpore's {name}"):
                    return call(*args, **kwargs)
            except RuntimeError as error:
                waited = time.monotonic() - began
                if waited < _NEARLY * timeout_seconds():
                    if not _FAILED.search(str(error)):
                        raise
                    raise CollectiveTimeoutError(
                        f"rank {self._rank} lost the connection to another rank, {waited:.0f} s after it "
                        f"entered {name}: that rank has ended, see its log"
                    ) from error
                raise CollectiveTimeoutError(
                    f"rank {self._rank} waited {waited:.0f} s in {name} for a rank that did not arrive, and MindSpore "
                    f"gave up. That rank has ended, as its log says, or it is late by more than {VARIABLE}, which is "
                    f"{timeout_seconds():.0f} s here. mindnlp-dp run --backend mindspore sets it to an hour; "
                    f"elsewhere: export {VARIABLE}=600"
                ) from error

        setattr(self, name, watched)
        return watched
