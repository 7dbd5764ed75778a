"""Lets a causal language model compute its loss without the logits of all tokens at a time.

The user calls :func:`fuse_cross_entropy`, or passes ``fused_cross_entropy=True`` to a Trainer's arguments. In training
with labels, the output layer and the loss are one operator (kernels/linear_cross_entropy.py), and the outputs have no
logits. Otherwise the model computes what it did.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Optional

import numpy as np

from mindnlp_dp.data.loss_weight import Task, loss_mean
from mindnlp_dp.kernels.dispatch import supports
from mindnlp_dp.runtime.adapters import base_model
from mindnlp_dp.runtime.arrays import to_host
from mindnlp_dp.runtime.model_outputs import outputs_with_loss
from mindnlp_dp.runtime.versions import mindnlp_series

# Model types whose logits are the output layer's, and whose loss is the mean over the next tokens.
_MODEL_TYPES = ("gpt2", "llama", "qwen2", "mistral", "gemma", "phi", "opt", "mixtral", "qwen2_moe")


def fuse_cross_entropy(model: Any) -> None:
    """Fuse the output layer and the loss of a causal language model of MindNLP 0.4, with or without LoRA adapters.

    Call it before :func:`~mindnlp_dp.parallelize`. With the axis "tp", which shards the logits by words, it changes
    nothing. A second call changes nothing. On a device, or with MindSpore's kernels, the model computes its
    loss as before.

    Raises:
        ValueError: the model is another one, is sharded already, or its output layer has adapters.
    """
    inner = base_model(model)[1]
    parallel = getattr(model, "parallel", None)
    if getattr(inner, "has_fused_loss", False) or (parallel is not None and parallel.mesh.sizes["tp"] > 1):
        return
    kind = getattr(getattr(inner, "config", None), "model_type", None)
    mean = loss_mean(inner)
    if mindnlp_series() != "0.4" or kind not in _MODEL_TYPES or mean is None or mean.task is not Task.CAUSAL_LM:
        raise ValueError(
            "fused_cross_entropy is for the causal language models of MindNLP 0.4 of the types "
            f"{', '.join(_MODEL_TYPES)}; got a {type(inner).__name__} ({kind})"
        )
    if parallel is not None:
        raise ValueError("fuse_cross_entropy(model) comes before parallelize(model)")
    if getattr(inner.config, "pretraining_tp", 1) > 1:
        raise ValueError("fused_cross_entropy does not support pretraining_tp, which splits the output layer")
    head = inner.get_output_embeddings()
    if type(head).__name__ != "Linear" or hasattr(head, "base_layer"):
        raise ValueError(
            f"fused_cross_entropy needs a linear output layer without adapters, got a {type(head).__name__}"
        )
    head.forward = skipped = _SkippedHead(head.forward)
    inner.forward, inner.has_fused_loss = _FusedLoss(inner, inner.forward, head, skipped), True


class _SkippedHead:
    """Replaces the forward pass of the output layer; returns the layer's input while ``is_skipped``."""

    def __init__(self, forward: Callable[[Any], Any]) -> None:
        functools.update_wrapper(self, forward)
        self._forward = forward
        self.is_skipped = False

    def __call__(self, x: Any) -> Any:
        return x if self.is_skipped else self._forward(x)


class _FusedLoss:
    """Replaces the forward pass of a language model, and keeps its signature."""

    def __init__(self, model: Any, forward: Callable[..., Any], head: Any, skipped: _SkippedHead) -> None:
        functools.update_wrapper(self, forward)
        self._model, self._forward, self._head, self._skipped = model, forward, head, skipped

    def __call__(self, *args: Any, labels: Optional[Any] = None, **kwargs: Any) -> Any:
        if labels is None or not self._model.training or not self.is_used:
            return self._forward(*args, labels=labels, **kwargs)
        outputs = self.without_head(*args, **{**kwargs, "return_dict": True})
        loss = self.mean(outputs.logits[:, :-1], to_host(labels)[:, 1:])
        return outputs_with_loss(self._model, outputs, loss, has_logits=False, return_dict=kwargs.get("return_dict"))

    @property
    def is_used(self) -> bool:
        # With tp, another layer has taken the head's place.
        return self._model.get_output_embeddings() is self._head and supports(self._head.weight)

    def without_head(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's outputs without a loss; in place of its logits, the input of the output layer."""
        self._skipped.is_skipped = True
        try:
            return self._forward(*args, **kwargs)
        finally:
            self._skipped.is_skipped = False

    def mean(self, hidden: Any, labels: np.ndarray) -> Any:
        """Return the mean loss of tokens, from the input of the output layer (batch, tokens, width) and their labels.

        Raises:
            ValueError: a label is not a word.
        """
        from mindnlp_dp.kernels.functions import linear_cross_entropy

        head, classes = self._head, labels.reshape(-1).astype(np.int64)
        num_classes = head.weight.shape[0]
        wrong = classes[(classes != -100) & ((classes < 0) | (classes >= num_classes))]
        if wrong.size:
            raise ValueError(
                f"a label is from 0 to {num_classes - 1}, or -100 where it is ignored; got {int(wrong[0])}"
            )
        return linear_cross_entropy(
            hidden.reshape(-1, hidden.shape[-1]), head.weight, getattr(head, "bias", None), classes,
            is_frozen=not head.weight.requires_grad,
        )  # fmt: skip
