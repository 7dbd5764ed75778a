"""This module loads a pretrained encoder and its tokenizer from a model hub or a folder; task.py calls it.

The classifier gets a new head. RoBERTa, BERT, and all other models that MindNLP's Auto classes know are supported.
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


def load_classifier(name: str, num_labels: int, max_length: int, *, trust_pickle: bool = False) -> Any:
    """Return the model ``name`` with a new head for ``num_labels`` classes; ``trust_pickle`` as in load_pretrained.

    Raises:
        InputError: the model cannot be loaded, or accepts fewer than ``max_length`` tokens.
    """
    auto_class = transformers_api().AutoModelForSequenceClassification
    model = load_pretrained(auto_class, name, "model", trust_pickle=trust_pickle, num_labels=num_labels)
    positions = getattr(model.config, "max_position_embeddings", max_length)
    # RoBERTa's first position is the padding token's id plus 1.
    if "roberta" in model.config.model_type:
        positions -= model.config.pad_token_id + 1
    if max_length > positions:
        raise InputError(f"max_length ({max_length}) is more than the {positions} tokens that {name} takes")
    return model
