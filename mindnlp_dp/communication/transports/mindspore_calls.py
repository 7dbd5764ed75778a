"""The calls of MindSpore's collective library: the one place that knows how MindSpore spells them.

Goes in: tensors of types that the library knows. Comes out: new tensors; none is changed that a caller passed, but
by :meth:`DeviceCalls.begin_sum`. ``mindspore.mint.distributed`` is documented for Ascend and CPU,
the older primitives of ``mindspore.ops`` for GPU; the transport chooses once.
"""

from __future__ import annotations

import abc
from typing import Any, Optional

from mindnlp_dp.arrays.conversion import copy_of


class DeviceCalls(abc.ABC):
    """Collectives over all ranks, and messages between two. Called after MindSpore's communication has begun."""

    @abc.abstractmethod
    def all_reduce(self, x: Any, op: str) -> Any: ...

    @abc.abstractmethod
    def begin_sum(self, x: Any) -> tuple[Any, Optional[Any]]:
        """Begin to sum ``x``, whose memory may be taken for it: the tensor to be, and a handle to wait for, if any."""

    @abc.abstractmethod
    def begin_scatter_sum(self, x: Any, world_size: int) -> tuple[Any, Optional[Any]]:
        """Begin to sum flat ``x``, of ``world_size`` equal slices: this rank's slice to be, and a handle, if any."""

    @abc.abstractmethod
    def gather_slices(self, x: Any, world_size: int) -> Any:
        """Every rank's flat ``x``, one behind the other in one tensor."""

    @abc.abstractmethod
    def broadcast(self, x: Any, src: int) -> Any: ...

    @abc.abstractmethod
    def all_gather(self, x: Any, world_size: int) -> list[Any]:
        """Every rank's ``x``, which has at least one dimension."""

    @abc.abstractmethod
    def send(self, x: Any, dst: int) -> None: ...

    @abc.abstractmethod
    def recv(self, like: Any, src: int) -> Any: ...


class MintCalls(DeviceCalls):
    """``mindspore.mint.distributed``, on Ascend and CPU: in place, and asynchronous where asked to be."""

    def __init__(self) -> None:
        from mindspore import mint
        from mindspore.mint import distributed

        self._mint = mint
        self._distributed = distributed

    def all_reduce(self, x: Any, op: str) -> Any:
        out = copy_of(x)
        self._distributed.all_reduce(out, op=op)
        return out

    def begin_sum(self, x: Any) -> tuple[Any, Optional[Any]]:
        return x, self._distributed.all_reduce(x, op="sum", async_op=True)

    def begin_scatter_sum(self, x: Any, world_size: int) -> tuple[Any, Optional[Any]]:
        out = self._mint.empty(x.shape[0] // world_size, dtype=x.dtype)
        return out, self._distributed.reduce_scatter_tensor(out, x, op="sum", async_op=True)

    def gather_slices(self, x: Any, world_size: int) -> Any:
        out = self._mint.empty(x.shape[0] * world_size, dtype=x.dtype)
        self._distributed.all_gather_into_tensor(out, x)
        return out

    def broadcast(self, x: Any, src: int) -> Any:
        out = copy_of(x)
        self._distributed.broadcast(out, src=src)
        return out

    def all_gather(self, x: Any, world_size: int) -> list[Any]:
        out = [self._mint.empty_like(x) for _ in range(world_size)]
        self._distributed.all_gather(out, x.contiguous())
        return out

    def send(self, x: Any, dst: int) -> None:
        self._distributed.send(x, dst=dst)

    def recv(self, like: Any, src: int) -> Any:
        out = self._mint.empty_like(like)
        self._distributed.recv(out, src=src)
        return out


class PrimitiveCalls(DeviceCalls):
    """The primitives of ``mindspore.ops``, for GPU. They give new tensors, and no handle: the stream has the order."""

    # Messages between two ranks come in the order in which they were sent.
    _TAG = 0

    def __init__(self) -> None:
        from mindspore import ops

        self._ops = ops

    def all_reduce(self, x: Any, op: str) -> Any:
        return self._ops.AllReduce(op)(x)

    def begin_sum(self, x: Any) -> tuple[Any, Optional[Any]]:
        return self.all_reduce(x, "sum"), None

    def begin_scatter_sum(self, x: Any, world_size: int) -> tuple[Any, Optional[Any]]:
        return self._ops.ReduceScatter("sum")(x), None

    def gather_slices(self, x: Any, world_size: int) -> Any:
        return self._ops.AllGather()(x)

    def broadcast(self, x: Any, src: int) -> Any:
        return self._ops.Broadcast(src)((x,))[0]

    def all_gather(self, x: Any, world_size: int) -> list[Any]:
        # The ranks' arrays one behind the other.
        gathered = self._ops.AllGather()(x).reshape(world_size, *x.shape)
        return [gathered[rank] for rank in range(world_size)]

    def send(self, x: Any, dst: int) -> None:
        self._ops.Send(self._TAG, dst)(x)

    def recv(self, like: Any, src: int) -> Any:
        return self._ops.Receive(self._TAG, src, list(like.shape), like.dtype)()
