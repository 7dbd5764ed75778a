"""Which parameters a trust ratio, and weight decay, leave alone."""

from __future__ import annotations

from typing import Any


def parameter_groups(model: Any, weight_decay: float) -> list[dict[str, Any]]:
    """A model's trainable parameters in two groups: matrices, and what is neither decayed nor scaled by a trust ratio.

    The second holds biases and the weights of normalization layers, which is every parameter of one dimension: their
    norms say nothing about how far they may go.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trainable if parameter.ndim > 1]
    others = [parameter for parameter in trainable if parameter.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": weight_decay, "use_trust_ratio": True},
        {"params": others, "weight_decay": 0.0, "use_trust_ratio": False},
    ]
    return [group for group in groups if group["params"]]
