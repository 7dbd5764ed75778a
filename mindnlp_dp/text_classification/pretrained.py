"""This module loads a pretrained encoder and its tokenizer from a model hub or a folder; task.py calls it.

The classifier gets a new head, unless it was trained for the same labels. RoBERTa, BERT, and all other models that
MindNLP's Auto classes know are supported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mindnlp_dp.finetuning.pretrained import load_pretrained
from mindnlp_dp.finetuning.settings import InputError
from mindnlp_dp.runtime.mindnlp_api import transformers_api


def load_tokenizer(name: str) -> Any:
    """Return the tokenizer of the model ``name``; raise InputError if it cannot be loaded."""
    return load_pretrained(transformers_api().AutoTokenizer, name, "tokenizer")


def encode(tokenizer: Any, texts: Sequence[str], max_length: int) -> tuple[dict[str, np.ndarray], int]:
    """Return token columns, int64 of shape (texts, max_length), and the number of truncated texts."""
    lengths = [len(ids) for ids in tokenizer(list(texts))["input_ids"]]
    encoded = tokenizer(list(texts), padding="max_length", truncation=True, max_length=max_length)
    columns = {name: np.array(encoded[name], np.int64) for name in list(encoded)}
    return columns, sum(length > max_length for length in lengths)


def load_classifier(
    name: str, label_names: Sequence[str], max_length: int, *, trust_pickle: bool = False
) -> tuple[Any, bool]:
    """Return the model ``name`` for these labels, and whether it has lost a head that was for other ones.

    Raises:
        InputError: the model cannot be loaded, its weights do not fit, or it accepts fewer than ``max_length`` tokens.
    """
    auto_class = transformers_api().AutoModelForSequenceClassification
    # MindNLP names no sizes in its error, and prints all others; they are compared below.
    model, found = load_pretrained(
        auto_class, name, "model", trust_pickle=trust_pickle, num_labels=len(label_names),
        ignore_mismatched_sizes=True, output_loading_info=True,
    )  # fmt: skip
    base = f"{model.base_model_prefix}."
    for weight, saved, expected in found["mismatched_keys"]:
        if weight.startswith(base) or not hasattr(model, model.base_model_prefix):
            raise InputError(
                f"the model {name} cannot be loaded: {weight} has shape {tuple(saved)}, but config.json says "
                f"{tuple(expected)}"
            )
    head = {weight for weight, _ in model.named_parameters() if not weight.startswith(base)}
    had_head = not head & set(found["missing_keys"])
    saved_config = load_pretrained(transformers_api().AutoConfig, name, "configuration")
    labels = [saved_config.id2label.get(number) for number in range(saved_config.num_labels)]
    is_new = had_head and labels != list(label_names)
    if is_new:
        for path, module in model.named_modules():
            if path and not f"{path}.".startswith(base):
                model._init_weights(module)
    positions = getattr(model.config, "max_position_embeddings", max_length)
    # RoBERTa's first position is the padding token's id plus 1.
    if "roberta" in model.config.model_type:
        positions -= model.config.pad_token_id + 1
    if max_length > positions:
        raise InputError(f"max_length ({max_length}) is more than the {positions} tokens that {name} takes")
    return model, is_new
