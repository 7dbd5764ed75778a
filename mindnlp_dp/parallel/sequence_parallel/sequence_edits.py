"""Plans sequence parallelism: edits of a model's layers for the ranks of the axis "sp".

:func:`~mindnlp_dp.parallelize` calls it. The model embeds all tokens, and makes its masks, positions and rotary tables
for the whole length, on every rank. The input of the first layer is split, the output of the last one gathered.

The plan of tensor parallelism says what the heads are: in attention, the output of a layer that it shards by columns is
exchanged to heads, and the input of one that it shards by rows back to tokens. The attention's own code runs between
them, on all tokens and this rank's heads. For ``hidden_states`` it gets a placeholder of the full length, of which it
may read the shape only: its value is NaN, so that any other use is seen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mindspore import Tensor

from mindnlp_dp.parallel.device_mesh import DeviceMesh
from mindnlp_dp.parallel.model_edits import Edit, ModelIndex
from mindnlp_dp.parallel.parallel_plan import ShardingPlan, TensorPlan, check_patterns, first_match, num_packed
from mindnlp_dp.parallel.placement import Placements
from mindnlp_dp.parallel.sequence_parallel.token_shards import SequenceShards

# The attribute with the number of heads of keys and values, and the one with the heads of queries for each of them.
_KV_HEADS, _GROUPS = "num_key_value_heads", "num_key_value_groups"


def sequence_parallel_edits(
    index: ModelIndex, plan: ShardingPlan, placements: Placements, shards: SequenceShards
) -> list[Edit]:
    """Return the edits that split the tokens of each row over the axis "sp" between the first and the last layer.

    Raises:
        ValueError: sp does not divide the number of heads, or the plan does not say what attention's projections are.
    """
    tensor, pipeline = plan.tensor, plan.pipeline
    assert tensor is not None, "checked by parallelize"
    assert pipeline is not None, "checked by parallelize"
    if pipeline.encoder or not pipeline.layers:
        raise ValueError(
            f"sp needs one list of layers, and {type(index.model).__name__} has an encoder and a decoder; use tp or dp"
        )
    check_patterns(tensor.patterns(), list(index.modules), "tensor parallelism")
    edits: list[Edit] = []
    for name, module in index.unique():
        if sizes := first_match(tensor.per_rank_attributes, name):
            edits += _attention_edits(index, name, _sizes(name, module, sizes, placements.mesh), tensor, shards)
    if plan.experts is not None:
        blocks = [name for name, _ in index.unique() if first_match({plan.experts.blocks: True}, name)]
        edits += [Edit((name,), forward=functools.partial(_ExpertBlock, shards=shards)) for name in blocks]
    num_layers = len(index.find(pipeline.layers, "the list of layers"))
    for number in range(num_layers):
        split, gather = number == 0, number == num_layers - 1
        forward = functools.partial(_Layer, shards=shards, is_first=split, is_last=gather)
        edits.append(Edit((f"{pipeline.layers}.{number}",), forward=forward))
    return [*edits, Edit(("",), forward=_RefusesHiddenStates)]


def _attention_edits(
    index: ModelIndex, name: str, sizes: tuple[dict[str, int], int], plan: TensorPlan, shards: SequenceShards
) -> list[Edit]:
    """Return the edits of one attention module and of its projections."""
    attributes, copies = sizes
    styles = {path: style for path in index.modules if (style := first_match(plan.layers, path))}
    within = {path: style for path, style in styles.items() if path.startswith(f"{name}.")}
    to_heads = {path: style for path, style in within.items() if style == "colwise" or num_packed(style) > 1}
    # BERT's output projection is not in the module with the heads, but beside it.
    place = name if "rowwise" in within.values() else name.rpartition(".")[0]
    to_tokens = [path for path, style in styles.items() if path.startswith(f"{place}.") and style == "rowwise"]
    if not to_heads or not to_tokens:
        raise ValueError(
            f"the plan shards {name} by {', '.join(attributes)}, and has no layers by columns in it and by rows after "
            "it, between which sp would exchange tokens for heads"
        )
    exchange = _HeadExchange(shards)
    edits = [Edit((name,), forward=functools.partial(_Attention, exchange=exchange), attributes=attributes)]
    widest = max(_num_outputs(index.modules[path]) for path in to_heads)
    for path, style in to_heads.items():
        is_shared = copies > 1 and _num_outputs(index.modules[path]) < widest
        forward = functools.partial(
            _ToHeads, exchange=exchange, name=path, num_blocks=num_packed(style), copies=copies if is_shared else 1
        )
        edits.append(Edit((path,), forward=forward))
    return edits + [Edit((path,), forward=functools.partial(_ToTokens, shards=shards)) for path in to_tokens]


def _num_outputs(layer: Any) -> int:
    layer = getattr(layer, "base_layer", layer)
    return int(getattr(layer, "out_features", 0) or layer.weight.shape[1])


def _sizes(name: str, module: Any, per_rank_attributes: Sequence[str], mesh: DeviceMesh) -> tuple[dict[str, int], int]:
    """Return this rank's numbers of heads, and how many ranks share a head of keys and values."""
    sp, tp = mesh.sizes["sp"], mesh.sizes["tp"]
    sizes, copies = {}, 1
    for attribute in per_rank_attributes:
        size = getattr(module, attribute) // tp
        if attribute == _KV_HEADS and size < sp and sp % size == 0:
            copies = sp // size
            size = sp
        if size % sp:
            raise ValueError(
                f"{attribute} of {name} is {getattr(module, attribute)}, which sp={sp}"
                + (f" times tp={tp}" if tp > 1 else "")
                + " does not divide; choose a smaller sp, or split the samples by dp"
            )
        sizes[attribute] = size // sp
    if copies > 1 and hasattr(module, _GROUPS):
        sizes[_GROUPS] = sizes["num_heads"] // sizes[_KV_HEADS]
    return sizes, copies


class _HeadExchange:
    """The input of an attention module in its current forward pass, which its projections read.

    Attributes:
        hidden_states: this rank's tokens; None outside of the module.
        placeholder: what the module gets in their place.
    """

    def __init__(self, shards: SequenceShards) -> None:
        self.shards = shards
        self.hidden_states: Any = None
        self.placeholder: Any = None


class _Wrapper:
    """Replaces a forward pass, and keeps its signature."""

    __call__: Callable[..., Any]

    def __init__(self, forward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, forward)
        self._forward = forward


class _Attention(_Wrapper):
    """Runs attention on all tokens and this rank's heads."""

    def __init__(self, forward: Callable[..., Any], exchange: _HeadExchange) -> None:
        super().__init__(forward)
        self._exchange = exchange

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        exchange = self._exchange
        nan = Tensor(np.full((1, 1, 1), np.nan, np.float32)).astype(hidden_states.dtype)
        exchange.hidden_states = hidden_states
        exchange.placeholder = nan.expand((hidden_states.shape[0], exchange.shards.length, 1))
        try:
            return self._forward(exchange.placeholder, *args, **kwargs)
        finally:
            exchange.hidden_states = exchange.placeholder = None


class _ToHeads(_Wrapper):
    """Projects this rank's tokens, and exchanges the result to all tokens of this rank's heads."""

    def __init__(
        self, forward: Callable[..., Any], exchange: _HeadExchange, name: str, num_blocks: int, copies: int
    ) -> None:
        super().__init__(forward)
        self._exchange, self._name, self._num_blocks, self._copies = exchange, name, num_blocks, copies

    def __call__(self, x: Tensor) -> Tensor:
        exchange = self._exchange
        if x is not exchange.placeholder:
            raise ValueError(
                f"{self._name} projects something else than the hidden states of its attention, such as those of an "
                "encoder, which sp does not support; use tp or dp"
            )
        with exchange.shards.drawing():
            y = self._forward(exchange.hidden_states)
        return exchange.shards.to_heads(y, self._num_blocks, self._copies)


class _ToTokens(_Wrapper):
    """Exchanges all tokens of this rank's heads to this rank's tokens, and projects them."""

    def __init__(self, forward: Callable[..., Any], shards: SequenceShards) -> None:
        super().__init__(forward)
        self._shards = shards

    def __call__(self, x: Tensor) -> Tensor:
        with self._shards.drawing():
            return self._forward(self._shards.to_tokens(x))


class _ExpertBlock(_Wrapper):
    """Runs a mixture of experts on this rank's tokens; gathers the router's logits, of which a loss is computed."""

    def __init__(self, forward: Callable[..., Any], shards: SequenceShards) -> None:
        super().__init__(forward)
        self._shards = shards

    def __call__(self, hidden_states: Tensor) -> Any:
        mixed, logits = self._forward(hidden_states)
        by_row = logits.reshape(hidden_states.shape[0], -1, logits.shape[-1])
        return mixed, self._shards.gather(by_row).reshape(-1, logits.shape[-1])


class _Layer(_Wrapper):
    """Runs a layer on this rank's tokens. The first one gets all tokens, and the last one returns all."""

    def __init__(self, forward: Callable[..., Any], shards: SequenceShards, is_first: bool, is_last: bool) -> None:
        super().__init__(forward)
        self._shards, self._is_first, self._is_last = shards, is_first, is_last

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        shards = self._shards
        if self._is_first:
            shards.begin(hidden_states.shape[1])
            hidden_states = shards.split(hidden_states)
        with shards.drawing():
            outputs = self._forward(hidden_states, *args, **kwargs)
        if not self._is_last:
            return outputs
        if isinstance(outputs, tuple):
            return (shards.gather(outputs[0]), *outputs[1:])
        return shards.gather(outputs)


class _RefusesHiddenStates(_Wrapper):
    """Raises an error if the outputs of all layers are asked for, of which every rank has a part only."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for name in ("output_hidden_states", "output_attentions"):
            if kwargs.get(name):
                raise ValueError(f"sp does not support {name}: each rank has a part of it; leave {name} out")
        return self._forward(*args, **kwargs)
