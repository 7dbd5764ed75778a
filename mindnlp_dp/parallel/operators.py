"""Communication inside a model: operators whose backward pass communicates, too.

Goes in: a tensor, and the group of ranks that share out the work. Comes out: a tensor that MindSpore differentiates.
Each pair of forward and backward pass is the other's transpose (Shoeybi et al., Megatron-LM, 2019, section 3, f and g;
Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022, g and g-bar):

===================  ====================  ====================
operator             forward               backward
===================  ====================  ====================
copy_to (f)          nothing               all-reduce
reduce_from (g)      all-reduce            nothing
gather_from          all-gather            this rank's part
scatter_to           this rank's part      all-gather
all_gather           all-gather            reduce-scatter
reduce_scatter       reduce-scatter        all-gather
all_to_all           rows to ranks         rows back
===================  ====================  ====================

All ranks of the group call them in the same order. A backward pass is skipped where nothing behind it needs a gradient,
which must be so on all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mindspore import Tensor
from mindspore.common._grad_function import _Function

from mindnlp_dp.communication.collectives import ProcessGroup


def copy_to(x: Tensor, group: ProcessGroup) -> Tensor:
    """``x``, the same on every rank, to where each rank does its part with it; gradients are summed up."""
    return x if group.world_size == 1 else _CopyTo.apply(x, group)


def reduce_from(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of the ranks' parts, on every rank."""
    return x if group.world_size == 1 else _ReduceFrom.apply(x, group)


def gather_from(x: Tensor, group: ProcessGroup, dim: int = -1) -> Tensor:
    """The ranks' parts one behind the other along ``dim``, of lengths that may differ by one, for all to go on with."""
    return x if group.world_size == 1 else _GatherFrom.apply(x, group, dim)


def scatter_to(x: Tensor, group: ProcessGroup, dim: int = -1) -> Tensor:
    """This rank's part along ``dim`` of ``x``, which is the same on every rank."""
    return x if group.world_size == 1 else _ScatterTo.apply(x, group, dim)


def all_gather(x: Tensor, group: ProcessGroup, dim: int = 0) -> Tensor:
    """Like :func:`gather_from`, for ranks that then do different things: gradients are summed up."""
    return x if group.world_size == 1 else _AllGather.apply(x, group, dim)


def reduce_scatter(x: Tensor, group: ProcessGroup, dim: int = 0) -> Tensor:
    """This rank's part along ``dim`` of the sum of the ranks' ``x``."""
    return x if group.world_size == 1 else _ReduceScatter.apply(x, group, dim)


def all_to_all(x: Tensor, group: ProcessGroup, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Tensor:
    """Rows of ``x`` to the ranks in order, ``send_counts`` each; theirs, ``recv_counts`` each, come in rank order."""
    return x if group.world_size == 1 else _AllToAll.apply(x, group, tuple(send_counts), tuple(recv_counts))


def shard_bounds(size: int, num_shards: int) -> list[int]:
    """Where each of ``num_shards`` parts of ``size`` begins, and the last one ends; they differ by one at most.

    >>> shard_bounds(10, 4)
    [0, 2, 5, 7, 10]
    """
    return [size * index // num_shards for index in range(num_shards + 1)]


def _part(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    first, last = shard_bounds(x.shape[dim], group.world_size)[group.rank :][:2]
    return x.narrow(dim, first, last - first).copy()


def _gathered(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    array = np.moveaxis(x.asnumpy(), dim, 0)
    lengths = [int(part[0]) for part in group.all_gather(np.array([len(array)]))]
    if len(array) < max(lengths):
        array = np.concatenate([array, np.zeros((max(lengths) - len(array), *array.shape[1:]), array.dtype)])
    parts = group.all_gather(np.ascontiguousarray(array))
    whole = np.concatenate([part[:length] for part, length in zip(parts, lengths)])
    return Tensor.from_numpy(np.ascontiguousarray(np.moveaxis(whole, 0, dim)))


def _sum(x: Tensor, group: ProcessGroup) -> Tensor:
    return group.all_reduce(x, is_hot=True)


class _CopyTo(_Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _sum(gradient, ctx.group), None


class _ReduceFrom(_Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class _GatherFrom(_Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _gathered(x, group, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _part(gradient, ctx.group, ctx.dim), None, None


class _ScatterTo(_Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _part(x, group, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _gathered(gradient, ctx.group, ctx.dim), None, None


class _AllGather(_GatherFrom):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _part(_sum(gradient, ctx.group), ctx.group, ctx.dim), None, None


class _ReduceScatter(_ScatterTo):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _part(_sum(x, group), group, dim)


class _AllToAll(_Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        ctx.group, ctx.send, ctx.receive = group, send, receive
        return group.exchange_rows(x, send, receive)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.group.exchange_rows(gradient, ctx.receive, ctx.send), None, None, None
