"""Computes the loss of a language model whose logits are sharded: by words (the axis "tp"), by tokens ("sp"), or both.

Full logits would take the memory that is saved by sharding them, so in training with labels no rank has them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Optional, Protocol, runtime_checkable

import numpy as np
from mindnlp.core import nn
from mindnlp.core.nn import functional
from mindspore import Tensor, from_numpy

from mindnlp_dp.communication.autograd_ops import all_reduce, gather_from
from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.parallel.device_mesh import DeviceMesh
from mindnlp_dp.parallel.model_edits import Edit, ModelIndex
from mindnlp_dp.parallel.parallel_plan import TensorPlan, first_match
from mindnlp_dp.parallel.sequence_parallel.token_shards import SequenceShards
from mindnlp_dp.parallel.tensor_parallel.layers import vocabulary_parallel_cross_entropy
from mindnlp_dp.runtime.adapters import base_model
from mindnlp_dp.runtime.arrays import to_host
from mindnlp_dp.runtime.model_outputs import outputs_with_loss


def sharded_head_edits(
    index: ModelIndex, plan: TensorPlan, mesh: DeviceMesh, shards: Optional[SequenceShards]
) -> list[Edit]:
    """Return the edits of the output layer and the loss of a language model; none for the other models."""
    heads = [
        name
        for name, module in index.unique()
        if first_match(plan.layers, name) == "vocab_parallel" and not isinstance(module, nn.Embedding)
    ]
    if plan.head is None or not heads:
        return []
    path, model = base_model(index.model)
    edits = [Edit((path,), forward=functools.partial(ShardedHead, model, mesh.group("tp"), shards, plan.head))]
    if shards is not None:
        edits += [Edit((name,), forward=functools.partial(_OfOwnTokens, shards)) for name in heads]
    return edits


@runtime_checkable
class FusedLoss(Protocol):
    """The forward pass of a model whose output layer and loss are one operator (training/fused_cross_entropy.py)."""

    @property
    def is_used(self) -> bool: ...

    def without_head(self, *args: Any, **kwargs: Any) -> Any: ...

    def mean(self, hidden: Any, labels: np.ndarray) -> Any: ...


class ShardedHead:
    """Replaces the forward pass of a language model; computes the loss from sharded logits.

    In training with labels the output has no logits. Without labels or in evaluation, the output has full logits.

    Args:
        model: the language model.
        group: the tensor-parallel group, over which the columns of the logits are sharded.
        shards: how their rows are sharded; None if every rank has those of all tokens.
        kind: which label belongs to which logits: "masked" (same token), "causal" (next token) or "seq2seq" (same
            token; labels are also the decoder's inputs).
        forward: its original forward pass.
    """

    def __init__(
        self,
        model: Any,
        group: ProcessGroup,
        shards: Optional[SequenceShards],
        kind: str,
        forward: Callable[..., Any],
    ) -> None:
        # Keep the signature, which is read, for example, to find the columns that the model uses.
        functools.update_wrapper(self, forward)
        self._model = model
        self._forward = forward
        self._group = group
        self._shards = shards
        self._kind = kind

    def __call__(self, *args: Any, labels: Optional[Tensor] = None, **kwargs: Any) -> Any:
        inputs = kwargs.get("decoder_input_ids", kwargs.get("decoder_inputs_embeds"))
        if self._kind == "seq2seq" and labels is not None and inputs is None:
            kwargs["decoder_input_ids"] = self._model._shift_right(labels)
        is_training = labels is not None and self._model.training
        forward, mean = self._forward, self._mean
        has_local_logits: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._shards is not None and is_training:
            has_local_logits = self._shards.local_logits()
            if isinstance(forward, FusedLoss) and forward.is_used:
                forward, mean = forward.without_head, forward.mean
        with has_local_logits:
            outputs = forward(*args, **{**kwargs, "return_dict": True})
        logits = outputs.logits
        if not is_training:
            # Gathered by a differentiable operator: a custom loss, such as label smoothing, may use the logits.
            outputs["logits"] = gather_from(logits, self._group)
        loss = None
        if labels is not None:
            shards = self._shards if is_training else None
            if shards is None and self._kind == "causal":
                logits, labels = logits[:, :-1], labels[:, 1:]
            loss = mean(logits, labels) if shards is None else self._mean_over_tokens(mean, logits, labels, shards)
        return outputs_with_loss(
            self._model, outputs, loss, has_logits=not self._model.training, return_dict=kwargs.get("return_dict")
        )

    def _mean(self, logits: Tensor, labels: Any) -> Tensor:
        labels = from_numpy(labels) if isinstance(labels, np.ndarray) else labels
        logits, labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
        if self._group.world_size == 1:
            return functional.cross_entropy(logits, labels)
        return vocabulary_parallel_cross_entropy(logits, labels, self._group, self._model.config.vocab_size)

    def _mean_over_tokens(
        self, mean: Callable[[Tensor, Any], Tensor], logits: Tensor, labels: Tensor, shards: SequenceShards
    ) -> Tensor:
        """Return the mean loss of all ranks' tokens, from the logits of this rank's. A collective."""
        classes = to_host(labels)
        if self._kind == "causal":
            # The label of a rank's last token is the next rank's first token: shift before they are split.
            classes = np.concatenate([classes[:, 1:], np.full_like(classes[:, :1], -100)], 1)
        first, last = shards.bounds[shards.group.rank :][:2]
        own = np.ascontiguousarray(classes[:, first:last])
        total, counted = (float((each != -100).sum()) for each in (classes, own))
        # The mean of no labels would be NaN, and its gradient, too.
        share = mean(logits, own) * (counted / total) if counted else logits.sum() * 0.0
        return all_reduce(share, shards.group)


class _OfOwnTokens:
    """Replaces the forward pass of the output layer: in training with labels, it computes this rank's tokens only."""

    def __init__(self, shards: SequenceShards, forward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, forward)
        self._shards, self._forward = shards, forward

    def __call__(self, x: Tensor) -> Tensor:
        return self._forward(self._shards.split(x) if self._shards.has_local_logits else x)
