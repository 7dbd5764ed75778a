"""Adds operators to the graph of a model one after another; architectures.py and decoders.py use it.

Sizes are per sample. An operator keeps for the backward pass what autograd keeps, so a transformer layer in half
precision keeps s b h (34 + 5 a s / h) bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional

from mindnlp_dp.planner.profiles.operator_graph import BATCH, COLUMN, NONE, VOCABULARY, Graph, Model, Operator

# The roles of operators that tensor parallelism repeats on all devices, and of embeddings, as in mindnlp_dp.parallel.
WHOLE = (BATCH, NONE)

BY_WORDS = (BATCH, VOCABULARY, NONE)


class Builder:
    """Builds a graph by adding operators one after another; sizes are per sample."""

    def __init__(self, name: str, kind: str, sequence: int, config: Mapping[str, Any]) -> None:
        self.name, self.kind, self.s = name, kind, sequence
        self.architecture = " ".join(config.get("architectures") or ())
        self.is_tied = config.get("tie_word_embeddings", True)
        self.operators: list[Operator] = []
        self.split_points: list[int] = []
        self.blocks = [0]
        # The operator that was added last, which the next one takes as its input.
        self.last = ""
        # The transformer layer that operators are added to; None outside of the layers.
        self.layer: Optional[int] = None
        # Whether the layers' outputs and the attention have dropout.
        self.dropout = _is_on(config, "hidden_dropout_prob", "resid_pdrop", "dropout_rate", "dropout")
        self.attention_dropout = _is_on(config, "attention_probs_dropout_prob", "attn_pdrop", "dropout_rate")

    def add(self, name: str, kind: str, inputs: Optional[tuple[str, ...]] = None, **sizes: Any) -> str:
        inputs = ((self.last,) if self.last else ()) if inputs is None else inputs
        sizes.setdefault("rows", self.s)
        self.operators.append(Operator(name, kind, inputs, layer=self.layer, **sizes))
        self.last = name
        return name

    def begin_block(self, number: int) -> None:
        if number:
            self.split_points.append(len(self.operators))
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
        return self.elementwise(name, width, (self.last, residual), keeps_input=False, **numbers)

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
            traffic=3 * self.s * width, keeps_input=False, only=BY_WORDS,
        )  # fmt: skip
        self.elementwise(
            "embeddings.positions", width, parameters=others * width, masks=self.s * width if self.dropout else 0,
            calls=3, only=WHOLE, keeps_input=False,
        )  # fmt: skip
        return self.norm("embeddings.norm", width) if has_norm else self.last

    def head(self, words: int, width: int, *, words_of: str = "embeddings.words", parameters: int = 0) -> None:
        """Add logits over the vocabulary, by the embedding's table or a separate one, and the loss."""
        tied_to = words_of if self.is_tied else None
        self.matmul(
            "head", width, words, parameters=parameters or words * width, tied_to=tied_to, only=(BATCH, COLUMN, NONE)
        )
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
            self.split_points,
            [*self.blocks, num_layers],
            **more,
        )


def _is_on(config: Mapping[str, Any], *keys: str) -> bool:
    """Return whether dropout is on; like in the configurations' own defaults, it is on unless it is 0."""
    return all(config[key] for key in keys if key in config)
