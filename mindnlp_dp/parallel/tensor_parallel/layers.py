"""Provides the tensor-parallel layers, whose weights are sharded over ranks; tensor_edits.py puts them into models.

A column-parallel and a row-parallel layer, with a computation between them that works on each shard alone, need one
all-reduce in the forward pass and one in the backward pass (Shoeybi et al., Megatron-LM, 2019, section 3)::

    x ── f ── columns of the first ── activation, or attention heads ── rows of the second ── g ── y
         └ backward: all-reduce                                                 forward: all-reduce ┘
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Optional

import numpy as np
from mindnlp.core import nn
from mindnlp.core.nn import functional
from mindspore import Tensor, from_numpy
from mindspore.common._grad_function import _Function

from mindnlp_dp.communication.autograd_ops import copy_to, reduce_from
from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.kernels.dispatch import supports
from mindnlp_dp.runtime.arrays import read, to_host
from mindnlp_dp.runtime.random_state import SampleShard, ShardOf, rank_local_rng, replicated_rng
from mindnlp_dp.runtime.shard_bounds import shard_bounds


class SharedInput:
    """Applies f once for all layers that read the same tensor, so that their gradients need only one all-reduce.

    Without it, queries, keys and values would need three all-reduces. The copy is released together with the tensor.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._x: Any = lambda: None
        self._copy: Any = None

    def __call__(self, x: Tensor) -> Tensor:
        if self._x() is not x:
            self._x, self._copy = weakref.ref(x, self._forget), copy_to(x, self._group)
        return self._copy

    def _forget(self, reference: Any) -> None:
        if self._x is reference:
            self._copy = None


class ParallelLinear(nn.Module):
    """Base of the parallel linear layers; it holds this rank's shards of the weights of the replaced layer.

    The weight of a ``Conv1D`` (GPT-2) is transposed.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.weight = layer.weight
        self.bias = layer.bias
        self._is_transposed = is_conv1d(layer)

    def product(self, x: Tensor, bias: Optional[Tensor] = None) -> Tensor:
        if not self._is_transposed:
            return functional.linear(x, self.weight, bias)
        y = functional.linear(x, self.weight.T)
        return y if bias is None else add_bias(y, bias)


class ColumnParallelLinear(ParallelLinear):
    """A linear layer from a replicated ``x`` (..., in) to this rank's shard of (..., out)."""

    def __init__(self, layer: Any, shared_input: Callable[[Tensor], Tensor]) -> None:
        super().__init__(layer)
        self._shared_input = shared_input

    def forward(self, x: Tensor) -> Tensor:
        return self.product(self._shared_input(x), self.bias)


class RowParallelLinear(ParallelLinear):
    """A linear layer from this rank's shard of (..., in) to a replicated (..., out); adds the bias after the sum."""

    def __init__(self, layer: Any, group: ProcessGroup) -> None:
        super().__init__(layer)
        self._group = group

    def forward(self, x: Tensor) -> Tensor:
        y = reduce_from(self.product(x), self._group)
        return y if self.bias is None else add_bias(y, self.bias)


def add_bias(y: Tensor, bias: Tensor) -> Tensor:
    """Return ``y + bias``, by this package's kernel where it supports them."""
    if supports(y, bias):
        from mindnlp_dp.kernels import functions

        return functions.add(y, bias)
    return y + bias


class VocabularyParallelEmbedding(nn.Module):
    """An embedding of which each rank has some rows; the other ranks contribute zeros to the sum."""

    def __init__(self, layer: Any, group: ProcessGroup, num_embeddings: int) -> None:
        super().__init__()
        self.weight = layer.weight
        self.num_embeddings, self.embedding_dim = num_embeddings, layer.weight.shape[1]
        bounds = shard_bounds(num_embeddings, group.world_size)
        self._group = group
        self._first, self._last = bounds[group.rank], bounds[group.rank + 1]
        padding = layer.padding_idx
        is_here = padding is not None and self._first <= padding < self._last
        self.padding_idx = padding - self._first if is_here else None

    def forward(self, ids: Tensor) -> Tensor:
        numbers = to_host(ids)
        wrong = numbers[(numbers < 0) | (numbers >= self.num_embeddings)]
        if wrong.size:
            raise IndexError(
                f"an embedding of {self.num_embeddings} rows has no row {int(wrong[0])} (rank {self._group.label()})"
            )
        here = (numbers >= self._first) & (numbers < self._last)
        rows = np.where(here, numbers - self._first, 0).astype(np.int64)
        part = functional.embedding(from_numpy(rows), self.weight, self.padding_idx)
        return reduce_from(part * from_numpy(here[..., None].astype(np.float32)).astype(part.dtype), self._group)


class RankLocalDropout:
    """Wraps the forward pass of a module on sharded tensors, so that each rank draws its shard's random numbers in it.

    The tensors are sharded by attention heads (``heads``, by default over ``group``), or, if ``module`` is a dropout of
    (batch, length, width), by width over ``group``. An adapter's dropout is always ``by_width``, also of
    (tokens, width).
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        group: ProcessGroup,
        is_dropout: bool,
        *,
        heads: Optional[SampleShard] = None,
        by_width: bool = False,
    ) -> None:
        functools.update_wrapper(self, forward)
        self._forward = forward
        self._group = group
        self._heads = heads or SampleShard(group.rank, group.rank + 1, group.world_size)
        self._is_dropout, self._by_width = is_dropout, by_width
        self._of_width = functools.lru_cache(self._shard_of_width)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        by_width = self._by_width or (self._is_dropout and args and args[0].ndim == 3)
        shard = self._of_width(args[0].shape[-1]) if by_width else self._heads
        with rank_local_rng(self._group.rank if by_width else shard.first, shard):
            return self._forward(*args, **kwargs)

    def _shard_of_width(self, width: int) -> SampleShard:
        """Return this rank's shard of the last dimension; ranks' widths may differ. A collective."""
        bounds = np.cumsum([0, *(int(each[0]) for each in self._group.all_gather(np.array([width])))]).tolist()
        return SampleShard(bounds[self._group.rank], bounds[self._group.rank + 1], bounds[-1], ShardOf.WIDTH)


class ReplicatedDropout:
    """Wraps the forward pass of a dropout on replicated tensors, within a module that RankLocalDropout wraps."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, forward)
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with replicated_rng():
            return self._forward(*args, **kwargs)


def is_conv1d(layer: Any) -> bool:
    """Return whether a layer stores its weight as (in, out), as GPT-2's layers do."""
    return type(layer).__name__ == "Conv1D"


def vocabulary_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, group: ProcessGroup, num_classes: int, ignore_index: int = -100
) -> Tensor:
    """Return the mean cross-entropy of logits (N, C), sharded by columns, and labels (N,).

    It needs two all-reduces, of N and 2 N numbers; the logits are not gathered. Rows with the label ``ignore_index``
    do not count; if no row counts, the mean is NaN.

    Raises:
        ValueError: a label is not in ``range(num_classes)``.
    """
    classes = to_host(labels).reshape(-1).astype(np.int64)
    counted = classes != ignore_index
    wrong = classes[counted & ((classes < 0) | (classes >= num_classes))]
    if wrong.size:
        raise ValueError(
            f"a class is from 0 to {num_classes - 1}, or {ignore_index} where it is ignored; got {int(wrong[0])} (rank "
            f"{group.label()})"
        )
    first = shard_bounds(num_classes, group.world_size)[group.rank]
    return _CrossEntropy.apply(logits, np.where(counted, classes - first, -1), counted, group)


class _CrossEntropy(_Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, places: np.ndarray, counted: np.ndarray, group: ProcessGroup) -> Tensor:
        x = read(logits).astype(np.float32, copy=False)
        rows = np.flatnonzero((places >= 0) & (places < x.shape[1]) & counted)
        largest = group.all_reduce(x.max(axis=1), op="max", every_step=True)
        powers = np.exp(x - largest[:, None])
        sums = np.zeros((2, len(x)), np.float32)
        sums[0] = powers.sum(axis=1)
        sums[1, rows] = x[rows, places[rows]]
        totals, chosen = group.all_reduce(sums, every_step=True)
        powers /= totals[:, None]
        num_counted = np.float32(counted.sum())
        ctx.saved = powers, rows, places[rows], counted, num_counted, logits.dtype
        with np.errstate(invalid="ignore"):
            mean = np.where(counted, np.log(totals) + largest - chosen, 0).sum(dtype=np.float64) / num_counted
        return Tensor(np.float32(mean))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        powers, rows, places, counted, num_counted, dtype = ctx.saved
        # Copy, because the graph may be differentiated again.
        x = powers.copy()
        x[rows, places] -= 1
        x *= np.where(counted, read(gradient) / num_counted, 0).astype(np.float32)[:, None]
        return from_numpy(x).astype(dtype), None, None, None
