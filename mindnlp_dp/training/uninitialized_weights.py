"""This module checks that weights have values before training; the Trainers and make_train_step call it once."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.runtime.arrays import is_uninitialized, to_host

# The number of names that a message shows.
_SHOWN = 3

# Layers that are zero at first on purpose: PEFT's adapters, relative position tables, deformable attention offsets, ...
_ZERO_LAYERS = (
    "lora_", "hada_", "lokr_", "adapter", "relative_position", "position_embed", "time_embed", "sampling_offsets",
    "attention_weights", "layer_scale", "grn.",
)  # fmt: skip

# ... and parameters that are not a layer's weight: learned tokens and embeddings, scales, multi-dimensional biases.
_ZERO_PARAMETERS = ("token", "embed", "bias", "scale", "gamma", "beta")


def check_values(weights: Sequence[tuple[str, Any]], group: ProcessGroup) -> None:
    """Check the trainable matrices before the first update; other weights are skipped. A collective.

    The main rank warns of a matrix that is all zero without a known reason: the layers before it would learn nothing.

    Raises:
        ValueError: Raised on every rank if a matrix on any rank has no memory yet; names the matrix.
    """
    matrices = [(name, w) for name, w in weights if len(w.shape) > 1 and getattr(w, "requires_grad", True)]
    group.run_on(True, lambda: _check_memory(matrices, group), "looking at the weights")
    mine = [name for name, w in matrices if is_zero_by_mistake(name, w)]
    # Each rank's names are in model order; pipeline stages have different names, so the ranks' lists are joined.
    zero = list(dict.fromkeys(name for theirs in group.all_gather_object(mine) for name in theirs))
    if zero and group.is_main:
        more = f" and {len(zero) - _SHOWN} more" if len(zero) > _SHOWN else ""
        warnings.warn(
            f"trainable weights are all zero: {', '.join(map(repr, zero[:_SHOWN]))}{more}. If this is not intended, "
            "these weights were not initialized, and the layers before them learn nothing",
            RuntimeWarning,
            stacklevel=2,
        )


def _check_memory(matrices: Sequence[tuple[str, Any]], group: ProcessGroup) -> None:
    for name, weight in matrices:
        if is_uninitialized(weight):
            raise ValueError(
                f"{name!r} of shape {tuple(weight.shape)} was never initialized (rank {group.label()}): MindSpore's "
                "initializer(...) gives a tensor that has no memory before its init_data() is called; assign "
                "initializer(...).init_data()"
            )


def is_zero_by_mistake(name: str, weight: Any) -> bool:
    """Return whether a weight is all zero and its name does not belong to a layer that is zero at first on purpose."""
    own_name = name.rpartition(".")[2]
    if any(part in name for part in _ZERO_LAYERS):
        return False
    if "weight" not in own_name and any(part in own_name for part in _ZERO_PARAMETERS):
        return False
    # The first elements decide for most weights, without a read of the rest.
    array = to_host(weight).reshape(-1)
    return array.size > 0 and not array[:1024].any() and not array.any()
