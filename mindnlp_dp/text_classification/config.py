"""This module defines the settings of a text classification job, beside those that all recipes have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mindnlp_dp.finetuning.pretrained import check_weights
from mindnlp_dp.finetuning.settings import InputError, ParallelConfig, RunConfig, setting

FROM_SCRATCH = "tiny"


@dataclass
class TaskConfig(RunConfig):
    """The data, the model and the training settings; every field is a key of a config file and a flag."""

    train_file: str = setting("", "CSV, TSV or JSON lines with texts and labels; empty: CLDR phrases, by language")
    test_file: str = setting("", "the held-out split, in the same form")
    dataset: str = setting("", "instead of files: a data set's hub name, or a folder that `datasets` can read")
    train_split: str = setting("train", "name of the training split of the data set")
    test_split: str = setting("test", "name of the held-out split of the data set")
    text_column: str = setting("", "column of the texts; empty: the one named text, text_a or sentence")
    label_column: str = setting("", "column of the labels; empty: the one named label, category or intent")
    output_dir: str = setting("outputs/quickstart", "output folder for the report, the plot and the model")

    model: str = setting(
        FROM_SCRATCH, "tiny: a RoBERTa from scratch; or a pretrained RoBERTa or BERT, hub name or folder"
    )
    trust_pickle: bool = setting(False, "load weights that are not safetensors; unpickling runs their author's code")
    vocab_size: int = setting(4000, "vocabulary size of the byte-level BPE tokenizer")
    lowercase: bool = setting(False, "whether that tokenizer converts text to lower case")
    max_length: int = setting(24, "maximum number of tokens of a text; longer texts are truncated")
    hidden_size: int = setting(128, "width of the model")
    num_layers: int = setting(2, "number of encoder layers")
    num_heads: int = setting(4, "number of attention heads")
    intermediate_size: int = setting(512, "width of the feed-forward layers")
    dropout: float = setting(0.0, "dropout in the model")

    def check(self) -> None:
        if bool(self.train_file) != bool(self.test_file):
            raise InputError("--train-file and --test-file must be given together")
        if self.train_file and self.dataset:
            raise InputError("--train-file and --dataset are two sources of data; choose one")
        super().check()
        if self.model != FROM_SCRATCH:
            check_weights(self.model, trust_pickle=self.trust_pickle)
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

    plan: str = setting("", "a file of mindnlp-dp plan --json; its best plan is used, and compared with the run")
