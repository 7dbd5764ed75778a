"""Operators for layers and losses that look at the whole batch: the rows of all ranks in a micro-step.

In-batch negatives, batch normalization over all ranks and the router losses of mixtures of experts use them. Their
gradients are those of one process with all rows: the exchange of gradients multiplies each rank's gradients by the
weight of its loss, so a gradient is multiplied by its rank's weight on the way to a row, and divided by the weight of
the row's rank.

They are collectives in the forward and in the backward pass. A rank without rows takes part with another rank's rows,
which do not count. The training loops set the weights (:meth:`BatchAcrossRanks.micro_step`); outside of a training
step, as in an evaluation, the batch is this rank's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Optional, TypeVar

import numpy as np
from mindspore import Tensor
from mindspore.common._grad_function import _Function

from mindnlp_dp.communication.autograd_ops import gather_rows
from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.runtime.arrays import dtype_name, from_host, to_host
from mindnlp_dp.runtime.once_differentiable import once_differentiable

T = TypeVar("T")

_current: Optional[BatchAcrossRanks] = None


class BatchAcrossRanks:
    """The rows of all ranks in the current micro-step of a training run.

    Attributes:
        group: the ranks that split the samples.
        loss_weight: the weight of this rank's loss; 0 if it has no rows.
        is_used: whether the model has looked at the rows of other ranks in any micro-step so far; equal on all ranks.
        has_local_router_loss: whether the router losses of mixtures of experts look at this rank's rows only.
        is_probing: whether a loss is computed only to find out what it is.
    """

    def __init__(self, group: ProcessGroup, *, has_local_router_loss: bool = False) -> None:
        self.group = group
        self.loss_weight = 0.0
        self.is_used = False
        self.has_local_router_loss = has_local_router_loss
        self.is_probing = False
        self._has_run = False
        self._are_all_here = True
        self._refused = ""

    def complete(self, micro_batches: Sequence[Optional[T]], *, are_all_here: bool = False) -> list[Optional[T]]:
        """Return this rank's micro-batches of an update, with dummies of weight 0 where the model needs all ranks.

        A dummy is another rank's batch, for a micro-step in which this rank has none. The model needs all ranks if it
        has looked at their rows before; in the first update nothing is known of it, so then, too, all ranks take part.
        A collective in these updates only. ``are_all_here`` says that all ranks are known to have rows.
        """
        needs_all = self.is_used or not self._has_run
        self._are_all_here = are_all_here or needs_all
        if self.group.world_size == 1 or not needs_all:
            return list(micro_batches)
        everyone = self.group.all_gather_object([batch is not None for batch in micro_batches])
        number = max(map(len, everyone))
        micro_steps = list(zip(*([*theirs, *[False] * (number - len(theirs))] for theirs in everyone)))
        self._has_run |= any(map(any, micro_steps))
        completed = [*micro_batches, *[None] * (number - len(micro_batches))]
        for place, has in enumerate(micro_steps):
            if any(has) and not all(has):
                src = has.index(True)
                batch = self.group.broadcast_object(completed[place] if self.group.rank == src else None, src)
                completed[place] = batch if completed[place] is None else completed[place]
        return completed

    def has_nonfinite_peer(self, loss: float) -> bool:
        """Return whether a rank's loss is not finite, and so the gradients of all that look at its rows. A collective.

        It is one of the ranks that run a micro-step, if the model looks at the rows of other ranks.
        """
        if self.group.world_size == 1 or not self.is_used:
            return False
        worst = self.group.all_reduce(np.array([not np.isfinite(loss)], np.float32), op="max", every_step=True)
        return bool(worst[0] > 0)

    @contextlib.contextmanager
    def refused(self, where: str) -> Iterator[None]:
        """Raise ValueError in this block if the model looks at the rows of other ranks, which ``where`` cannot do."""
        self._refused = where
        try:
            with self.micro_step(1.0):
                yield
        finally:
            self._refused = ""

    @contextlib.contextmanager
    def probing(self) -> Iterator[None]:
        """Raise ValueError in this block if the model looks at the rows of other ranks, also if there are none."""
        self.is_probing = True
        try:
            with self.refused("a comparison of losses"):
                yield
        finally:
            self.is_probing = False

    @contextlib.contextmanager
    def micro_step(self, loss_weight: float) -> Iterator[None]:
        """Set the weight of this rank's loss for the forward and backward pass in this block."""
        global _current
        before, _current, self.loss_weight = _current, self, loss_weight
        try:
            yield
        finally:
            _current = before

    def mark_as_used(self) -> None:
        """Record that the model looks at the rows of other ranks; raise ValueError where this does not work."""
        if self._refused:
            raise ValueError(
                "a layer or loss uses the rows of all ranks (SyncBatchNorm, all_gather_with_grad, or a router "
                'loss, which router_loss="local" keeps on its rank); this does not work in '
                f"{self._refused} (rank {self.group.label()})"
            )
        if not self.is_used and not self._are_all_here:
            raise ValueError(
                "the model uses the rows of all ranks now, but did not in the first update (rank "
                f"{self.group.label()}): "
                "a rank without rows would not join the collective. Let the model use them from the "
                "first update on, or "
                "pass batches of dp.make_loader, which know whether all ranks have rows, and drop the last ones "
                '(uneven="drop", dataset_drop_last=True)'
            )
        self.is_used = True

    def sum(self, x: np.ndarray) -> np.ndarray:
        """Return the sum of an array over the ranks that have rows. A collective."""
        self.mark_as_used()
        x = x if self.loss_weight > 0 else np.zeros_like(x)
        return self.group.all_reduce(x, every_step=True)

    def sum_of_gradients(self, gradient: np.ndarray) -> np.ndarray:
        """Return the gradient of this rank's loss and the other ranks' losses, for this rank's rows. A collective."""
        total = self.group.all_reduce(gradient * gradient.dtype.type(self.loss_weight), every_step=True)
        return total / total.dtype.type(self.loss_weight) if self.loss_weight > 0 else np.zeros_like(total)


def batch_across_ranks() -> Optional[BatchAcrossRanks]:
    """Return the rows of all ranks in the current micro-step; None with one rank, and outside of a training step."""
    if _current is None or (_current.group.world_size == 1 and not _current.is_probing):
        return None
    return _current


def all_gather_with_grad(x: Any) -> Any:
    """Return the rows of ``x`` of all ranks in a micro-step, in the order of the data; MindSpore differentiates it.

    The loss that one process computes from all rows trains the same model when it is computed from gathered rows::

        def forward_fn(input_ids, attention_mask, pairs, ...):
            queries, documents = encode(...), encode(...)
            queries, documents = map(dp.all_gather_with_grad, (queries, documents))
            return cross_entropy(queries @ documents.T, arange(len(queries)))   # in-batch negatives

    A loss of this rank's rows, compared with gathered rows, is right as well. All ranks must call it in the same
    order. Ranks may have different numbers of rows, also none. Outside of a step of the Trainer or of
    :func:`~mindnlp_dp.make_train_step`, as in an evaluation, it returns ``x``.

    Args:
        x: float tensor of shape (rows, ...), equal on all ranks but for the number of rows.
    """
    batch = batch_across_ranks()
    return x if batch is None else _AllGatherWithGrad.apply(x, batch)


def all_reduce_with_grad(x: Any) -> Any:
    """Return the sum of ``x`` over the ranks that have rows in this micro-step; outside of a step it returns ``x``."""
    batch = batch_across_ranks()
    return x if batch is None else _AllReduceWithGrad.apply(x, batch)


class _AllGatherWithGrad(_Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, batch: BatchAcrossRanks) -> Tensor:
        batch.mark_as_used()
        ctx.save_for_backward(x)
        mine = to_host(x)
        ctx.batch, ctx.num_rows, ctx.dtype = batch, len(mine), dtype_name(x)
        rows, lengths = gather_rows(mine if batch.loss_weight > 0 else mine[:0], batch.group)
        ctx.first = sum(lengths[: batch.group.rank])
        return from_host(rows, ctx.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        total = ctx.batch.sum_of_gradients(to_host(gradient).astype(np.float32, copy=False))
        mine = total[ctx.first : ctx.first + ctx.num_rows]
        if ctx.batch.loss_weight == 0:
            mine = np.zeros((ctx.num_rows, *total.shape[1:]), np.float32)
        return from_host(np.ascontiguousarray(mine), ctx.dtype), None


class _AllReduceWithGrad(_Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, batch: BatchAcrossRanks) -> Tensor:
        ctx.save_for_backward(x)
        ctx.batch, ctx.dtype = batch, dtype_name(x)
        return from_host(batch.sum(to_host(x)), ctx.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        total = ctx.batch.sum_of_gradients(to_host(gradient).astype(np.float32, copy=False))
        return from_host(total, ctx.dtype), None
