"""The data and the model of a job, ready for a Trainer.

Goes in: the settings. Comes out: a training and a held-out split as arrays, the
names of the labels and the tokenizer (made once, on rank 0), and a RoBERTa to train.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from .config import FinetuneConfig
from .examples import InputError, cldr_phrases, label_ids, read_examples
from .tokenization import BOS, EOS, PAD, encode, train_tokenizer


@dataclass(frozen=True)
class TextClassificationTask:
    """Both splits as columns (``input_ids``, ``attention_mask``, ``labels``), and what their numbers mean."""

    train: dict[str, np.ndarray]
    test: dict[str, np.ndarray]
    label_names: list[str]
    tokenizer_json: str
    num_truncated: int

    @property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_str(self.tokenizer_json)


def prepare_task(config: FinetuneConfig) -> TextClassificationTask:
    """Read, split and tokenise the data.

    Raises:
        InputError: a file, or the data in it, is wrong.
    """
    if config.train_file:
        train, test = read_examples(config.train_file), read_examples(config.test_file)
    else:
        train, test = cldr_phrases()
    label_names = sorted(set(train.labels))
    if len(label_names) < 2:
        raise InputError(
            f"{config.train_file}: all rows have the label {label_names[0]!r}; there is nothing to tell apart"
        )
    tokenizer = train_tokenizer(train.texts, config.vocab_size, config.max_length)
    columns, num_truncated = [], 0
    for split, what in ((train, config.train_file), (test, config.test_file or "the held-out split")):
        arrays, truncated = encode(tokenizer, split.texts)
        arrays["labels"] = np.array(label_ids(split.labels, label_names, what), np.int64)
        columns.append(arrays)
        num_truncated += truncated
    return TextClassificationTask(columns[0], columns[1], label_names, tokenizer.to_str(), num_truncated)


def as_dataset(columns: dict[str, np.ndarray]) -> Any:
    """A ``datasets.Dataset`` over columns of arrays, which gives NumPy arrays back."""
    from datasets import Dataset

    return Dataset.from_dict(columns).with_format("numpy")


def build_roberta(config: FinetuneConfig, vocab_size: int, num_labels: int) -> Any:
    """A RoBERTa classifier from scratch. relu, because MindSpore's gelu is slow on CPU."""
    from mindnlp.transformers import RobertaConfig, RobertaForSequenceClassification

    return RobertaForSequenceClassification(
        RobertaConfig(
            vocab_size=vocab_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            intermediate_size=config.intermediate_size,
            # Positions count from behind the padding token's number.
            max_position_embeddings=config.max_length + PAD + 1,
            hidden_act="relu",
            hidden_dropout_prob=config.dropout,
            attention_probs_dropout_prob=config.dropout,
            num_labels=num_labels,
            bos_token_id=BOS,
            pad_token_id=PAD,
            eos_token_id=EOS,
        )
    )
