"""This module defines the settings of a text classification job, beside those that all recipes have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mindnlp_dp.finetuning.pretrained import check_weights
from mindnlp_dp.finetuning.saved_model import adapters_of, check_kind
from mindnlp_dp.finetuning.settings import (
    FROM_SCRATCH,
    InputError,
    ParallelConfig,
    RunConfig,
    learning_rate_from_scratch,
    setting,
)
from mindnlp_dp.runtime.mesh_spec import parse_mesh

RATE_OF_LORA = 3e-4


@dataclass
class TaskConfig(RunConfig):
    """The data, the model and the training settings; every field is a key of a config file and a flag."""

    train_file: str = setting("", "CSV, TSV or JSON lines with texts and labels; empty: CLDR phrases, by language")
    dataset: str = setting("", "instead of files: a data set's hub name, or a folder that `datasets` can read")
    train_split: str = setting("train", "name of the training split of the data set")
    test_split: str = setting("test", "name of the held-out split of the data set")
    text_column: str = setting("", "column of the texts; empty: the one named text, text_a or sentence")
    label_column: str = setting("", "column of the labels; empty: the one named label, category or intent")
    output_dir: str = setting("outputs/quickstart", "output folder for the report, the plot and the model")

    model: str = setting(
        FROM_SCRATCH, "tiny: a RoBERTa from scratch; or a pretrained RoBERTa or BERT, hub name or folder"
    )
    vocab_size: int = setting(4000, "vocabulary size of the byte-level BPE tokenizer")
    lowercase: bool = setting(False, "whether that tokenizer converts text to lower case")
    max_length: int = setting(24, "maximum number of tokens of a text; longer texts are truncated")
    hidden_size: int = setting(128, "width of the model")
    num_layers: int = setting(2, "number of encoder layers")
    num_heads: int = setting(4, "number of attention heads")
    intermediate_size: int = setting(512, "width of the feed-forward layers")
    dropout: float = setting(0.0, "dropout in the model")

    def usual_learning_rate(self) -> float:
        if self.model == FROM_SCRATCH:
            return learning_rate_from_scratch(2e-3, self.hidden_size)
        return RATE_OF_LORA if adapters_of(self.model) else 5e-5

    def validate(self) -> None:
        if bool(self.train_file) != bool(self.test_file or (self.test_fraction and not self.dataset)):
            raise InputError("--train-file and --test-file (or --test-fraction) must be given together")
        if self.train_file and self.dataset:
            raise InputError("--train-file and --dataset are two sources of data; choose one")
        super().validate()
        if self.model != FROM_SCRATCH:
            check_weights(self.model, trust_pickle=self.trust_pickle)
            check_kind(self.model, "SEQ_CLS")
        for name in ("vocab_size", "max_length", "hidden_size", "num_layers", "num_heads", "intermediate_size"):
            self.check_at_least(1, name)
        if self.hidden_size % self.num_heads:
            raise InputError(f"hidden_size ({self.hidden_size}) must be divisible by num_heads ({self.num_heads})")
        if self.max_length < 3:
            raise InputError(f"max_length must be at least 3, because two tokens mark the ends; got {self.max_length}")

    @classmethod
    def replaced_by(cls, settings: Mapping[str, Any]) -> set[str]:
        """Return the data sources of another kind, which these settings replace."""
        replaced = {"dataset"} if "train_file" in settings or "test_file" in settings else set()
        return replaced | ({"train_file", "test_file"} if "dataset" in settings else set())


@dataclass
class FinetuneConfig(TaskConfig, ParallelConfig):
    """The settings of scripts/finetune.py."""

    predict_file: str = setting("", "a file of texts; the trained model's labels for them go to predictions.csv")
    dynamic_padding: bool = setting(True, "pad texts to the longest of a micro-batch; false: to max_length")
    label_smoothing: float = setting(0.0, "share of the target that is spread over all labels")
    class_weights: str = setting("", "balanced: a sample weighs the more, the rarer its label is; empty: equally")
    plan: str = setting("", "a file of mindnlp-dp plan --json; its best plan is used, and compared with the run")

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("loss", "accuracy", "macro_f1")

    def usual_learning_rate(self) -> float:
        return RATE_OF_LORA if self.lora_rank else super().usual_learning_rate()

    def validate(self) -> None:
        super().validate()
        check_kind(self.model, "SEQ_CLS", self.lora_rank)
        if not 0 <= self.label_smoothing < 1:
            raise InputError(f"label_smoothing must be from 0 to 1, got {self.label_smoothing}")
        if self.class_weights not in ("", "balanced"):
            raise InputError(f"class_weights must be balanced or empty, got {self.class_weights!r}")
        if self.class_weights and self.label_smoothing:
            raise InputError("class_weights and label_smoothing are two losses; choose one")
        if "pp" in parse_mesh(self.mesh) and (self.class_weights or self.label_smoothing):
            raise InputError(
                "a pipeline (pp) computes the model's own loss; leave class_weights and label_smoothing out"
            )
        if self.lora_rank and self.model == FROM_SCRATCH:
            raise InputError("lora_rank is for a pretrained model; pass --model FOLDER")
