"""This module prepares the data, the tokenizer and the model of a job; finetune.py calls it.

Rank 0 alone calls :func:`prepare_task`, and the other ranks receive its result.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from tokenizers import Tokenizer

from mindnlp_dp.finetuning.pretrained import load_pretrained
from mindnlp_dp.finetuning.settings import InputError
from mindnlp_dp.language_modeling import templates
from mindnlp_dp.language_modeling.config import FROM_SCRATCH, LanguageModelingConfig
from mindnlp_dp.language_modeling.conversations import Conversation, read_conversations, topics_of_python
from mindnlp_dp.language_modeling.rows import PACKABLE, TokenRows, pack
from mindnlp_dp.language_modeling.tokenization import (
    BOS,
    EOS,
    PAD,
    encode,
    encoded_text,
    pretrained_tokenizer,
    train_tokenizer,
)
from mindnlp_dp.runtime.mindnlp_api import transformers_api

# Model types with a class for causal language models that is one only if ``is_decoder`` is set.
ENCODERS = ("bert", "camembert", "electra", "ernie", "roberta", "xlm-roberta")


@dataclass(frozen=True)
class Prompt:
    """A held-out prompt for the report: its text, its tokens, and the completion of the data."""

    text: str
    ids: list[int]
    expected: str


@dataclass(frozen=True)
class LanguageModelingTask:
    """Both splits as rows of tokens, some prompts, and the tokenizer as JSON.

    Attributes:
        pad: the token that fills rows up.
        eos: the token that ends a text; None if the tokenizer has none.
        num_truncated: number of texts that were truncated.
        num_without_labels: number of texts that were left out, because nothing that counts was left of them.
    """

    train: TokenRows
    test: TokenRows
    tokenizer_json: str
    pad: int
    eos: Optional[int]
    prompts: list[Prompt] = field(default_factory=list)
    num_truncated: int = 0
    num_without_labels: int = 0

    @property
    def vocab_size(self) -> int:
        return Tokenizer.from_str(self.tokenizer_json).get_vocab_size()


def prepare_task(config: LanguageModelingConfig) -> LanguageModelingTask:
    """Read the conversations, and make rows of tokens of them.

    Raises:
        InputError: a file or a tokenizer cannot be loaded, or no text has a label.
    """
    if config.train_file:
        splits = read_conversations(config.train_file), read_conversations(config.test_file)
    else:
        splits = topics_of_python()
    tokenizer, fast, eos, pad = _tokenizer(config, splits[0])
    template = (
        templates.of_tokenizer(tokenizer) if config.template == "tokenizer" else templates.BY_NAME[config.template]
    )
    # A tokenizer's own template has the tokens that begin and end a text.
    has_own_marks = config.template == "tokenizer"
    num_truncated = num_without_labels = 0
    rows = []
    for conversations, name in zip(splits, ("training", "held-out")):
        encoded = [
            encode(
                each, template, fast, None if has_own_marks else eos, config.max_length,
                adds_special_tokens=not has_own_marks,
            )
            for each in conversations
        ]  # fmt: skip
        num_truncated += sum(truncated for _, _, truncated in encoded)
        kept = [(ids, labels) for ids, labels, _ in encoded if (labels >= 0).any()]
        num_without_labels += len(encoded) - len(kept)
        if not kept:
            raise InputError(f"no text of the {name} split has a completion within max_length ({config.max_length})")
        places = [[number] for number in range(len(kept))]
        if config.packing:
            places = pack([len(ids) for ids, _ in kept], config.max_length)
        rows.append(TokenRows.of([[kept[number] for number in place] for place in places]))
    prompts = [
        _prompt(each, template, fast, adds_special_tokens=not has_own_marks) for each in splits[1][: config.num_samples]
    ]
    return LanguageModelingTask(
        rows[0], rows[1], fast.to_str(), pad, eos, prompts, num_truncated, num_without_labels
    )  # fmt: skip


def _tokenizer(config: LanguageModelingConfig, train: list[Conversation]) -> tuple[Any, Tokenizer, Optional[int], int]:
    """Return the tokenizer (None for the tiny model), its fast form, and its tokens for the end and for padding."""
    if config.model == FROM_SCRATCH:
        texts = [message.content for conversation in train for message in conversation]
        return None, train_tokenizer(texts, config.vocab_size), EOS, PAD
    tokenizer, fast = pretrained_tokenizer(config.model)
    eos = tokenizer.eos_token_id
    pad = tokenizer.pad_token_id
    # Padding has no labels and is not seen, so that any token will do.
    return tokenizer, fast, eos, pad if pad is not None else eos if eos is not None else 0


def _prompt(
    conversation: Conversation, template: templates.Template, fast: Tokenizer, *, adds_special_tokens: bool
) -> Prompt:
    text = templates.prompt_of(conversation, template)
    encoding, length = encoded_text(text, fast, adds_special_tokens=adds_special_tokens)
    return Prompt(text, list(encoding.ids[:length]), conversation[-1].content)


def build_model(config: LanguageModelingConfig, task: LanguageModelingTask) -> Any:
    """Return the model to train, with LoRA adapters if asked for.

    Raises:
        InputError: a pretrained model cannot be loaded, or does not take packed rows or so many tokens.
    """
    library = transformers_api()
    if config.model == FROM_SCRATCH:
        model = library.LlamaForCausalLM(
            library.LlamaConfig(
                vocab_size=task.vocab_size,
                hidden_size=config.hidden_size,
                num_hidden_layers=config.num_layers,
                num_attention_heads=config.num_heads,
                num_key_value_heads=config.num_heads,
                intermediate_size=config.intermediate_size,
                max_position_embeddings=max(config.max_length + config.max_new_tokens, 64),
                pad_token_id=PAD,
                bos_token_id=BOS,
                eos_token_id=EOS,
            )
        )
    else:
        model = load_pretrained(library.AutoModelForCausalLM, config.model, "model", trust_pickle=config.trust_pickle)
    kind = model.config.model_type
    if kind in ENCODERS and not getattr(model.config, "is_decoder", False):
        raise InputError(f"{config.model} is a {kind}, in which tokens see later ones; pass a causal language model")
    if config.packing and kind not in PACKABLE:
        raise InputError(f"packing needs a model with masks for pairs of tokens ({', '.join(PACKABLE)}), got {kind}")
    largest = max(int(rows.ids.max()) for rows in (task.train, task.test))
    if largest >= model.config.vocab_size:
        raise InputError(
            f"the tokenizer of {config.model} makes the token {largest}, and the model has {model.config.vocab_size}"
        )
    positions = getattr(model.config, "max_position_embeddings", config.max_length)
    if config.max_length > positions:
        raise InputError(
            f"max_length ({config.max_length}) is more than the {positions} tokens that {config.model} takes"
        )
    return _with_lora(model, config) if config.lora_rank else model


def _with_lora(model: Any, config: LanguageModelingConfig) -> Any:
    from mindnlp.peft import LoraConfig, get_peft_model

    head = model.get_output_embeddings()
    linear = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if type(module).__name__ in ("Linear", "Conv1D") and module is not head
    }
    targets = [name.strip() for name in config.lora_targets.split(",") if name.strip()] or sorted(linear)
    unknown = [name for name in targets if name not in linear]
    if unknown:
        raise InputError(f"lora_targets names {unknown[0]!r}; the linear layers are {', '.join(sorted(linear))}")
    return get_peft_model(
        model,
        LoraConfig(
            task_type="CAUSAL_LM", r=config.lora_rank, lora_alpha=config.lora_alpha, lora_dropout=config.lora_dropout,
            target_modules=targets, fan_in_fan_out=model.config.model_type == "gpt2",
        ),
    )  # fmt: skip


def save_tokenizer(config: LanguageModelingConfig, task: LanguageModelingTask, folder: str) -> None:
    """Write the tokenizer into the model's folder, from which ``--model FOLDER`` loads it again."""
    if config.model == FROM_SCRATCH:
        tokenizer = transformers_api().PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(task.tokenizer_json), pad_token="<pad>", bos_token="<s>",
            eos_token="</s>",
        )  # fmt: skip
        tokenizer.save_pretrained(folder)
    else:
        pretrained_tokenizer(config.model)[0].save_pretrained(folder)
