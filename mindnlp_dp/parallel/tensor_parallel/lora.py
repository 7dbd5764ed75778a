"""Shards layers with LoRA adapters over the ranks of the axis "tp"; tensor_edits.py calls it.

Of the two matrices of an adapter one is sharded as its layer is, and each rank has the other one in full.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from mindnlp.core import nn

from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.parallel.model_edits import Edit
from mindnlp_dp.parallel.tensor_parallel.layers import RankLocalDropout, ReplicatedDropout


def check_no_adapters(name: str, module: Any) -> None:
    """Raise ValueError if a layer that is sharded has adapters of another kind than LoRA."""
    if hasattr(module, "modules_to_save"):
        raise ValueError(
            f"{name} is trained in full (modules_to_save of its PEFT configuration), which tp does not support; add it "
            "to target_modules"
        )
    if hasattr(module, "base_layer"):
        raise ValueError(f"{name} has adapters of the class {type(module).__name__}; tp shards those of LoRA only")


def lora_styles(name: str, layer: Any, style: str) -> dict[str, str]:
    """Return the styles of the base layer and of one adapter matrix, if the layer has this style.

    ``B @ A`` is added to a weight: where its rows (outputs) are sharded, so are those of B, and where its columns are,
    so are those of A.
    """
    _check_lora(name, layer)
    matrix = "lora_A" if style == "rowwise" else "lora_B"
    return {f"{name}.base_layer": style, **{f"{name}.{matrix}.{adapter}": style for adapter in layer.lora_A}}


def _check_lora(name: str, layer: Any) -> None:
    if len(layer.lora_embedding_A):
        raise ValueError(f"{name} is an embedding with LoRA adapters, which tp does not support; leave it out")
    if any(getattr(layer, "use_dora", {}).values()):
        raise ValueError(f"{name} has adapters of DoRA, whose norms tp does not support; set use_dora=False")


def dropouts_of_adapters(loras: Mapping[str, Any], styles: Mapping[str, str], group: ProcessGroup) -> list[Edit]:
    """Return edits for the dropout of adapters, whose input is sharded if the base layer is sharded by its inputs."""
    edits = []
    for name, layer in loras.items():
        style = styles.get(f"{name}.base_layer")
        for adapter, module in layer.lora_dropout.items():
            if style is not None and isinstance(module, nn.Dropout):
                sharded = functools.partial(RankLocalDropout, group=group, is_dropout=True, by_width=True)
                forward = sharded if style == "rowwise" else ReplicatedDropout
                edits.append(Edit((f"{name}.lora_dropout.{adapter}",), forward=forward))
    return edits
