"""Builds the operator graphs of the known model types, layer by layer, from MindNLP configurations.

:func:`~mindnlp_dp.planner.load_model` calls it. Sizes are per sample. An operator keeps for the backward pass what
autograd keeps, so a transformer layer in half precision keeps s b h (34 + 5 a s / h) bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Optional

from mindnlp_dp.planner.profiles.operators import BATCH, COLUMN, EXPERT, NONE, VOCABULARY, Graph, Model, Operator

# The roles of operators that tensor parallelism repeats on all devices, and of embeddings, as in mindnlp_dp.parallel.
_WHOLE = (BATCH, NONE)

_BY_WORDS = (BATCH, VOCABULARY, NONE)


class Builder:
    """Builds a graph by adding operators one after another; sizes are per sample."""

    def __init__(self, name: str, kind: str, sequence: int, config: Mapping[str, Any]) -> None:
        self.name, self.kind, self.s = name, kind, sequence
        self.architecture = " ".join(config.get("architectures") or ())
        self.is_tied = config.get("tie_word_embeddings", True)
        self.operators: list[Operator] = []
        self.cuts: list[int] = []
        self.blocks = [0]
        # The transformer layer that operators are added to; None outside of the layers.
        self.layer: Optional[int] = None
        self._last = ""
        # Whether the layers' outputs and the attention have dropout.
        self.dropout = _is_on(config, "hidden_dropout_prob", "resid_pdrop", "dropout_rate")
        self.attention_dropout = _is_on(config, "attention_probs_dropout_prob", "attn_pdrop", "dropout_rate")

    def add(self, name: str, kind: str, inputs: Optional[tuple[str, ...]] = None, **sizes: Any) -> str:
        inputs = ((self._last,) if self._last else ()) if inputs is None else inputs
        sizes.setdefault("rows", self.s)
        self.operators.append(Operator(name, kind, inputs, layer=self.layer, **sizes))
        self._last = name
        return name

    def begin_block(self, number: int) -> None:
        if number:
            self.cuts.append(len(self.operators))
            self.blocks.append(number)
        self.layer = number

    def matmul(self, name: str, k: int, n: int, inputs: Optional[tuple[str, ...]] = None, **sizes: Any) -> str:
        rows = sizes.get("rows", self.s)
        numbers = {"flops": 2 * rows * k * n, "parameters": k * n + n, "traffic": rows * n}
        return self.add(name, "matmul", inputs, width_in=k, width_out=n, **{**numbers, **sizes})

    def elementwise(self, name: str, width: int, inputs: Optional[tuple[str, ...]] = None, **sizes: Any) -> str:
        rows = sizes.get("rows", self.s)
        numbers = {"traffic": 4 * rows * width, "keeps_input": True}
        return self.add(name, "elementwise", inputs, width_in=width, width_out=width, **{**numbers, **sizes})

    def dropout_add(self, name: str, width: int, residual: str) -> str:
        """Add a dropout and the sum with the residual."""
        values = self.s * width
        numbers = {"traffic": 3 * values, "calls": 1}
        if self.dropout:
            numbers = {"traffic": 5 * values, "calls": 2, "masks": values}
        return self.elementwise(name, width, (self._last, residual), keeps_input=False, **numbers)

    def norm(self, name: str, width: int, **sizes: Any) -> str:
        rows = sizes.get("rows", self.s)
        numbers = {"parameters": 2 * width, "traffic": 6 * rows * width}
        return self.add(name, "reduction", width_in=width, width_out=width, **{**numbers, **sizes})

    def attention(
        self, name: str, heads: int, width: int, *, inputs: Optional[tuple[str, ...]] = None, width_in: int = 0,
        kept: int = 2, parameters: int = 0,
    ) -> str:  # fmt: skip
        """Add scores, softmax, dropout and values; with dropout, ``kept`` copies of the scores and a mask are saved."""
        scores = heads * self.s * self.s
        return self.add(
            name, "attention", inputs, width_in=width_in or 3 * width, width_out=width, flops=4 * self.s**2 * width,
            traffic=8 * self.s * width, scores=scores, parameters=parameters, calls=10 if self.attention_dropout else 9,
            saved=(kept if self.attention_dropout else 1) * scores, masks=scores if self.attention_dropout else 0,
        )  # fmt: skip

    def embedding(self, words: int, width: int, others: int, *, has_norm: bool = True) -> str:
        self.add(
            "embeddings.words", "embedding", (), width_in=0, width_out=width, parameters=words * width,
            traffic=3 * self.s * width, keeps_input=False, only=_BY_WORDS,
        )  # fmt: skip
        self.elementwise(
            "embeddings.positions", width, parameters=others * width, masks=self.s * width if self.dropout else 0,
            calls=3, only=_WHOLE, keeps_input=False,
        )  # fmt: skip
        return self.norm("embeddings.norm", width) if has_norm else self._last

    def head(self, words: int, width: int, *, words_of: str = "embeddings.words") -> None:
        """Add logits over the vocabulary, by the embedding's table or a separate one, and the loss."""
        tied_to = words_of if self.is_tied else None
        self.matmul("head", width, words, parameters=words * width, tied_to=tied_to, only=(BATCH, COLUMN, NONE))
        self.add(
            "loss", "loss", width_in=words, width_out=1, traffic=6 * self.s * words, saved=0.0, calls=4
        )  # fmt: skip

    def finish(self, **more: Any) -> Model:
        num_layers = more.pop("num_layers")
        return Model(
            self.name,
            Graph(self.operators, self.name),
            self.s,
            self.kind,
            self.cuts,
            [*self.blocks, num_layers],
            **more,
        )


def _bert(b: Builder, config: Mapping[str, Any]) -> Model:
    h, f, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    words = config["vocab_size"]
    before = b.embedding(words, h, config["max_position_embeddings"] + config["type_vocab_size"])
    for number in range(config["num_hidden_layers"]):
        b.begin_block(number)
        at = f"layer.{number}."
        b.matmul(f"{at}qkv", h, 3 * h, calls=3)
        b.attention(f"{at}attention", heads, h)
        b.matmul(f"{at}projection", h, h)
        b.dropout_add(f"{at}attention.add", h, before)
        between = b.norm(f"{at}attention.norm", h)
        b.matmul(f"{at}up", h, f)
        b.elementwise(f"{at}gelu", f)
        b.matmul(f"{at}down", f, h)
        b.dropout_add(f"{at}add", h, between)
        before = b.norm(f"{at}norm", h)
    b.layer = None
    if any(word in b.architecture for word in ("MaskedLM", "PreTraining", "CausalLM", "LMHead")):
        b.matmul("transform", h, h, only=_WHOLE)
        b.elementwise("transform.gelu", h, only=_WHOLE)
        b.norm("transform.norm", h)
        b.head(words, h)
    else:
        b.add(
            "first_token", "reduction", width_in=h, width_out=h, rows_out=1, traffic=h, keeps_input=False
        )  # fmt: skip
        b.matmul("pooler", h, h, rows=1, only=_WHOLE, calls=2)
        b.matmul("classifier", h, config["num_labels"], rows=1, only=_WHOLE, calls=2)
        b.add("loss", "loss", width_in=config["num_labels"], width_out=1, rows=1, only=_WHOLE, calls=3)
    return b.finish(num_layers=config["num_hidden_layers"], divides={"num_attention_heads": heads})


def _gpt2(b: Builder, config: Mapping[str, Any]) -> Model:
    h, f, heads, words = (
        config["n_embd"],
        config.get("n_inner") or 4 * config["n_embd"],
        config["n_head"],
        config["vocab_size"],
    )
    before = b.embedding(words, h, config["n_positions"], has_norm=False)
    for number in range(config["n_layer"]):
        b.begin_block(number)
        at = f"h.{number}."
        b.norm(f"{at}ln_1", h)
        b.matmul(f"{at}qkv", h, 3 * h)
        b.attention(f"{at}attention", heads, h)
        b.matmul(f"{at}projection", h, h)
        between = b.dropout_add(f"{at}attention.add", h, before)
        b.norm(f"{at}ln_2", h)
        b.matmul(f"{at}up", h, f)
        b.elementwise(f"{at}gelu", f)
        b.matmul(f"{at}down", f, h)
        before = b.dropout_add(f"{at}add", h, between)
    b.layer = None
    b.norm("ln_f", h)
    if "SequenceClassification" in b.architecture:
        b.add("last_token", "reduction", width_in=h, width_out=h, rows_out=1, traffic=h, keeps_input=False)
        labels = config.get("num_labels", 2)
        b.matmul("score", h, labels, rows=1, parameters=h * labels, only=_WHOLE)
        b.add("loss", "loss", width_in=labels, width_out=1, rows=1, only=_WHOLE, calls=3)
    else:
        b.head(words, h)
    return b.finish(num_layers=config["n_layer"], divides={"n_head": heads})


def _mixtral(b: Builder, config: Mapping[str, Any]) -> Model:
    h, f, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    kv = config["num_key_value_heads"] * (h // heads)
    experts, top = config["num_local_experts"], config["num_experts_per_tok"]
    before = b.add(
        "embeddings.words", "embedding", (), width_out=h, parameters=config["vocab_size"] * h, traffic=3 * b.s * h,
        keeps_input=False, only=_BY_WORDS,
    )  # fmt: skip
    for number in range(config["num_hidden_layers"]):
        b.begin_block(number)
        at = f"layers.{number}."
        b.norm(f"{at}input_norm", h, parameters=h)
        b.matmul(f"{at}qkv", h, h + 2 * kv, parameters=h * (h + 2 * kv), calls=3)
        b.attention(f"{at}attention", heads, h, width_in=h + 2 * kv, kept=1)
        b.matmul(f"{at}projection", h, h, parameters=h * h)
        between = b.elementwise(f"{at}attention.add", h, (b._last, before), traffic=3 * b.s * h, keeps_input=False)
        norm = b.norm(f"{at}post_norm", h, parameters=h)
        b.matmul(f"{at}gate", h, experts, parameters=h * experts, only=_WHOLE, calls=4)
        b.add(
            f"{at}experts", "experts", (norm,), width_in=h, width_out=h, flops=top * 6 * b.s * h * f,
            parameters=experts * 3 * h * f, traffic=top * b.s * (6 * f + 4 * h), saved=top * b.s * (3 * f + h),
            copies=top, calls=8 * experts, only=(BATCH, EXPERT, COLUMN, NONE),
        )  # fmt: skip
        before = b.elementwise(f"{at}add", h, (b._last, between), traffic=3 * b.s * h, keeps_input=False)
    b.layer = None
    b.norm("norm", h, parameters=h)
    b.head(config["vocab_size"], h)
    heads_ = {"num_attention_heads": heads, "num_key_value_heads": config["num_key_value_heads"]}
    return b.finish(num_layers=config["num_hidden_layers"], divides=heads_, experts=experts)


def _t5(b: Builder, config: Mapping[str, Any]) -> Model:
    h, f, heads = config["d_model"], config["d_ff"], config["num_heads"]
    is_gated = config["is_gated_act"] or str(config.get("feed_forward_proj", "")).startswith("gated")
    inner, num_up = heads * config["d_kv"], 1 + is_gated
    decoder_layers = config.get("num_decoder_layers") or config["num_layers"]
    words = config["vocab_size"]

    def attend(at: str, before: str, memory: Optional[str]) -> str:
        norm = b.norm(f"{at}norm", h, parameters=h)
        if memory is None:
            b.matmul(f"{at}qkv", h, 3 * inner, parameters=3 * h * inner, calls=3)
            # The first layer of a stack holds the table of position biases for all its layers.
            table = config["relative_attention_num_buckets"] * heads if at.endswith(".0.self.") else 0
            b.attention(f"{at}attention", heads, inner, parameters=table)
        else:
            q = b.matmul(f"{at}q", h, inner, (norm,), parameters=h * inner)
            kv = b.matmul(f"{at}kv", h, 2 * inner, (memory,), parameters=2 * h * inner, calls=2)
            # Queries have one source, keys and values another; both have the same layout.
            b.attention(f"{at}attention", heads, inner, inputs=(q, kv))
        b.matmul(f"{at}o", inner, h, parameters=inner * h)
        return b.dropout_add(f"{at}add", h, before)

    def feed(at: str, before: str) -> str:
        b.norm(f"{at}norm", h, parameters=h)
        b.matmul(f"{at}wi", h, num_up * f, parameters=num_up * h * f, calls=num_up)
        b.elementwise(f"{at}act", num_up * f, masks=b.s * f if b.dropout else 0)
        b.matmul(f"{at}wo", num_up * f, h, flops=2 * b.s * f * h, parameters=f * h)
        return b.dropout_add(f"{at}add", h, before)

    def embed(stack: str, tied_to: Optional[str]) -> str:
        return b.add(
            f"{stack}.words", "embedding", (), width_out=h, parameters=words * h, traffic=3 * b.s * h,
            keeps_input=False, only=_BY_WORDS, tied_to=tied_to,
        )  # fmt: skip

    before = embed("encoder", None)
    for number in range(config["num_layers"]):
        b.layer = number
        before = feed(f"encoder.{number}.ff.", attend(f"encoder.{number}.self.", before, None))
    b.layer = None
    memory = b.norm("encoder.norm", h, parameters=h)
    b.begin_block(config["num_layers"])
    b.layer = None
    before = embed("decoder", "encoder.words")
    for number in range(decoder_layers):
        b.layer = config["num_layers"] + number
        before = attend(f"decoder.{number}.self.", before, None)
        before = attend(f"decoder.{number}.cross.", before, memory)
        before = feed(f"decoder.{number}.ff.", before)
    b.layer = None
    b.norm("decoder.norm", h, parameters=h)
    b.head(words, h, words_of="encoder.words")
    # The encoder and the decoder are one stage each.
    layers = config["num_layers"] + decoder_layers
    return b.finish(num_layers=layers, divides={"num_heads": heads}, most_stages=2)


def _is_on(config: Mapping[str, Any], *keys: str) -> bool:
    """Return whether dropout is on; like in the configurations' own defaults, it is on unless it is 0."""
    return all(config[key] for key in keys if key in config)


BUILDERS: dict[str, Callable[[Builder, Mapping[str, Any]], Model]] = {
    "bert": _bert, "roberta": _bert, "gpt2": _gpt2, "t5": _t5, "mixtral": _mixtral,
}  # fmt: skip
