"""This module separates the parameters that LARS and LAMB decay and scale from those that they do not."""

from __future__ import annotations

from typing import Any


def parameter_groups(model: Any, weight_decay: float) -> list[dict[str, Any]]:
    """Return a model's trainable parameters in two groups: those with weight decay and trust ratio, and those without.

    The second group holds the parameters of at most one dimension, which are biases and the weights of normalization
    layers: their norms say nothing about a good step size.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # A shard may be flat: what it is a shard of counts.
    matrices = [p for p in trainable if len(getattr(p, "full_shape", p.shape)) > 1]
    others = [p for p in trainable if len(getattr(p, "full_shape", p.shape)) <= 1]
    groups = [
        {"params": matrices, "weight_decay": weight_decay, "use_trust_ratio": True},
        {"params": others, "weight_decay": 0.0, "use_trust_ratio": False},
    ]
    return [group for group in groups if group["params"]]
