"""Defines the plans for sharding a model: which layers are sharded in which way, by patterns of their names.

:func:`~mindnlp_dp.parallelize` uses the plan for the model's type (``config.model_type``) or the user's own. Names are
those of ``named_modules()``; patterns are shell patterns, and the first that matches is used. A layer with LoRA
adapters is sharded as the layer that it wraps.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Optional

from mindnlp_dp.data.loss_weight import Task, loss_mean
from mindnlp_dp.runtime.adapters import base_model

# The ways to shard a layer, in the words of Transformers' ``tp_plan``; tensor_parallel/layers.py has the layers.
STYLES = {
    "colwise": "a linear layer by its outputs, or an embedding by its columns, such as a table with one for each head",
    "rowwise": "a linear layer by its inputs",
    "packed_colwise:N": "a linear layer with N outputs of one size, one after the other, such as queries, keys, values",
    "vocab_parallel": "the word embedding by its rows, or the linear layer with one output for each word",
}
_PACKED = "packed_colwise:"


@dataclass(frozen=True)
class TensorPlan:
    """Describes how tensor parallelism shards a model.

    Attributes:
        layers: a style of :data:`STYLES` for each pattern of layers.
        per_rank_attributes: attributes to divide by the number of ranks, such as the number of heads, for each pattern
            of modules.
        sharded_dropout: patterns of modules whose randomness (dropout) works on sharded tensors.
        head: which label belongs to which logits of a language model: "masked" (the label of the same token), "causal"
            (of the next token) or "seq2seq" (of the same token; labels are also the decoder's inputs). None: the logits
            are gathered, and the model computes its own loss.
    """

    layers: Mapping[str, str]
    per_rank_attributes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    sharded_dropout: Sequence[str] = ()
    head: Optional[str] = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", {pattern: _style(pattern, style) for pattern, style in self.layers.items()})
        if self.head not in (None, *_HEADS.values()):
            raise ValueError(f"head must be None or one of {', '.join(_HEADS.values())}, got {self.head!r}")

    def patterns(self) -> list[str]:
        return [*self.layers, *self.per_rank_attributes, *self.sharded_dropout]


def _style(pattern: str, style: str) -> str:
    """Return a style; raise ValueError if it is unknown."""
    if style not in STYLES and num_packed(style) < 2:
        raise ValueError(f"{pattern}: the styles of layers are {', '.join(STYLES)}; got {style!r}")
    return style


def num_packed(style: str) -> int:
    """Return N of "packed_colwise:N", the number of outputs one after the other; 1 for the other styles."""
    count = style.removeprefix(_PACKED)
    return int(count) if style.startswith(_PACKED) and re.fullmatch("[0-9]+", count) else 1


# The head styles for tasks whose loss depends on the output layer only.
_HEADS = {Task.MASKED_LM: "masked", Task.CAUSAL_LM: "causal", Task.SEQ2SEQ_LM: "seq2seq"}


@dataclass(frozen=True)
class PipelinePlan:
    """Describes how a model is split into pipeline stages.

    Attributes:
        layers: name of the list of layers that is split over the stages.
        first: names of the modules with weights of the first stage, or with dropout, that come before the layers,
            beginning with the embedding. The other stages lack them: there, the received activations replace the output
            of the first layer, whatever the model computes before it. Modules that are in neither ``layers`` nor
            ``first`` belong to the last stage.
        encoder: name of the encoder of an encoder-decoder, which becomes the first of two stages; replaces ``layers``.
        tuples: whether layers return tuples whose first item is the hidden state, as MindNLP's layers do.
    """

    layers: str = ""
    first: Sequence[str] = ()
    encoder: str = ""
    tuples: bool = True


@dataclass(frozen=True)
class ExpertPlan:
    """Describes where a model has experts.

    Attributes:
        blocks: pattern of the modules with ``gate``, ``experts``, ``num_experts`` and ``top_k``.
        norm_topk: whether to normalize the weights of a token's experts to a sum of 1; None uses the block's setting.
    """

    blocks: str
    norm_topk: Optional[bool] = None


@dataclass(frozen=True)
class ShardingPlan:
    """Describes how a model is sharded by each kind of parallelism; None if it does not support one."""

    tensor: Optional[TensorPlan] = None
    pipeline: Optional[PipelinePlan] = None
    experts: Optional[ExpertPlan] = None


def first_match(patterns: Mapping[str, Any], name: str) -> Optional[Any]:
    """Return the value of the first pattern that matches a name, or None.

    >>> first_match({"*.query": "colwise", "*": "rowwise"}, "layer.0.query")
    'colwise'
    """
    return next((value for pattern, value in patterns.items() if fnmatchcase(name, pattern)), None)


def _bert(prefix: str) -> ShardingPlan:
    return ShardingPlan(
        TensorPlan(
            layers={
                "*embeddings.word_embeddings": "vocab_parallel",
                "*attention.self.query": "colwise",
                "*attention.self.key": "colwise",
                "*attention.self.value": "colwise",
                "*intermediate.dense": "colwise",
                "*.output.dense": "rowwise",
                "*cls.predictions.decoder": "vocab_parallel",
                "*lm_head.decoder": "vocab_parallel",
            },
            per_rank_attributes={"*attention.self": ("num_attention_heads", "all_head_size")},
            sharded_dropout=("*attention.self.dropout",),
        ),
        PipelinePlan(layers=f"{prefix}encoder.layer", first=(f"{prefix}embeddings",)),
    )


def _gpt2(prefix: str) -> ShardingPlan:
    return ShardingPlan(
        TensorPlan(
            layers={
                "*wte": "vocab_parallel",
                "*.attn.c_attn": "packed_colwise:3",
                "*.mlp.c_fc": "colwise",
                "*.c_proj": "rowwise",
                "*lm_head": "vocab_parallel",
            },
            per_rank_attributes={"*.attn": ("num_heads", "split_size")},
            sharded_dropout=("*.attn.attn_dropout",),
        ),
        PipelinePlan(layers=f"{prefix}h", first=(f"{prefix}wte", f"{prefix}wpe", f"{prefix}drop")),
    )


def _t5(prefix: str) -> ShardingPlan:
    return ShardingPlan(
        TensorPlan(
            layers={
                "*shared": "vocab_parallel",
                "*embed_tokens": "vocab_parallel",
                "*Attention.q": "colwise",
                "*Attention.k": "colwise",
                "*Attention.v": "colwise",
                "*Attention.o": "rowwise",
                "*DenseReluDense.wi*": "colwise",
                "*DenseReluDense.wo": "rowwise",
                "*relative_attention_bias": "colwise",
                "*lm_head": "vocab_parallel",
            },
            per_rank_attributes={"*Attention": ("n_heads", "inner_dim")},
            # The dropout of attention weights is not a module here; the attention has no other randomness.
            sharded_dropout=("*Attention", "*DenseReluDense.dropout"),
        ),
        PipelinePlan(encoder=f"{prefix}encoder"),
    )


def _llama(prefix: str, *, first: Sequence[str] = ("embed_tokens",), **layers: str) -> ShardingPlan:
    """Return the plan for Llama and the models after its fashion, whose other layers ``layers`` names."""
    styles = {
        "embed_tokens": "vocab_parallel",
        "self_attn.q_proj": "colwise",
        "self_attn.k_proj": "colwise",
        "self_attn.v_proj": "colwise",
        "self_attn.o_proj": "rowwise",
        "mlp.gate_proj": "colwise",
        "mlp.up_proj": "colwise",
        "mlp.down_proj": "rowwise",
        "lm_head": "vocab_parallel",
        **layers,
    }
    return ShardingPlan(
        TensorPlan(
            layers={f"*{name}": style for name, style in styles.items()},
            per_rank_attributes={"*self_attn": ("num_heads", "num_key_value_heads", "hidden_size", "embed_dim")},
            sharded_dropout=("*self_attn",),
        ),
        PipelinePlan(layers=f"{prefix}layers", first=[f"{prefix}{name}" for name in first]),
    )


def _phi(prefix: str) -> ShardingPlan:
    layers = {"self_attn.dense": "rowwise", "mlp.fc1": "colwise", "mlp.fc2": "rowwise"}
    return _llama(prefix, first=("embed_tokens", "embed_dropout"), **layers)


def _opt(prefix: str) -> ShardingPlan:
    first = ("embed_tokens", "embed_positions", "project_in")
    return _llama(
        f"{prefix}decoder.", first=first, **{"self_attn.out_proj": "rowwise", "fc1": "colwise", "fc2": "rowwise"}
    )


def _mixtral(prefix: str) -> ShardingPlan:
    plan = _llama(prefix, **{"experts.*.w1": "colwise", "experts.*.w3": "colwise", "experts.*.w2": "rowwise"})
    return replace(plan, experts=ExpertPlan(blocks="*.block_sparse_moe", norm_topk=True))


def _qwen2_moe(prefix: str) -> ShardingPlan:
    experts = {".gate_proj": "colwise", ".up_proj": "colwise", ".down_proj": "rowwise"}
    return replace(_llama(prefix, **experts), experts=ExpertPlan(blocks="*.mlp"))


_KINDS = {
    "bert": _bert,
    "roberta": _bert,
    "gpt2": _gpt2,
    "t5": _t5,
    "llama": _llama,
    "qwen2": _llama,
    "mistral": _llama,
    "gemma": _llama,
    "phi": _phi,
    "opt": _opt,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
}


def plan_for(model: Any) -> ShardingPlan:
    """Return the plan for a MindNLP model, with or without LoRA adapters; it has only patterns that fit the model.

    Raises:
        ValueError: this model type has no plan.
    """
    outer, inner = base_model(model)
    kind = getattr(getattr(inner, "config", None), "model_type", None)
    if kind not in _KINDS:
        raise ValueError(
            f"no plan is known for {type(inner).__name__} ({kind}), only for {', '.join(_KINDS)}; write one: "
            "parallelize(model, mesh, plan=ShardingPlan(tensor=TensorPlan(layers={...})))"
        )
    prefix = getattr(inner, "base_model_prefix", "")
    # The names of a base model without a head have no prefix.
    prefix = f"{prefix}." if prefix and hasattr(inner, prefix) else ""
    plan = _KINDS[kind](f"{outer}.{prefix}" if outer else prefix)
    modules = dict(model.named_modules(remove_duplicate=False))
    assert plan.tensor is not None
    assert plan.pipeline is not None
    tensor = TensorPlan(
        layers={pattern: plan.tensor.layers[pattern] for pattern in _fitting(plan.tensor.layers, modules)},
        per_rank_attributes=_present_attributes(plan.tensor.per_rank_attributes, modules),
        sharded_dropout=_fitting(plan.tensor.sharded_dropout, modules),
        head=head_of(inner),
    )
    first = [name for name in plan.pipeline.first if modules.get(name) is not None]
    return replace(plan, tensor=tensor, pipeline=replace(plan.pipeline, first=first))


def plan_within_adapters(plan: ShardingPlan, model: Any) -> ShardingPlan:
    """Return a plan for a model's names, if it was written for the model that PEFT wraps; patterns need no change."""
    outer, _ = base_model(model)
    if not outer or plan.pipeline is None:
        return plan
    modules = dict(model.named_modules(remove_duplicate=False))

    def here(name: str) -> str:
        return f"{outer}.{name}" if name and name not in modules else name

    stages = replace(
        plan.pipeline, layers=here(plan.pipeline.layers), first=list(map(here, plan.pipeline.first)),
        encoder=here(plan.pipeline.encoder),
    )  # fmt: skip
    return replace(plan, pipeline=stages)


def head_of(model: Any) -> Optional[str]:
    """Return the ``head`` of a :class:`TensorPlan` by a model's task; None if its loss needs more than the logits."""
    mean = None if type(model).__name__.endswith("DoubleHeadsModel") else loss_mean(model)
    return None if mean is None else _HEADS.get(mean.task)


# By axis: whether a model's configuration has something that cannot be sharded over it, and what.
_UNSUPPORTED: Sequence[tuple[str, Callable[[Any], Any], str]] = (
    ("tp", lambda config: config.qk_layernorm, "qk_layernorm, whose weights all heads share"),
    ("tp", lambda config: "relative" in str(config.position_embedding_type), "relative positions that all heads share"),
    ("tp", lambda config: config.pretraining_tp > 1, "pretraining_tp, which splits weights itself; set it to 1"),
    ("sp", lambda config: config.pretraining_tp > 1, "pretraining_tp, which splits weights itself; set it to 1"),
    ("sp", lambda config: config.alibi or config.model_type in ("bloom", "mpt"), "ALiBi, position biases by head"),
    ("sp", lambda config: config.output_hidden_states or config.output_attentions, "outputs of each layer"),
    ("tp", lambda config: config.alibi or config.model_type in ("bloom", "mpt"), "ALiBi, position biases by head"),
    ("pp", lambda config: config.layerdrop > 0, "layerdrop, by which stages would leave out layers; set it to 0"),
)


def check_support(model: Any, axes: Sequence[str]) -> None:
    """Raise ValueError if a model's configuration has something that cannot be sharded over one of these axes."""
    config = _WithZeros(getattr(model, "config", None))
    for axis, has, what in _UNSUPPORTED:
        if axis in axes and has(config):
            raise ValueError(f"{axis} does not support {what} ({type(model).__name__}); leave {axis} out")


class _WithZeros:
    """A configuration in which the settings that it lacks are 0."""

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name, 0) or 0


def _fitting(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    return [pattern for pattern in patterns if any(fnmatchcase(name, pattern) for name in names)]


def _present_attributes(
    per_rank_attributes: Mapping[str, Sequence[str]], modules: Mapping[str, Any]
) -> dict[str, Sequence[str]]:
    """Leave out the attributes that this model's modules do not have."""
    found: dict[str, Sequence[str]] = {}
    for pattern in _fitting(per_rank_attributes, modules):
        module = next(module for name, module in modules.items() if fnmatchcase(name, pattern))
        found[pattern] = [attribute for attribute in per_rank_attributes[pattern] if hasattr(module, attribute)]
    return found


def check_patterns(patterns: Iterable[str], modules: Sequence[str], what: str) -> None:
    """Raise a ValueError that names the first pattern of a plan that fits no module, and names like it."""
    for pattern in patterns:
        if not _fitting([pattern], modules):
            ends = {name.rpartition(".")[2]: name for name in modules if name}
            close = difflib.get_close_matches(pattern.rpartition(".")[2].strip("*"), ends, n=3, cutoff=0.5)
            like = f"; names like it: {', '.join(ends[end] for end in close)}" if close else ""
            raise ValueError(f"the plan for {what} has the pattern {pattern!r}, which fits no module{like}")
