"""Builds the operator graphs of BERT, RoBERTa, GPT-2 and T5 from MindNLP configurations, and knows all builders.

:func:`~mindnlp_dp.planner.load_model` calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Optional

from mindnlp_dp.planner.profiles import decoders
from mindnlp_dp.planner.profiles.builder import BY_WORDS, WHOLE, Builder
from mindnlp_dp.planner.profiles.operator_graph import Model


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
        b.matmul("transform", h, h, only=WHOLE)
        b.elementwise("transform.gelu", h, only=WHOLE)
        b.norm("transform.norm", h)
        b.head(words, h)
    else:
        b.add(
            "first_token", "reduction", width_in=h, width_out=h, rows_out=1, traffic=h, keeps_input=False
        )  # fmt: skip
        b.matmul("pooler", h, h, rows=1, only=WHOLE, calls=2)
        b.matmul("classifier", h, config["num_labels"], rows=1, only=WHOLE, calls=2)
        b.add("loss", "loss", width_in=config["num_labels"], width_out=1, rows=1, only=WHOLE, calls=3)
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
        b.matmul("score", h, labels, rows=1, parameters=h * labels, only=WHOLE)
        b.add("loss", "loss", width_in=labels, width_out=1, rows=1, only=WHOLE, calls=3)
    else:
        b.head(words, h)
    return b.finish(num_layers=config["n_layer"], divides={"n_head": heads})


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
            keeps_input=False, only=BY_WORDS, tied_to=tied_to,
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


BUILDERS: dict[str, Callable[[Builder, Mapping[str, Any]], Model]] = {
    "bert": _bert, "roberta": _bert, "gpt2": _gpt2, "t5": _t5, "llama": decoders.llama, "qwen2": decoders.llama,
    "mistral": decoders.llama, "gemma": decoders.llama, "phi": decoders.phi, "opt": decoders.opt,
    "mixtral": decoders.mixtral,
}  # fmt: skip
