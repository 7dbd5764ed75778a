"""Distributes the experts of mixture-of-experts blocks over the ranks of the axis "ep"; parallelize calls it.

Each block is replaced by one that has only this rank's experts. Ranks send their tokens to the ranks of the chosen
experts by all-to-all (Lepikhin et al., GShard, 2020). Unlike GShard, the experts have no capacity limit, so no token is
dropped and the result is that of one process::

    tokens ── router ── sorted by expert ── all-to-all ── experts ── all-to-all ── weighted sum
                                            rows there               rows back

Each rank of this axis has different samples, and their losses may have different weights in the mean. Therefore
gradients are multiplied by their rank's weight on the way to an expert, and divided by it on the way back. An expert
gets the weighted mean of the gradients of its row (the ranks of its group), as if one rank had had all the samples.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import mindspore
import numpy as np
from mindnlp.core import nn, ops
from mindnlp.core.nn import functional
from mindspore import Tensor, from_numpy
from mindspore.common._grad_function import _Function

from mindnlp_dp.communication.autograd_ops import all_to_all
from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.parallel.model_edits import Edit, ModelIndex, PPMissingLayer
from mindnlp_dp.parallel.parallel_plan import ExpertPlan
from mindnlp_dp.parallel.placement import Placements
from mindnlp_dp.parallel.row_loss_weights import RowLossWeights
from mindnlp_dp.runtime.adapters import lora_layers
from mindnlp_dp.runtime.arrays import read


@dataclass(frozen=True)
class ExpertLoad:
    """The number of tokens that each expert of a block got in one forward pass, from all ranks of the row.

    Attributes:
        tokens: number of tokens for each expert.
        balance: maximum over mean of ``tokens``; 1 is balanced. It is also the smallest capacity factor that would
            drop no token.
    """

    tokens: tuple[int, ...]

    @property
    def balance(self) -> float:
        return max(self.tokens) * len(self.tokens) / max(sum(self.tokens), 1)


class ExpertParallelBlock(nn.Module):
    """Replaces ``block`` with only the experts of this rank: of E experts on N ranks, rank r has E/N, from r E/N on.

    Attributes:
        load: the expert load of the last forward pass.
    """

    load: ExpertLoad

    def __init__(self, block: Any, group: ProcessGroup, weights: RowLossWeights, norm_topk: bool) -> None:
        super().__init__()
        for name, module in block._modules.items():
            setattr(self, name, module)
        self._group = group
        self._weights = weights
        self._norm_topk = norm_topk
        self._num_experts, self._top_k = block.num_experts, block.top_k
        self._jitter = getattr(block, "jitter_noise", 0.0)
        self._first = group.rank * self._num_experts // group.world_size

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        shape = hidden_states.shape
        if self.training and self._jitter > 0:
            noise = ops.empty_like(hidden_states).uniform_(1.0 - self._jitter, 1.0 + self._jitter)
            hidden_states = hidden_states * noise
        tokens = hidden_states.reshape(-1, shape[-1])
        router_logits = self.gate(tokens)
        weights, chosen = ops.topk(functional.softmax(router_logits, dim=1), self._top_k, dim=-1)
        if self._norm_topk:
            weights = weights / ops.sum(weights, dim=-1, keepdim=True)
        mixed = self._through_experts(tokens, read(chosen).reshape(-1), weights.to(tokens.dtype))
        if hasattr(self, "shared_expert"):
            mixed = mixed + functional.sigmoid(self.shared_expert_gate(tokens)) * self.shared_expert(tokens)
        return mixed.reshape(shape), router_logits

    def _through_experts(self, tokens: Tensor, chosen: np.ndarray, weights: Tensor) -> Tensor:
        group, share = self._group, self._weights.share(("ep",))
        order = np.argsort(chosen, kind="stable")
        mine = np.bincount(chosen, minlength=self._num_experts)
        # counts[i, j, e] tokens go from rank i to expert e of rank j.
        counts = np.array(group.all_gather(mine)).reshape(group.world_size, group.world_size, -1)
        self.load = ExpertLoad(tuple(counts.reshape(group.world_size, -1).sum(axis=0).tolist()))
        sent, received = counts[group.rank].sum(axis=1).tolist(), counts[:, group.rank].sum(axis=1).tolist()
        rows = _taken(tokens, order // self._top_k)
        rows = all_to_all(_scale_gradient(rows, 1 / share if share else 0.0), group, sent, received)
        rows = self._compute(rows, counts[:, group.rank])
        rows = _scale_gradient(all_to_all(rows, group, received, sent), share)
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        by_token = _taken(rows, places).reshape(-1, self._top_k, tokens.shape[-1])
        return (by_token * weights[..., None]).sum(1)

    def _compute(self, rows: Tensor, counts: np.ndarray) -> Tensor:
        """Run this rank's experts on rows that are sorted by sending rank and then by expert, as ``counts`` is."""
        experts_of_rows = np.concatenate([np.repeat(np.arange(len(of_rank)), of_rank) for of_rank in counts])
        order = np.argsort(experts_of_rows, kind="stable")
        by_expert = _taken(rows, order)
        outputs, begin = [], 0
        for number, count in enumerate(counts.sum(axis=0).tolist()):
            if count:
                expert = self.experts[self._first + number]
                outputs.append(expert(by_expert[begin : begin + count]))
            begin += count
        if not outputs:
            # An expert runs on every rank, so that ranks make the same collectives in the same order in the backward
            # pass, too.
            return _WithGraphOf.apply(rows, self.experts[self._first](_RowOfZeros.apply(rows)))
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        return _taken(ops.cat(outputs, 0), places)


def expert_parallel_edits(
    index: ModelIndex, plan: ExpertPlan, placements: Placements, weights: RowLossWeights
) -> list[Edit]:
    """Return the edits that keep only this rank's experts; the new blocks read the loss weights of their row.

    Raises:
        ValueError: the plan matches no block, or ep does not divide the number of experts, or they have adapters.
    """
    mesh = placements.mesh
    group, size = mesh.group("ep"), mesh.sizes["ep"]
    edits: list[Edit] = []
    for name, block in index.unique():
        if not (fnmatchcase(name, plan.blocks) and hasattr(block, "experts")):
            continue
        if block.num_experts % size:
            raise ValueError(f"{name} has {block.num_experts} experts, which ep={size} does not divide")
        if adapter := next((inside for inside, _ in lora_layers(block)), None):
            raise ValueError(
                f"{name}.{adapter} has LoRA adapters, which ep does not support within experts; leave it out"
            )
        per_rank = block.num_experts // size
        for number in range(block.num_experts):
            path, owner = f"{name}.experts.{number}", number // per_rank
            placed = {f"{path}.{n}": {"expert_rank": owner} for n, _ in index.modules[path].named_parameters()}
            edits.append(Edit((path,), None if owner == mesh.index("ep") else PPMissingLayer(), placements=placed))
        norm = getattr(block, "norm_topk_prob", True) if plan.norm_topk is None else plan.norm_topk
        new = functools.partial(ExpertParallelBlock, group=group, weights=weights, norm_topk=norm)
        edits.append(Edit(index.names_of(block), new))
    if not edits:
        raise ValueError(f"the plan for experts fits no block of {type(index.model).__name__}: {plan.blocks}")
    return edits


def _taken(x: Tensor, rows: np.ndarray) -> Tensor:
    """Return the given rows of ``x``, by an embedding operator, whose gradient adds up repeated rows."""
    if len(rows) == 0:
        return x[:0]
    return functional.embedding(from_numpy(rows.astype(np.int64)), x)


class _RowOfZeros(_Function):
    """Returns a row of zeros in place of none; it depends on them, so that an operator on it has a backward pass."""

    @staticmethod
    def forward(ctx: Any, none: Tensor) -> Tensor:
        row = mindspore.ops.zeros((1, none.shape[-1]), none.dtype)
        ctx.none = row[:0]
        return row

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.none


class _WithGraphOf(_Function):
    """Returns the first tensor; the second one, whose gradient is zero, has been computed for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, unused: Tensor) -> Tensor:
        ctx.unused = unused.shape, unused.dtype
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, mindspore.ops.zeros(*ctx.unused)


def _scale_gradient(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else _ScaleGradient.apply(x, factor)


class _ScaleGradient(_Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.factor, None
