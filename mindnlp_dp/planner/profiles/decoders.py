"""Builds the operator graphs of decoders: the Llama family (Qwen2, Mistral, Gemma), Mixtral, Phi and OPT.

architectures.py registers these builders beside those of the older models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindnlp_dp.planner.profiles.builder import BY_WORDS, WHOLE, Builder
from mindnlp_dp.planner.profiles.operator_graph import BATCH, COLUMN, EXPERT, NONE, Model


class _Heads:
    """The widths of attention with fewer key and value heads than query heads."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.num = config["num_attention_heads"]
        self.num_kv = config.get("num_key_value_heads") or self.num
        size = config.get("head_dim") or config["hidden_size"] // self.num
        self.q, self.kv = self.num * size, self.num_kv * size

    def divides(self) -> dict[str, int]:
        return {"num_attention_heads": self.num, "num_key_value_heads": self.num_kv}


def _words(b: Builder, words: int, width: int, config: Mapping[str, Any]) -> str:
    # Unlike older models, these have no dropout of attention weights by default.
    b.attention_dropout = bool(config.get("attention_dropout"))
    return b.add(
        "embeddings.words", "embedding", (), width_out=width, parameters=words * width, traffic=3 * b.s * width,
        keeps_input=False, only=BY_WORDS,
    )  # fmt: skip


def _attend(b: Builder, at: str, h: int, heads: _Heads, *, biases: tuple[bool, bool] = (False, False)) -> str:
    """Add queries, keys and values, rotary positions, attention and its output; ``biases`` are of the two products."""
    width = heads.q + 2 * heads.kv
    b.matmul(f"{at}qkv", h, width, parameters=(h + biases[0]) * width, calls=3)
    # Each position's queries and keys are rotated: two products and a sum, of which the products keep their inputs.
    rotated = b.s * (heads.q + heads.kv)
    b.elementwise(f"{at}rotary", width, traffic=6 * rotated, saved=2 * rotated, calls=14, keeps_input=False)
    b.attention(f"{at}attention", heads.num, heads.q, width_in=width, kept=1)
    return b.matmul(f"{at}projection", heads.q, h, parameters=(heads.q + biases[1]) * h)


def _add(b: Builder, name: str, h: int, *inputs: str) -> str:
    return b.elementwise(name, h, inputs, traffic=3 * b.s * h, keeps_input=False)


def llama(b: Builder, config: Mapping[str, Any]) -> Model:
    """Build Llama, Qwen2, Mistral or Gemma, which differ in biases and in the width of the heads."""
    h, f, words, heads = config["hidden_size"], config["intermediate_size"], config["vocab_size"], _Heads(config)
    biases = (True, False) if b.kind == "qwen2" else (bool(config.get("attention_bias")),) * 2
    before = _words(b, words, h, config)
    for number in range(config["num_hidden_layers"]):
        b.begin_block(number)
        at = f"layers.{number}."
        b.norm(f"{at}input_norm", h, parameters=h)
        between = _add(b, f"{at}attention.add", h, _attend(b, at, h, heads, biases=biases), before)
        b.norm(f"{at}post_norm", h, parameters=h)
        b.matmul(f"{at}gate_up", h, 2 * f, parameters=2 * h * f, calls=2)
        # The product of the gate's activation and the other half, which keeps both.
        b.elementwise(f"{at}act", 2 * f, traffic=6 * b.s * f, saved=b.s * f, calls=2)
        before = _add(
            b, f"{at}add", h, b.matmul(f"{at}down", 2 * f, h, flops=2 * b.s * f * h, parameters=f * h), between
        )
    b.layer = None
    b.norm("norm", h, parameters=h)
    b.head(words, h)
    return b.finish(num_layers=config["num_hidden_layers"], divides=heads.divides())


def mixtral(b: Builder, config: Mapping[str, Any]) -> Model:
    """Build Mixtral, whose feed-forward layers are experts."""
    h, f, heads = config["hidden_size"], config["intermediate_size"], _Heads(config)
    experts, top = config["num_local_experts"], config["num_experts_per_tok"]
    width = heads.q + 2 * heads.kv
    before = _words(b, config["vocab_size"], h, config)
    for number in range(config["num_hidden_layers"]):
        b.begin_block(number)
        at = f"layers.{number}."
        b.norm(f"{at}input_norm", h, parameters=h)
        b.matmul(f"{at}qkv", h, width, parameters=h * width, calls=3)
        b.attention(f"{at}attention", heads.num, heads.q, width_in=width, kept=1)
        b.matmul(f"{at}projection", h, h, parameters=h * h)
        between = _add(b, f"{at}attention.add", h, b.last, before)
        norm = b.norm(f"{at}post_norm", h, parameters=h)
        b.matmul(f"{at}gate", h, experts, parameters=h * experts, only=WHOLE, calls=4)
        b.add(
            f"{at}experts", "experts", (norm,), width_in=h, width_out=h, flops=top * 6 * b.s * h * f,
            parameters=experts * 3 * h * f, traffic=top * b.s * (6 * f + 4 * h), saved=top * b.s * (3 * f + h),
            copies=top, calls=8 * experts, only=(BATCH, EXPERT, COLUMN, NONE),
        )  # fmt: skip
        before = _add(b, f"{at}add", h, b.last, between)
    b.layer = None
    b.norm("norm", h, parameters=h)
    b.head(config["vocab_size"], h)
    return b.finish(num_layers=config["num_hidden_layers"], divides=heads.divides(), experts=experts)


def phi(b: Builder, config: Mapping[str, Any]) -> Model:
    """Build Phi, whose attention and feed-forward layers have the same input."""
    h, f, words, heads = config["hidden_size"], config["intermediate_size"], config["vocab_size"], _Heads(config)
    before = _words(b, words, h, config)
    for number in range(config["num_hidden_layers"]):
        b.begin_block(number)
        at = f"layers.{number}."
        norm = b.norm(f"{at}norm", h)
        attended = _attend(b, at, h, heads, biases=(True, True))
        b.matmul(f"{at}up", h, f, (norm,))
        b.elementwise(f"{at}gelu", f)
        # Attention and the feed-forward layers have the same input.
        before = _add(b, f"{at}add", h, b.matmul(f"{at}down", f, h), attended, before)
    b.layer = None
    b.norm("norm", h)
    b.head(words, h, parameters=(h + 1) * words)
    return b.finish(num_layers=config["num_hidden_layers"], divides=heads.divides())


def opt(b: Builder, config: Mapping[str, Any]) -> Model:
    """Build OPT, whose words may be narrower than its layers."""
    h, f, words, heads = config["hidden_size"], config["ffn_dim"], config["vocab_size"], config["num_attention_heads"]
    narrow = config.get("word_embed_proj_dim") or h
    _words(b, words, narrow, config)
    if narrow != h:
        b.matmul("project_in", narrow, h, parameters=narrow * h, only=WHOLE)
    # OPT numbers positions from two on.
    before = b.elementwise(
        "embeddings.positions", h, parameters=(config["max_position_embeddings"] + 2) * h, calls=3, only=WHOLE,
        keeps_input=False,
    )  # fmt: skip
    for number in range(config["num_hidden_layers"]):
        b.begin_block(number)
        at = f"layers.{number}."
        b.norm(f"{at}attention.norm", h)
        b.matmul(f"{at}qkv", h, 3 * h, calls=3)
        b.attention(f"{at}attention", heads, h)
        b.matmul(f"{at}projection", h, h)
        between = b.dropout_add(f"{at}attention.add", h, before)
        b.norm(f"{at}norm", h)
        b.matmul(f"{at}up", h, f)
        b.elementwise(f"{at}relu", f)
        b.matmul(f"{at}down", f, h)
        before = b.dropout_add(f"{at}add", h, between)
    b.layer = None
    b.norm("norm", h)
    if narrow != h:
        b.matmul("project_out", h, narrow, parameters=narrow * h, only=WHOLE)
    b.head(words, narrow)
    return b.finish(num_layers=config["num_hidden_layers"], divides={"num_attention_heads": heads})
