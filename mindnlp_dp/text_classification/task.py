"""This module prepares the data, the tokenizer and the model of a job; scripts/finetune.py calls it.

Rank 0 alone calls :func:`prepare_task`, and the other ranks receive its result.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from mindnlp_dp.finetuning.settings import InputError
from mindnlp_dp.runtime.mindnlp_api import transformers_api
from mindnlp_dp.text_classification import hub, pretrained
from mindnlp_dp.text_classification.cldr import cldr_phrases
from mindnlp_dp.text_classification.config import FROM_SCRATCH, TaskConfig
from mindnlp_dp.text_classification.examples import Columns, Examples, label_ids, read_examples
from mindnlp_dp.text_classification.tokenization import BOS, EOS, PAD, encode, train_tokenizer


@dataclass(frozen=True)
class TextClassificationTask:
    """Both splits as columns (``input_ids``, ``attention_mask``, ``labels``, ...), with label names and tokenizer.

    ``tokenizer_json`` is the tokenizer trained for this job; it is empty for a pretrained model, which has its own.
    """

    train: dict[str, np.ndarray]
    test: dict[str, np.ndarray]
    label_names: list[str]
    num_truncated: int
    tokenizer_json: str = ""


def prepare_task(config: TaskConfig) -> TextClassificationTask:
    """Read, split and tokenise the data.

    Raises:
        InputError: a file, a data set or a tokenizer cannot be loaded, or its data is wrong.
    """
    train, test, train_name, test_name = _read(config)
    label_names = sorted(set(train.labels))
    if len(label_names) < 2:
        raise InputError(f"{train_name}: all rows have the label {label_names[0]!r}; there is nothing to tell apart")
    # Checked before the slow tokenization, so that an unknown label in the held-out split is reported at once.
    labels = [
        np.array(label_ids(split.labels, label_names, name), np.int64)
        for split, name in ((train, train_name), (test, test_name))
    ]
    tokenizer_json = ""
    if config.model == FROM_SCRATCH:
        trained = train_tokenizer(train.texts, config.vocab_size, config.max_length, lowercase=config.lowercase)
        tokenizer_json = trained.to_str()
        encoded = [encode(trained, split.texts) for split in (train, test)]
    else:
        pretrained_tokenizer = pretrained.load_tokenizer(config.model)
        encoded = [pretrained.encode(pretrained_tokenizer, split.texts, config.max_length) for split in (train, test)]
    (train_columns, train_truncated), (test_columns, test_truncated) = encoded
    train_columns["labels"], test_columns["labels"] = labels
    return TextClassificationTask(
        train_columns, test_columns, label_names, train_truncated + test_truncated, tokenizer_json
    )


def _read(config: TaskConfig) -> tuple[Examples, Examples, str, str]:
    """Return both splits, and their names for messages."""
    columns = Columns(config.text_column, config.label_column)
    if config.dataset:
        train, test = (
            hub.load_examples(config.dataset, split, columns) for split in (config.train_split, config.test_split)
        )
        return train, test, f"{config.dataset} ({config.train_split})", f"{config.dataset} ({config.test_split})"
    if config.train_file:
        train, test = (read_examples(path, columns) for path in (config.train_file, config.test_file))
        return train, test, config.train_file, config.test_file
    train, test = cldr_phrases()
    return train, test, "the training split", "the held-out split"


def save_tokenizer(config: TaskConfig, task: TextClassificationTask, folder: str) -> None:
    """Write the tokenizer into the model's folder."""
    if task.tokenizer_json:
        Tokenizer.from_str(task.tokenizer_json).save(str(Path(folder) / "tokenizer.json"))
    else:
        pretrained.load_tokenizer(config.model).save_pretrained(folder)


def as_dataset(columns: dict[str, np.ndarray]) -> Any:
    """Return the columns as a ``datasets.Dataset`` that returns NumPy arrays."""
    from datasets import Dataset

    return Dataset.from_dict(columns).with_format("numpy")


def build_model(config: TaskConfig, task: TextClassificationTask) -> Any:
    """Return the classifier to train; raise InputError if a pretrained one cannot be loaded."""
    num_labels = len(task.label_names)
    if config.model == FROM_SCRATCH:
        model = build_roberta(config, Tokenizer.from_str(task.tokenizer_json).get_vocab_size(), num_labels)
    else:
        model = pretrained.load_classifier(
            config.model, num_labels, config.max_length, trust_pickle=config.trust_pickle
        )
    model.config.id2label = dict(enumerate(task.label_names))
    model.config.label2id = {name: i for i, name in enumerate(task.label_names)}
    return model


def build_roberta(config: TaskConfig, vocab_size: int, num_labels: int) -> Any:
    """Return a RoBERTa classifier with random weights; it uses relu, because MindSpore's gelu is slow on CPU."""
    library = transformers_api()
    return library.RobertaForSequenceClassification(
        library.RobertaConfig(
            vocab_size=vocab_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            intermediate_size=config.intermediate_size,
            # RoBERTa's first position is the padding token's id plus 1.
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
