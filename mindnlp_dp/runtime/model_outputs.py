"""Puts a loss that was computed elsewhere into the outputs of a MindNLP language model."""

from __future__ import annotations

from typing import Any, Optional


def outputs_with_loss(
    model: Any, outputs: Any, loss: Optional[Any], *, has_logits: bool, return_dict: Optional[bool]
) -> Any:
    """Return a model's outputs with this loss, plus the router loss of a mixture of experts if it has one.

    Args:
        model: the model.
        outputs: its outputs without a loss, as a ``ModelOutput``.
        loss: the loss of the output layer; None if there are no labels.
        has_logits: whether the outputs keep their logits.
        return_dict: what the caller asked for; None: the model's setting.
    """
    if loss is not None:
        auxiliary = getattr(outputs, "aux_loss", None)
        if auxiliary is not None:
            loss = loss + model.router_aux_loss_coef * auxiliary
        kept = {name: value for name, value in outputs.items() if name != "logits" or has_logits}
        outputs = type(outputs)(**{**kept, "loss": loss})
    is_dict = return_dict or (return_dict is None and model.config.use_return_dict)
    return outputs if is_dict else outputs.to_tuple()
