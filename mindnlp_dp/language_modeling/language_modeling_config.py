"""This module defines the settings of scripts/finetune_llm.py, beside those that all recipes have."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mindnlp_dp.finetuning.pretrained import check_weights
from mindnlp_dp.finetuning.saved_model import adapters_of, check_kind
from mindnlp_dp.finetuning.settings import FROM_SCRATCH, InputError, ParallelConfig, learning_rate_from_scratch, setting

TEMPLATES = ("plain", "chatml", "alpaca", "tokenizer")
OBJECTIVES = ("sft", "dpo", "ipo", "simpo", "orpo")


@dataclass
class LanguageModelingConfig(ParallelConfig):
    """The settings of scripts/finetune_llm.py: data, model, LoRA, and those of every run."""

    train_file: str = setting(
        "", "prompts and completions, messages, Alpaca, ShareGPT or texts; several as a.json:0.5,b.csv; empty: a manual"
    )
    template: str = setting("plain", "plain: prompt and completion; chatml; alpaca; tokenizer: the tokenizer's own")
    objective: str = setting(
        "sft", "sft: the texts; dpo, ipo, simpo or orpo: preferences, rows of prompt, chosen and rejected"
    )
    beta: float = setting(0.1, "how much the preferences count: beta of dpo, ipo and simpo, lambda of orpo")
    simpo_gamma: float = setting(0.5, "simpo: the margin that the rewards of two answers should have")
    packing: bool = setting(False, "put several texts into one row of max_length tokens; none sees the others")
    cache_dir: str = setting("~/.cache/mindnlp_dp", "folder that keeps the tokens for later runs; empty: none")
    output_dir: str = setting("outputs/finetune_llm", "output folder for the report, the plot and the model")

    model: str = setting(FROM_SCRATCH, "tiny: a Llama from scratch; or a pretrained model, hub name or folder")
    vocab_size: int = setting(800, "vocabulary size of the tiny model's byte-level BPE tokenizer")
    max_length: int = setting(128, "maximum number of tokens of a text; longer texts are truncated")
    hidden_size: int = setting(128, "width of the tiny model")
    num_layers: int = setting(4, "number of layers of the tiny model")
    num_heads: int = setting(4, "number of attention heads of the tiny model")
    intermediate_size: int = setting(344, "width of the feed-forward layers of the tiny model")

    num_epochs: float = setting(5.0, "passes over the training split")
    global_batch_size: int = setting(16, "number of rows in an update, over all ranks")
    eval_batch_size: int = setting(16, "number of rows of a rank in one evaluation step")
    fused_cross_entropy: str = setting(
        "auto", "compute output layer and loss without the logits of all tokens: auto (if the model can), true, false"
    )
    num_samples: int = setting(4, "number of held-out prompts that the trained model completes for the report")
    max_new_tokens: int = setting(48, "maximum number of tokens of these completions")

    def usual_learning_rate(self) -> float:
        if self.model == FROM_SCRATCH:
            return learning_rate_from_scratch(3e-3, self.hidden_size)
        trains_adapters = self.lora_rank or adapters_of(self.model)
        if self.objective != "sft":
            return 1e-5 if trains_adapters else 1e-6
        return 2e-4 if trains_adapters else 2e-5

    def validate(self) -> None:
        super().validate()
        if self.model != FROM_SCRATCH:
            check_weights(self.model, trust_pickle=self.trust_pickle)
            check_kind(self.model, "CAUSAL_LM", self.lora_rank)
        if bool(self.train_file) != bool(self.test_file or self.test_fraction):
            raise InputError("--train-file and --test-file (or --test-fraction) must be given together")
        if self.objective not in OBJECTIVES:
            raise InputError(f"objective must be one of {', '.join(OBJECTIVES)}, got {self.objective!r}")
        if self.objective != "sft":
            self._check_preferences()
        if self.template not in TEMPLATES:
            raise InputError(f"template must be one of {', '.join(TEMPLATES)}, got {self.template!r}")
        for name in ("max_length", "hidden_size", "num_layers", "num_heads", "intermediate_size", "max_new_tokens"):
            self.check_at_least(1, name)
        self.check_at_least(0, "num_samples")
        if self.max_length < 2:
            raise InputError(f"max_length must be at least 2: a token, and the next one; got {self.max_length}")
        if self.hidden_size % self.num_heads or self.hidden_size // self.num_heads % 2:
            raise InputError(
                f"hidden_size ({self.hidden_size}) must be an even multiple of num_heads ({self.num_heads}), because "
                "rotary embeddings rotate pairs"
            )
        if self.fused_cross_entropy not in ("auto", "true", "false"):
            raise InputError(f"fused_cross_entropy must be auto, true or false, got {self.fused_cross_entropy!r}")
        if self.lora_rank and self.model == FROM_SCRATCH:
            raise InputError(
                f"lora_rank is for a trained model; train the model {FROM_SCRATCH!r} first, and pass --model FOLDER"
            )
        if self.vocab_size < SMALLEST_VOCABULARY:
            raise InputError(f"vocab_size must be at least {SMALLEST_VOCABULARY}: bytes and special tokens")

    def _check_preferences(self) -> None:
        if not self.train_file:
            raise InputError(f"objective {self.objective} needs --train-file, with prompt, chosen and rejected")
        if self.packing:
            raise InputError(
                "packing is for the objective sft: preferences are compared by rows of one text; leave it out"
            )
        shards = [name for name in ("pp", "tp", "ep", "sp", "cp") if f"{name}=" in self.mesh]
        if shards:
            raise InputError(
                f"preferences are trained with whole models, and --mesh has {shards[0]}; leave it out, or use dp alone "
                "with --zero-stage 2 or --lora-rank"
            )
        if not 0 < self.beta < math.inf or not 0 <= self.simpo_gamma < math.inf:
            raise InputError(f"beta must be positive, and simpo_gamma at least 0; got {self.beta}, {self.simpo_gamma}")


# 256 bytes, and the special tokens of tokenize_conversations.py.
SMALLEST_VOCABULARY = 261
