"""Defines the plans for sharding a model: which layers are sharded in which way, by patterns of their names.

:func:`~mindnlp_dp.parallelize` uses the plan for the model's type (``config.model_type``) or the user's own. Names are
those of ``named_modules()``; patterns are shell patterns, and the first that matches is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Optional

from mindnlp_dp.data.loss_weight import Task, loss_mean

# The ways to shard a layer; tensor_parallel/layers.py has the parallel layers.
STYLES = {
    "columns": "a linear layer, by its outputs",
    "columns of 3": "a linear layer with three outputs (queries, keys, values), one after the other",
    "rows": "a linear layer, by its inputs",
    "vocabulary": "an embedding, by its rows",
    "vocabulary head": "the linear layer with one output for each word of the vocabulary",
    "table columns": "a table, by its columns, one of which belongs to each attention head",
}


@dataclass(frozen=True)
class TensorPlan:
    """Describes how tensor parallelism shards a model.

    Attributes:
        layers: a style of :data:`STYLES` for each pattern of layers.
        divided: attributes to divide by the number of ranks, such as the number of heads, for each pattern of modules.
        apart: patterns of modules whose randomness (dropout) works on sharded tensors.
        head: which label belongs to which logits of a language model: "masked" (the label of the same token), "causal"
            (of the next token) or "seq2seq" (of the same token; labels are also the decoder's inputs). None: the logits
            are gathered, and the model computes its own loss.
    """

    layers: Mapping[str, str]
    divided: Mapping[str, Sequence[str]] = field(default_factory=dict)
    apart: Sequence[str] = ()
    head: Optional[str] = None

    def __post_init__(self) -> None:
        for pattern, style in self.layers.items():
            if style not in STYLES:
                raise ValueError(f"{pattern}: a layer is cut by {', '.join(STYLES)}; got {style!r}")


@dataclass(frozen=True)
class PipelinePlan:
    """Describes how a model is split into pipeline stages.

    Attributes:
        layers: name of the list of layers that is split over the stages.
        first: names of the modules of the first stage that come before the layers. On the other stages, the received
            activations replace the first of them (the embedding), and the others have no effect. If empty, they
            replace the first layer. Modules that are in neither ``layers`` nor ``first`` belong to the last stage.
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

    >>> first_match({"*.query": "columns", "*": "rows"}, "layer.0.query")
    'columns'
    """
    return next((value for pattern, value in patterns.items() if fnmatchcase(name, pattern)), None)


def _bert(prefix: str, head: Optional[str]) -> ShardingPlan:
    return ShardingPlan(
        TensorPlan(
            layers={
                "*embeddings.word_embeddings": "vocabulary",
                "*attention.self.query": "columns",
                "*attention.self.key": "columns",
                "*attention.self.value": "columns",
                "*intermediate.dense": "columns",
                "*.output.dense": "rows",
                "cls.predictions.decoder": "vocabulary head",
                "lm_head.decoder": "vocabulary head",
            },
            divided={"*attention.self": ("num_attention_heads", "all_head_size")},
            apart=("*attention.self.dropout",),
            head=head,
        ),
        PipelinePlan(layers=f"{prefix}encoder.layer", first=(f"{prefix}embeddings",)),
    )


def _gpt2(prefix: str, head: Optional[str]) -> ShardingPlan:
    return ShardingPlan(
        TensorPlan(
            layers={
                "*wte": "vocabulary",
                "*.attn.c_attn": "columns of 3",
                "*.mlp.c_fc": "columns",
                "*.c_proj": "rows",
                "lm_head": "vocabulary head",
            },
            divided={"*.attn": ("num_heads", "split_size")},
            apart=("*.attn.attn_dropout",),
            head=head,
        ),
        PipelinePlan(layers=f"{prefix}h", first=(f"{prefix}wte", f"{prefix}wpe", f"{prefix}drop")),
    )


def _t5(prefix: str, head: Optional[str]) -> ShardingPlan:
    return ShardingPlan(
        TensorPlan(
            layers={
                "shared": "vocabulary",
                "*embed_tokens": "vocabulary",
                "*Attention.q": "columns",
                "*Attention.k": "columns",
                "*Attention.v": "columns",
                "*Attention.o": "rows",
                "*DenseReluDense.wi*": "columns",
                "*DenseReluDense.wo": "rows",
                "*relative_attention_bias": "table columns",
                "lm_head": "vocabulary head",
            },
            divided={"*Attention": ("n_heads", "inner_dim")},
            # The dropout of attention weights is not a module here; the attention has no other randomness.
            apart=("*Attention", "*DenseReluDense.dropout"),
            head=head,
        ),
        PipelinePlan(encoder="encoder"),
    )


def _mixtral(prefix: str, head: Optional[str]) -> ShardingPlan:
    return ShardingPlan(
        TensorPlan(
            layers={
                "*embed_tokens": "vocabulary",
                "*self_attn.q_proj": "columns",
                "*self_attn.k_proj": "columns",
                "*self_attn.v_proj": "columns",
                "*self_attn.o_proj": "rows",
                "*.w1": "columns",
                "*.w3": "columns",
                "*.gate_proj": "columns",
                "*.up_proj": "columns",
                "*.w2": "rows",
                "*.down_proj": "rows",
                "lm_head": "vocabulary head",
            },
            divided={"*self_attn": ("num_heads", "num_key_value_heads", "hidden_size")},
            apart=("*self_attn",),
            head=head,
        ),
        PipelinePlan(layers=f"{prefix}layers", first=(f"{prefix}embed_tokens",)),
        ExpertPlan(blocks="*.block_sparse_moe", norm_topk=True),
    )


def _qwen2_moe(prefix: str, head: Optional[str]) -> ShardingPlan:
    plan = _mixtral(prefix, head)
    return ShardingPlan(plan.tensor, plan.pipeline, ExpertPlan(blocks="*.mlp"))


# The head styles for tasks whose loss depends on the output layer only.
_HEADS = {Task.MASKED_LM: "masked", Task.CAUSAL_LM: "causal", Task.SEQ2SEQ_LM: "seq2seq"}

_KINDS = {
    "bert": _bert,
    "roberta": _bert,
    "gpt2": _gpt2,
    "t5": _t5,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
}


def plan_for(model: Any) -> ShardingPlan:
    """Return the plan for a MindNLP model.

    Raises:
        ValueError: this model type has no plan.
    """
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in _KINDS:
        raise ValueError(
            f"no plan is known for {type(model).__name__} ({kind}), only for {', '.join(_KINDS)}; write one: "
            "parallelize(model, mesh, plan=ShardingPlan(tensor=TensorPlan(layers={...})))"
        )
    prefix = getattr(model, "base_model_prefix", "")
    # The names of a base model without a head have no prefix.
    prefix = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    mean = None if type(model).__name__.endswith("DoubleHeadsModel") else loss_mean(model)
    return _KINDS[kind](prefix, None if mean is None else _HEADS.get(mean.task))
