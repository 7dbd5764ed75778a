"""Applies a tensor parallel plan: replaces layers of a model by parallel layers for the ranks of the axis "tp".

:func:`~mindnlp_dp.parallelize` calls it. It changes only the structure of the model (layers of layers.py) and records
how each weight is sharded; the weights are sharded later.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any, Optional

from mindnlp.core import nn

from mindnlp_dp.communication.autograd_ops import gather_from
from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.parallel.parallel_plan import TensorPlan, first_match
from mindnlp_dp.parallel.placement import Placements, Shard, every_module, replace_module
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


def apply_tensor_parallel(model: Any, plan: TensorPlan, placements: Placements) -> None:
    """Replace layers of ``model`` by parallel layers, and record in ``placements`` how their weights are sharded.

    Raises:
        ValueError: the plan matches no layer, or shards one weight in two ways, or tp does not divide the number of
            heads, or a weight cannot be split over the ranks.
    """
    group = placements.mesh.group("tp")
    modules = every_module(model)
    styles = {name: style for name, module in modules if (style := first_match(plan.layers, name)) is not None}
    if not styles:
        raise ValueError(
            f"the plan for tensor parallelism fits no layer of {type(model).__name__}: {', '.join(plan.layers)}"
        )
    _divide(model, plan, group)
    for name, module in modules:
        if name in styles:
            _place(name, module, styles[name], placements)
    inputs: dict[str, SharedInput] = {}
    # named_modules() returns each module once, even if it has several names.
    for name, module in [pair for pair in model.named_modules() if pair[0] in styles]:
        siblings = inputs.setdefault(name.rpartition(".")[0], SharedInput(group))
        num_rows = placements[f"{name}.weight"].shape[0]
        new = _parallel_layer(
            model, module, styles[name], siblings=siblings, group=group, num_rows=num_rows, head=plan.head
        )
        replace_module(model, module, new)
    for name, module in model.named_modules():
        if any(fnmatchcase(name, pattern) for pattern in plan.apart):
            module.forward = RankLocalDropout(module.forward, group)


def _parallel_layer(
    model: Any,
    module: Any,
    style: str,
    *,
    siblings: SharedInput,
    group: ProcessGroup,
    num_rows: int,
    head: Optional[str],
) -> Any:
    """Return the replacement for a layer, or the layer itself if it needs nothing but its sharded weight."""
    if style in ("columns", "columns of 3"):
        return ColumnParallelLinear(module, siblings)
    if style == "rows":
        return RowParallelLinear(module, group)
    if style == "vocabulary":
        return VocabularyParallelEmbedding(module, group, num_rows)
    if style == "vocabulary head":
        if head is None:
            return GatheredHead(module, group)
        model.forward = VocabularyParallelHead(model, model.forward, group, head)
        return ColumnParallelLinear(module, siblings)
    return module


def _divide(model: Any, plan: TensorPlan, group: ProcessGroup) -> None:
    for name, module in model.named_modules():
        for attribute in first_match(plan.divided, name) or ():
            size = getattr(module, attribute)
            if size % group.world_size:
                raise ValueError(
                    f"{attribute} of {name} is {size}, which tp={group.world_size} does not divide; choose a tp that "
                    "divides the number of heads"
                )
            setattr(module, attribute, size // group.world_size)


def _place(name: str, module: Any, style: str, placements: Placements) -> None:
    weight = getattr(module, "weight", None)
    is_table = style in ("vocabulary", "table columns")
    if weight is None or len(weight.shape) != 2 or is_table != isinstance(module, nn.Embedding):
        raise ValueError(
            f"{name} is to be cut as {style!r}, and is a {type(module).__name__}; expected "
            + ("an embedding" if is_table else "a linear layer")
        )
    num_blocks = 3 if style == "columns of 3" else 1
    by_rows = style in ("rows", "table columns")
    dim = int(by_rows != is_conv1d(module))
    cuts = {"weight": Shard(dim, num_blocks)}
    if not by_rows and getattr(module, "bias", None) is not None:
        cuts["bias"] = Shard(0, num_blocks)
    for kind, cut in cuts.items():
        placement = placements[f"{name}.{kind}"]
        if placement.cut not in (None, cut):
            raise ValueError(f"{name}.{kind} is {placement.name}, which another layer cuts as {placement.cut}: {cut}")
        size = placement.shape[cut.dim] // cut.num_blocks
        if placement.shape[cut.dim] % cut.num_blocks or size < placements.mesh.sizes["tp"]:
            raise ValueError(
                f"{name}.{kind} of shape {placement.shape} cannot be cut into tp={placements.mesh.sizes['tp']} parts "
                f"along dimension {cut.dim}"
            )
        placements.change([placement.name], cut=cut)
