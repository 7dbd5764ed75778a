"""Small models of every family that MindNLP has, built from their own configuration classes, and batches for them."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np

LENGTH, VOCAB_SIZE, NUM_LABELS, NUM_CHOICES = 12, 64, 3, 2
IGNORED = -100
# The token types of which small models know two; words begin after the special tokens.
FIRST_WORD = 5

# Heads for text, by the end of a class's name: what a batch for them holds.
HEADS = {
    "ForSequenceClassification": "classes",
    "ForTokenClassification": "token classes",
    "ForCausalLM": "words",
    "LMHeadModel": "words",
    "ForMaskedLM": "words",
    "ForConditionalGeneration": "words",
    "MTModel": "words",
    "ModelWithLMHead": "words",
    "ForQuestionAnswering": "spans",
    "ForQuestionAnsweringSimple": "spans",
    "ForMultipleChoice": "choices",
}

# What a configuration has one for, of a model that is made of several.
_PARTS = ("text", "vision", "speech", "audio", "qformer", "encoder", "decoder", "t2u", "vocoder")

# What makes a configuration small, by the names that configuration classes give it.
_SIZES = {
    32: (
        "hidden_size", "d_model", "n_embd", "dim", "embedding_size", "emb_dim", "embed_dim", "d_embed",
        "word_embed_proj_dim", "rotary_dim_total", "attention_hidden_size", "true_hidden_size",
    ),
    64: (
        "intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "d_inner", "n_inner", "dff",
        "hidden_dim", "ffn_hidden_size", "feed_forward_size", "inner_dim", "dim_ff", "d_ffn", "expert_hidden_size",
        "moe_intermediate_size", "shared_expert_intermediate_size", "vocab_size", "src_vocab_size", "tgt_vocab_size",
        "decoder_vocab_size", "n_positions", "n_ctx", "max_position_embeddings", "max_seq_len", "max_seq_length",
        "max_encoder_position_embeddings", "max_decoder_position_embeddings", "seq_length", "max_2d_position_embeddings",
        "max_length_position_embeddings", "padded_vocab_size", "entity_vocab_size", "context_length",
    ),
    2: (
        "num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers",
        "num_encoder_layers", "num_decoder_layers", "num_key_value_heads", "type_vocab_size", "kv_n_heads",
        "num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "num_kv_heads",
        "multi_query_group_num", "num_key_value_groups",
    ),
    4: (
        "num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads",
        "num_encoder_attention_heads", "num_decoder_attention_heads",
    ),
    8: ("d_kv", "head_dim", "kv_channels", "attention_head_size", "dim_head", "rotary_dim", "attention_window"),
}  # fmt: skip
_SMALL: dict[str, Any] = {name: size for size, names in _SIZES.items() for name in names}
# Randomness would differ between what is compared.
_RANDOM = ("dropout", "pdrop", "layerdrop", "_drop", "dropout_rate", "drop_path_rate", "dropout_prob")


@dataclass(frozen=True)
class ModelClass:
    """A model class of MindNLP, and the folder of ``mindnlp.transformers.models`` that it is in."""

    family: str
    name: str
    module: str

    @property
    def head(self) -> str:
        return next(head for head in sorted(HEADS, key=len, reverse=True) if self.name.endswith(head))

    def load(self) -> Any:
        return getattr(importlib.import_module(self.module), self.name)


def model_classes() -> Iterator[ModelClass]:
    """Find every class with a head for text that MindNLP's model folders define, in the order of their names."""
    from mindnlp.transformers import PreTrainedModel, models

    for family in sorted(each.name for each in pkgutil.iter_modules(models.__path__)):
        folder = importlib.import_module(f"mindnlp.transformers.models.{family}")
        for file in sorted(each.name for each in pkgutil.iter_modules(folder.__path__)):
            if not file.startswith("modeling_") or "graph" in file:
                continue
            module = importlib.import_module(f"{folder.__name__}.{file}")
            for name, found in sorted(vars(module).items()):
                is_model = inspect.isclass(found) and issubclass(found, PreTrainedModel)
                if is_model and found.__module__ == module.__name__ and name.endswith(tuple(HEADS)) and _is_for_text(found):
                    yield ModelClass(family, name, module.__name__)


def _is_for_text(model_class: Any) -> bool:
    """Tell whether a model is made of one configuration, and reads nothing but text and boxes around it."""
    inputs = list(inspect.signature(model_class.forward).parameters)
    settings = inspect.signature(model_class.config_class.__init__).parameters
    is_composite = any(name.startswith(_PARTS) and name.endswith("_config") for name in settings)
    sees = {"pixel_values", "image", "visual_embeds", "input_features", "input_values"} & set(inputs)
    return inputs[1:2] == ["input_ids"] and not is_composite and not sees


def small_config(config_class: Any, **settings: Any) -> Any:
    """A configuration of two layers of width 32, without dropout, where the class has names for that."""
    names = inspect.signature(config_class.__init__).parameters
    small = {name: value for name, value in _SMALL.items() if name in names}
    small.update({name: 0.0 for name in names if name.endswith(_RANDOM) and not name.startswith("use_")})
    return config_class(**{**small, **settings})
