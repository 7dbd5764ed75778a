"""Plans tensor parallelism: edits that replace layers by parallel layers for the ranks of the axis "tp".

:func:`~mindnlp_dp.parallelize` calls it. The edits change the structure of the model (layers of layers.py) and say how
each weight is sharded; the weights are sharded later.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from mindnlp.core import nn

from mindnlp_dp.communication.autograd_ops import gather_from
from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.parallel.device_mesh import DeviceMesh
from mindnlp_dp.parallel.model_edits import Edit, ModelIndex
from mindnlp_dp.parallel.parallel_plan import STYLES, TensorPlan, check_patterns, first_match, num_packed
from mindnlp_dp.parallel.placement import Placements
from mindnlp_dp.parallel.tensor_parallel.layers import (
    ColumnParallelLinear,
    RankLocalDropout,
    RowParallelLinear,
    SharedInput,
    VocabularyParallelEmbedding,
    is_conv1d,
)
from mindnlp_dp.parallel.tensor_parallel.lora import check_no_adapters, dropouts_of_adapters, lora_styles
from mindnlp_dp.runtime.adapters import is_lora
from mindnlp_dp.runtime.random_state import SampleShard
from mindnlp_dp.runtime.sharded_array import Shard


class GatheredHead(ColumnParallelLinear):
    """An output layer that is sharded by vocabulary but returns full logits, from which the model computes its loss."""

    def __init__(self, layer: Any, group: ProcessGroup) -> None:
        super().__init__(layer, SharedInput(group))
        self._group = group

    def forward(self, x: Any) -> Any:
        return gather_from(super().forward(x), self._group)


def tensor_parallel_edits(index: ModelIndex, plan: TensorPlan, placements: Placements) -> list[Edit]:
    """Return the edits that replace layers by parallel layers, and shard their weights over the axis "tp".

    Raises:
        ValueError: a pattern of the plan fits no module, or the plan shards one weight in two ways, or tp does not
            divide the number of heads, or a weight cannot be split over the ranks.
    """
    group = placements.mesh.group("tp")
    loras = {name: module for name, module in index.modules.items() if is_lora(module)}
    # What is within a layer with adapters follows from the layer's style.
    within = tuple(f"{name}." for name in loras)
    names = [name for name in index.modules if not name.startswith(within)] if within else list(index.modules)
    check_patterns(plan.patterns(), names, "tensor parallelism")
    styles = _styles(index, plan, loras)
    edits = [
        Edit((name,), attributes=per_rank_attributes)
        for name, per_rank_attributes in _per_rank_sizes(index, plan, group)
    ]
    shards = _shards(index, styles, placements)
    inputs: dict[str, SharedInput] = {}
    for name, module in index.unique():
        if name not in styles:
            continue
        # The layer within a layer with adapters has the siblings of that layer.
        siblings = inputs.setdefault(name.removesuffix(".base_layer").rpartition(".")[0], SharedInput(group))
        own = {f"{name}.{kind}": {"shard": shards[f"{name}.{kind}"]} for kind in _sharded_kinds(styles[name], module)}
        new: Any = functools.partial(ColumnParallelLinear, shared_input=siblings)
        if styles[name] == "rowwise":
            new = functools.partial(RowParallelLinear, group=group)
        elif isinstance(module, nn.Embedding):
            # A table by columns remains an embedding; its rows are those of all ranks.
            new = None
            if styles[name] == "vocab_parallel":
                num_embeddings = placements[f"{name}.weight"].shape[0]
                new = functools.partial(VocabularyParallelEmbedding, group=group, num_embeddings=num_embeddings)
        elif styles[name] == "vocab_parallel" and plan.head is None:
            new = functools.partial(GatheredHead, group=group)
        edits.append(Edit(index.names_of(module), module=new, placements=own))
    dropouts = dropouts_of_adapters(loras, styles, group)
    if dropouts and placements.mesh.sizes["sp"] > 1:
        raise ValueError("tp and sp together do not support the dropout of adapters; set lora_dropout=0")
    return edits + dropouts


def rank_local_dropouts(index: ModelIndex, plan: TensorPlan, mesh: DeviceMesh) -> list[Edit]:
    """Return edits for the modules in which ranks draw their shard's numbers: of heads over "tp" and then "sp"."""
    number, edits = mesh.index("tp") * mesh.sizes["sp"] + mesh.index("sp"), []
    heads = SampleShard(number, number + 1, mesh.sizes["tp"] * mesh.sizes["sp"])
    for name, module in index.unique():
        if any(fnmatchcase(name, pattern) for pattern in plan.sharded_dropout):
            is_dropout = isinstance(module, nn.Dropout)
            forward = functools.partial(RankLocalDropout, group=mesh.group("tp"), is_dropout=is_dropout, heads=heads)
            edits.append(Edit((name,), forward=forward))
    return edits


def _styles(index: ModelIndex, plan: TensorPlan, loras: Mapping[str, Any]) -> dict[str, str]:
    """Return the style of each sharded layer; in a layer with adapters, those of lora.py."""
    styles = {}
    for name, module in index.modules.items():
        style = first_match(plan.layers, name)
        if style is None or any(name.startswith(f"{layer}.") for layer in loras):
            continue
        if name in loras:
            styles.update(lora_styles(name, module, style))
        else:
            check_no_adapters(name, module)
            styles[name] = style
    return styles


def _per_rank_sizes(index: ModelIndex, plan: TensorPlan, group: ProcessGroup) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield the modules with attributes that each rank has a part of, such as the number of heads, and their values."""
    for name, module in index.unique():
        sizes = {
            attribute: getattr(module, attribute) for attribute in first_match(plan.per_rank_attributes, name) or ()
        }
        for attribute, size in sizes.items():
            if size % group.world_size:
                raise ValueError(
                    f"{attribute} of {name} is {size}, which tp={group.world_size} does not divide; choose a tp that "
                    "divides the number of heads, or shard the model by pp or its samples by dp"
                )
        if sizes:
            yield name, {attribute: size // group.world_size for attribute, size in sizes.items()}


def _shards(index: ModelIndex, styles: Mapping[str, str], placements: Placements) -> dict[str, Shard]:
    """Return how each weight of these modules is sharded, by each of its names."""
    shards: dict[str, Shard] = {}
    of_weight: dict[str, Shard] = {}
    size_of_tp = placements.mesh.sizes["tp"]
    for name, style in styles.items():
        module = index.modules[name]
        weight = getattr(module, "weight", None)
        is_table = isinstance(module, nn.Embedding)
        if weight is None or len(weight.shape) != 2 or (is_table and style not in ("vocab_parallel", "colwise")):
            raise ValueError(
                f"{name} is to be sharded as {style!r}, and is a {type(module).__name__}; expected {STYLES[style]}"
                if style in STYLES
                else f"{name} is to be sharded as {style!r}, and is a {type(module).__name__}; expected a linear layer"
            )
        num_blocks = num_packed(style)
        dim = int(style == "colwise") if is_table else int((style == "rowwise") != is_conv1d(module))
        for kind in _sharded_kinds(style, module):
            placement = placements[f"{name}.{kind}"]
            shard = shards[f"{name}.{kind}"] = Shard(dim if kind == "weight" else 0, num_blocks)
            if of_weight.setdefault(placement.name, shard) != shard:
                other = of_weight[placement.name]
                raise ValueError(f"{name}.{kind} is {placement.name}, which another layer shards as {other}: {shard}")
            if placement.shape[shard.dim] % num_blocks or placement.shape[shard.dim] // num_blocks < size_of_tp:
                raise ValueError(
                    f"{name}.{kind} of shape {placement.shape} cannot be split into tp={size_of_tp} parts along "
                    f"dimension {shard.dim}"
                )
    return shards


def _sharded_kinds(style: str, module: Any) -> list[str]:
    """Return which weights of a layer are sharded: the bias only if the layer is sharded by its outputs."""
    return ["weight"] if style == "rowwise" or getattr(module, "bias", None) is None else ["weight", "bias"]
