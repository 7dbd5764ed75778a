"""How a model is cut: which of its layers in which way, by patterns of their names.

Goes in: what kind of model it is (``config.model_type``), or a plan of the user's own. Comes out: for every layer that
is cut, how. Names are those of ``named_modules()``; patterns are the shell's, of which the first that fits counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Optional

from mindnlp_dp.step.loss_weight import Task, loss_mean

# How a layer is cut, and what it does then (tensor.py).
STYLES = {
    "columns": "a linear layer, by what it puts out",
    "columns of 3": "a linear layer that puts out three things (queries, keys, values) one behind the other",
    "rows": "a linear layer, by what it takes in",
    "vocabulary": "an embedding, by its rows",
    "vocabulary head": "the linear layer that puts out a number for every word",
    "table columns": "a table, by its columns, one of which belongs to each attention head",
}


@dataclass(frozen=True)
class TensorPlan:
    """How tensor parallelism cuts a model.

    Attributes:
        layers: a style of :data:`STYLES`, by pattern.
        divided: attributes that become a rank's share of what they are, such as numbers of heads, by pattern.
        apart: modules whose randomness (dropout) is about what is cut.
        head: of a language model, which label belongs to which logits: "masked" (its own), "causal" (the one behind it)
            or "seq2seq" (its own; labels are the decoder's inputs, too). None: the output layer's parts are put
            together, and the model makes its loss of that.
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
    """How a model is cut into stages.

    Attributes:
        layers: the name of the list of layers that the stages share out.
        first: modules of the first stage, before the layers: the embedding, whose place on the other stages is taken by
            what they receive, and others, which add nothing there. Without any, it is the first layer's place. What is
            in neither belongs to the last stage.
        encoder: of an encoder-decoder, in place of ``layers``: the module that is the first of two stages.
        tuples: whether layers return tuples, of which the first is the hidden state, as MindNLP's do.
    """

    layers: str = ""
    first: Sequence[str] = ()
    encoder: str = ""
    tuples: bool = True


@dataclass(frozen=True)
class ExpertPlan:
    """Where a model has experts.

    Attributes:
        blocks: patterns of modules with ``gate``, ``experts``, ``num_experts`` and ``top_k``.
        norm_topk: whether the weights of a token's experts are made to add up to 1; None: as the block says.
    """

    blocks: str
    norm_topk: Optional[bool] = None


@dataclass(frozen=True)
class Plan:
    """How a model is cut in each way; None where it cannot be."""

    tensor: Optional[TensorPlan] = None
    pipeline: Optional[PipelinePlan] = None
    experts: Optional[ExpertPlan] = None


def first_match(patterns: Mapping[str, Any], name: str) -> Optional[Any]:
    """What the first pattern that fits a name stands for.

    >>> first_match({"*.query": "columns", "*": "rows"}, "layer.0.query")
    'columns'
    """
    return next((value for pattern, value in patterns.items() if fnmatchcase(name, pattern)), None)


def _bert(prefix: str, head: Optional[str]) -> Plan:
    return Plan(
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


def _gpt2(prefix: str, head: Optional[str]) -> Plan:
    return Plan(
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


def _t5(prefix: str, head: Optional[str]) -> Plan:
    return Plan(
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
            # Dropout of attention's weights is not a module here, and the only randomness in it.
            apart=("*Attention", "*DenseReluDense.dropout"),
            head=head,
        ),
        PipelinePlan(encoder="encoder"),
    )


def _mixtral(prefix: str, head: Optional[str]) -> Plan:
    return Plan(
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


def _qwen2_moe(prefix: str, head: Optional[str]) -> Plan:
    plan = _mixtral(prefix, head)
    return Plan(plan.tensor, plan.pipeline, ExpertPlan(blocks="*.mlp"))


# The heads of models whose loss is that of their output layer, and of nothing else.
_HEADS = {Task.MASKED_LM: "masked", Task.CAUSAL_LM: "causal", Task.SEQ2SEQ_LM: "seq2seq"}

_KINDS = {
    "bert": _bert,
    "roberta": _bert,
    "gpt2": _gpt2,
    "t5": _t5,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
}


def plan_for(model: Any) -> Plan:
    """The plan of one of MindNLP's models.

    Raises:
        ValueError: there is none for its kind.
    """
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in _KINDS:
        raise ValueError(
            f"there is no plan for {type(model).__name__} ({kind}), only for {', '.join(_KINDS)}; write one: "
            "parallelize(model, mesh, plan=Plan(tensor=TensorPlan(layers={...})))"
        )
    prefix = getattr(model, "base_model_prefix", "")
    # A bare base model has no prefix in its names.
    prefix = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    mean = None if type(model).__name__.endswith("DoubleHeadsModel") else loss_mean(model)
    return _KINDS[kind](prefix, None if mean is None else _HEADS.get(mean.task))
