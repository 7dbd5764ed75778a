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
from mindnlp_dp.parallel.model_edits import Edit, ModelIndex
from mindnlp_dp.parallel.parallel_plan import TensorPlan, first_match
from mindnlp_dp.parallel.placement import Placements, Shard
from mindnlp_dp.parallel.tensor_parallel.layers import (
    ColumnParallelLinear,
    RankLocalDropout,
    RowParallelLinear,
    SharedInput,
    VocabularyParallelEmbedding,
    VocabularyParallelHead,
    is_conv1d,
)


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
        ValueError: the plan matches no layer, or shards one weight in two ways, or tp does not divide the number of
            heads, or a weight cannot be split over the ranks.
    """
    group, model = placements.mesh.group("tp"), index.model
    styles = {name: style for name in index.modules if (style := first_match(plan.layers, name)) is not None}
    if not styles:
        raise ValueError(
            f"the plan for tensor parallelism fits no layer of {type(model).__name__}: {', '.join(plan.layers)}"
        )
    edits = [Edit((name,), attributes=divided) for name, divided in _divided(index, plan, group)]
    shards = _shards(index, styles, placements)
    inputs: dict[str, SharedInput] = {}
    for name, module in index.unique():
        if name not in styles:
            continue
        siblings = inputs.setdefault(name.rpartition(".")[0], SharedInput(group))
        own = {f"{name}.{kind}": {"cut": shards[f"{name}.{kind}"]} for kind in _cut_kinds(styles[name], module)}
        new: Any = {
            "columns": functools.partial(ColumnParallelLinear, shared_input=siblings),
            "columns of 3": functools.partial(ColumnParallelLinear, shared_input=siblings),
            "rows": functools.partial(RowParallelLinear, group=group),
            "vocabulary": functools.partial(
                VocabularyParallelEmbedding, group=group, num_embeddings=placements[f"{name}.weight"].shape[0]
            ),
            "vocabulary head": functools.partial(GatheredHead, group=group),
        }.get(styles[name])
        if styles[name] == "vocabulary head" and plan.head is not None:
            new = functools.partial(ColumnParallelLinear, shared_input=siblings)
            edits.append(
                Edit(("",), forward=functools.partial(VocabularyParallelHead, model, group=group, kind=plan.head))
            )
        edits.append(Edit(index.names_of(module), module=new, placements=own))
    for name, module in index.unique():
        if any(fnmatchcase(name, pattern) for pattern in plan.apart):
            is_dropout = isinstance(module, nn.Dropout)
            edits.append(Edit((name,), forward=functools.partial(RankLocalDropout, group=group, is_dropout=is_dropout)))
    return edits


def _divided(index: ModelIndex, plan: TensorPlan, group: ProcessGroup) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield the modules with attributes that each rank has a part of, such as the number of heads, and their values."""
    for name, module in index.unique():
        sizes = {attribute: getattr(module, attribute) for attribute in first_match(plan.divided, name) or ()}
        for attribute, size in sizes.items():
            if size % group.world_size:
                raise ValueError(
                    f"{attribute} of {name} is {size}, which tp={group.world_size} does not divide; choose a tp that "
                    "divides the number of heads"
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
        is_table = style in ("vocabulary", "table columns")
        if weight is None or len(weight.shape) != 2 or is_table != isinstance(module, nn.Embedding):
            raise ValueError(
                f"{name} is to be cut as {style!r}, and is a {type(module).__name__}; expected "
                + ("an embedding" if is_table else "a linear layer")
            )
        num_blocks = 3 if style == "columns of 3" else 1
        dim = int((style in ("rows", "table columns")) != is_conv1d(module))
        for kind in _cut_kinds(style, module):
            placement = placements[f"{name}.{kind}"]
            cut = shards[f"{name}.{kind}"] = Shard(dim if kind == "weight" else 0, num_blocks)
            if of_weight.setdefault(placement.name, cut) != cut:
                other = of_weight[placement.name]
                raise ValueError(f"{name}.{kind} is {placement.name}, which another layer cuts as {other}: {cut}")
            if placement.shape[cut.dim] % num_blocks or placement.shape[cut.dim] // num_blocks < size_of_tp:
                raise ValueError(
                    f"{name}.{kind} of shape {placement.shape} cannot be cut into tp={size_of_tp} parts along "
                    f"dimension {cut.dim}"
                )
    return shards


def _cut_kinds(style: str, module: Any) -> list[str]:
    """Return which weights of a layer are sharded: the bias only if the layer is sharded by its outputs."""
    by_inputs = style in ("rows", "table columns")
    return ["weight"] if by_inputs or getattr(module, "bias", None) is None else ["weight", "bias"]
