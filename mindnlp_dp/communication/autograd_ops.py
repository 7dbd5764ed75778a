"""Provides communication operators for use inside a model; their backward passes communicate, too.

Each takes a tensor and the group of ranks that split the work, and MindSpore can differentiate its result. The backward
pass is the transpose of the forward pass (Shoeybi et al., Megatron-LM, 2019, section 3, f and g; Korthikanti et al.,
Reducing Activation Recomputation in Large Transformer Models, 2022, g and g-bar):

===================  ====================  ====================
operator             forward               backward
===================  ====================  ====================
copy_to (f)          nothing               all-reduce
reduce_from (g)      all-reduce            nothing
gather_from          all-gather            this rank's part
scatter_to           this rank's part      all-gather
all_gather           all-gather            reduce-scatter
all_reduce           all-reduce            all-reduce
reduce_scatter       reduce-scatter        all-gather
all_to_all           rows to ranks         rows back
===================  ====================  ====================

All ranks of the group must call them in the same order. Autograd skips a backward pass if nothing before it in the
model needs a gradient; this must then be so on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mindspore import Tensor
from mindspore.common._grad_function import _Function

from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.runtime.arrays import dtype_name, from_host, read
from mindnlp_dp.runtime.shard_bounds import shard_bounds


def copy_to(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return ``x``, which is equal on all ranks, for a sharded computation; its gradients are summed over the ranks."""
    return x if group.world_size == 1 else _CopyTo.apply(x, group)


def reduce_from(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum of ``x`` over the ranks, on every rank."""
    return x if group.world_size == 1 else _ReduceFrom.apply(x, group)


def gather_from(x: Tensor, group: ProcessGroup, dim: int = -1) -> Tensor:
    """Concatenate the shards of all ranks along ``dim`` for a replicated computation; lengths may differ by one."""
    return x if group.world_size == 1 else _GatherFrom.apply(x, group, dim)


def scatter_to(x: Tensor, group: ProcessGroup, dim: int = -1) -> Tensor:
    """Return this rank's shard along ``dim`` of ``x``, which is equal on all ranks."""
    return x if group.world_size == 1 else _ScatterTo.apply(x, group, dim)


def all_gather(x: Tensor, group: ProcessGroup, dim: int = 0) -> Tensor:
    """Concatenate as :func:`gather_from` does, for a sharded computation: gradients are summed over the ranks."""
    return x if group.world_size == 1 else _AllGather.apply(x, group, dim)


def all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum as :func:`reduce_from` does, for a sharded computation: gradients are summed over the ranks, too."""
    return x if group.world_size == 1 else _AllReduce.apply(x, group)


def reduce_scatter(x: Tensor, group: ProcessGroup, dim: int = 0) -> Tensor:
    """Return this rank's shard along ``dim`` of the sum of ``x`` over the ranks."""
    return x if group.world_size == 1 else _ReduceScatter.apply(x, group, dim)


def all_to_all(x: Tensor, group: ProcessGroup, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Tensor:
    """Send ``send_counts[i]`` rows of ``x`` to each rank i in order; return the rows received, in rank order."""
    return x if group.world_size == 1 else _AllToAll.apply(x, group, tuple(send_counts), tuple(recv_counts))


def _part(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    first, last = shard_bounds(x.shape[dim], group.world_size)[group.rank :][:2]
    return x.narrow(dim, first, last - first).copy()


def _gathered(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    full, _ = gather_rows(np.moveaxis(read(x), dim, 0), group)
    return from_host(np.ascontiguousarray(np.moveaxis(full, 0, dim)), dtype_name(x))


def gather_rows(rows: np.ndarray, group: ProcessGroup) -> tuple[np.ndarray, list[int]]:
    """Return the rows of all ranks, in the order of the ranks, and the number of rows of each. A collective."""
    lengths = [int(part[0]) for part in group.all_gather(np.array([len(rows)]))]
    if len(rows) < max(lengths):
        rows = np.concatenate([rows, np.zeros((max(lengths) - len(rows), *rows.shape[1:]), rows.dtype)])
    parts = group.all_gather(np.ascontiguousarray(rows))
    return np.concatenate([part[:length] for part, length in zip(parts, lengths)]), lengths


def _sum(x: Tensor, group: ProcessGroup) -> Tensor:
    return group.all_reduce(x, every_step=True)


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


class _AllReduce(_Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _sum(gradient, ctx.group), None


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
