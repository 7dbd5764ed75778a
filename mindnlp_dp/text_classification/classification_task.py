"""This module prepares the data, the tokenizer and the model of a job; scripts/finetune.py calls it.

Rank 0 alone calls :func:`prepare_task`, and the other ranks receive its result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np
from tokenizers import Tokenizer

from mindnlp_dp.communication.default_group import get_process_group
from mindnlp_dp.finetuning.files import read_rows
from mindnlp_dp.finetuning.lora import with_lora
from mindnlp_dp.finetuning.recipe_arguments import chosen, held_out
from mindnlp_dp.finetuning.settings import FROM_SCRATCH, InputError
from mindnlp_dp.finetuning.tokenizers import as_pretrained, load_tokenizer
from mindnlp_dp.runtime.adapters import has_adapters
from mindnlp_dp.runtime.mindnlp_api import transformers_api
from mindnlp_dp.text_classification import hub, pretrained_classifier
from mindnlp_dp.text_classification.classification_config import FinetuneConfig, TaskConfig
from mindnlp_dp.text_classification.cldr import cldr_phrases
from mindnlp_dp.text_classification.examples import Columns, Examples, label_ids, read_examples, texts_of
from mindnlp_dp.text_classification.tokenize_texts import BOS, EOS, PAD, encode, train_tokenizer


@dataclass(frozen=True)
class TextClassificationTask:
    """Both splits as columns (``input_ids``, ``attention_mask``, ``labels``, ...), with label names and tokenizer.

    ``tokenizer_json`` is the tokenizer trained for this job; it is empty for a pretrained model, which has its own.
    ``unlabelled`` has the columns of the texts of ``--predict-file``, without labels.
    """

    train: dict[str, np.ndarray]
    test: dict[str, np.ndarray]
    label_names: list[str]
    num_truncated: int
    tokenizer_json: str = ""
    unlabelled: Optional[dict[str, np.ndarray]] = None
    unlabelled_texts: Sequence[str] = ()


@dataclass(frozen=True)
class LabelledSplits:
    """Both splits as texts, and the label of each as an index of ``label_names``."""

    train: Examples
    test: Examples
    label_names: list[str]
    labels: tuple[np.ndarray, np.ndarray]
    unlabelled: Sequence[str] = ()

    def __str__(self) -> str:
        return f"{len(self.train)} training and {len(self.test)} held-out texts, {len(self.label_names)} labels"


def read_splits(config: TaskConfig) -> LabelledSplits:
    """Read the data; raise InputError if a file or a data set cannot be loaded, or a label is wrong."""
    train, test, train_name, test_name = _read(config)
    # Those of all rows, of which max_train_samples may leave out the only ones of a label.
    label_names = sorted(set(train.labels))
    if len(label_names) < 2:
        raise InputError(f"{train_name}: all rows have the label {label_names[0]!r}; there is nothing to classify")
    train = train.at(chosen(len(train), config.max_train_samples, config.seed))
    train_labels, test_labels = (
        np.array(label_ids(split.labels, label_names, name), np.int64)
        for split, name in ((train, train_name), (test, test_name))
    )
    unlabelled: Sequence[str] = ()
    if isinstance(config, FinetuneConfig) and config.predict_file:
        unlabelled = texts_of(read_rows(config.predict_file), Columns(config.text_column), config.predict_file)
    return LabelledSplits(train, test, label_names, (train_labels, test_labels), unlabelled)


def prepare_task(config: TaskConfig, splits: Optional[LabelledSplits] = None) -> TextClassificationTask:
    """Tokenize the data, which is read if it is not given.

    Raises:
        InputError: a file, a data set or a tokenizer cannot be loaded, or its data is wrong.
    """
    splits = splits or read_splits(config)
    texts = [splits.train.texts, splits.test.texts, *([splits.unlabelled] if splits.unlabelled else [])]
    tokenizer_json = ""
    if config.model == FROM_SCRATCH:
        trained = train_tokenizer(texts[0], config.vocab_size, config.max_length, lowercase=config.lowercase)
        tokenizer_json = trained.to_str()
        encoded = [encode(trained, each) for each in texts]
    else:
        tokenizer = load_tokenizer(config.model)
        encoded = [pretrained_classifier.encode(tokenizer, each, config.max_length) for each in texts]
    (train, _), (test, _), *more = encoded
    train["labels"], test["labels"] = splits.labels
    return TextClassificationTask(
        train, test, splits.label_names, sum(truncated for _, truncated in encoded), tokenizer_json,
        more[0][0] if more else None, splits.unlabelled,
    )  # fmt: skip


def _read(config: TaskConfig) -> tuple[Examples, Examples, str, str]:
    """Return both splits, and their names for messages."""
    columns = Columns(config.text_column, config.label_column)
    if config.dataset:
        names = [config.train_split] if config.test_fraction else [config.train_split, config.test_split]
        read = [(hub.load_examples(config.dataset, name, columns), f"{config.dataset} ({name})") for name in names]
    elif config.train_file:
        read = [(read_examples(path, columns), path) for path in (config.train_file, config.test_file) if path]
    else:
        read = list(zip(cldr_phrases(), ("the training split", "the held-out split")))
    (train, train_name), (test, test_name) = read[0], read[-1]
    if len(read) == 1:
        is_test = held_out(np.array(train.labels), config.test_fraction, config.seed, train_name)
        train, test = train.at(np.flatnonzero(~is_test)), train.at(np.flatnonzero(is_test))
    return train, test, train_name, test_name


def save_tokenizer(config: TaskConfig, task: TextClassificationTask, folder: str) -> None:
    """Write the tokenizer into the model's folder."""
    if task.tokenizer_json:
        tokenizer = as_pretrained(
            task.tokenizer_json, config.max_length, bos_token="<s>", eos_token="</s>", cls_token="<s>",
            sep_token="</s>", pad_token="<pad>", unk_token="<unk>", mask_token="<mask>",
        )  # fmt: skip
        tokenizer.save_pretrained(folder)
    else:
        load_tokenizer(config.model).save_pretrained(folder)


def as_dataset(columns: dict[str, np.ndarray]) -> Any:
    """Return the columns, and the texts' lengths, as a ``datasets.Dataset`` that returns NumPy arrays."""
    from datasets import Dataset

    lengths = columns["attention_mask"].sum(axis=1)
    return Dataset.from_dict({**columns, "length": lengths}).with_format("numpy")


def build_model(config: TaskConfig, task: TextClassificationTask) -> Any:
    """Return the classifier to train; raise InputError if a pretrained one cannot be loaded."""
    num_labels = len(task.label_names)
    if config.model == FROM_SCRATCH:
        model = build_roberta(config, Tokenizer.from_str(task.tokenizer_json).get_vocab_size(), num_labels)
    else:
        model, is_new = pretrained_classifier.load_classifier(
            config.model, task.label_names, config.max_length, trust_pickle=config.trust_pickle
        )
        if is_new and get_process_group().is_main:
            print(f"{config.model} was trained for other labels: the classifier gets a new head")
    model.config.id2label = dict(enumerate(task.label_names))
    model.config.label2id = {name: i for i, name in enumerate(task.label_names)}
    # The model may have been trained for several labels a text, or for a number.
    model.config.problem_type = "single_label_classification"
    if isinstance(config, FinetuneConfig) and config.lora_rank and not has_adapters(model):
        return with_lora(model, config.model, config, "SEQ_CLS")
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
