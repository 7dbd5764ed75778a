"""This module loads a pretrained encoder and its tokenizer from a model hub or a folder.

The classifier gets a new head, unless it was trained for the same labels. RoBERTa, BERT, and all other models that
MindNLP's Auto classes know are supported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mindnlp_dp.finetuning.pretrained import check_max_length, load_pretrained
from mindnlp_dp.finetuning.saved_model import adapters_of, load_saved
from mindnlp_dp.finetuning.settings import InputError
from mindnlp_dp.runtime.mindnlp_api import transformers_api


def encode(tokenizer: Any, texts: Sequence[str], max_length: int) -> tuple[dict[str, np.ndarray], int]:
    """Return token columns, int64 of shape (texts, max_length), and the number of truncated texts.

    Raises:
        InputError: the tokenizer has no token for padding.
    """
    if tokenizer.pad_token is None:
        raise InputError(
            f"the tokenizer {tokenizer.name_or_path} has no padding token, which a classifier needs: add pad_token to "
            "its tokenizer_config.json, and pad_token_id to config.json"
        )
    lengths = [len(ids) for ids in tokenizer(list(texts))["input_ids"]]
    encoded = tokenizer(list(texts), padding="max_length", truncation=True, max_length=max_length)
    columns = {name: np.array(encoded[name], np.int64) for name in list(encoded)}
    return columns, sum(length > max_length for length in lengths)


def load_classifier(
    name: str, label_names: Sequence[str], max_length: int, *, trust_pickle: bool = False
) -> tuple[Any, bool]:
    """Return the model ``name`` for these labels, and whether it has lost a head that was for other ones.

    Adapters are trained further, with the head that is saved with them.

    Raises:
        InputError: the model cannot be loaded, its weights do not fit, or it accepts fewer than ``max_length`` tokens;
            or adapters were trained for other labels.
    """
    if adapters_of(name):
        model, is_new = load_saved(name, "SEQ_CLS", is_trainable=True, trust_pickle=trust_pickle), False
        if labels_of(model.config) != list(label_names):
            raise InputError(
                f"the adapters of {name} were trained for the labels {_listed(labels_of(model.config))}, and the data "
                f"has {_listed(label_names)}; pass the model that they belong to, for new adapters and a new head"
            )
    else:
        model, is_new = _load_whole(name, label_names, trust_pickle=trust_pickle)
    check_max_length(model.config, max_length, name)
    return model, is_new


def _load_whole(name: str, label_names: Sequence[str], *, trust_pickle: bool) -> tuple[Any, bool]:
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
    is_new = had_head and labels_of(saved_config) != list(label_names)
    if is_new:
        for path, module in model.named_modules():
            if path and not f"{path}.".startswith(base):
                model._init_weights(module)
    return model, is_new


def labels_of(config: Any) -> list[Any]:
    """Return the names of a model's classes, in their order."""
    return [config.id2label.get(number) for number in range(config.num_labels)]


def _listed(labels: Sequence[Any]) -> str:
    return ", ".join(map(str, labels[:5])) + (f" and {len(labels) - 5} others" if len(labels) > 5 else "")
