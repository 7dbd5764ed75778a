"""This module prepares the data, the tokenizer and the model of a job; finetune_language_model.py calls it.

Rank 0 alone calls :func:`prepare_task`, and the other ranks receive its result.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Optional

import numpy as np
import tokenizers
from tokenizers import Tokenizer

from mindnlp_dp.finetuning.files import weighted_files
from mindnlp_dp.finetuning.lora import with_lora
from mindnlp_dp.finetuning.pretrained import check_max_length
from mindnlp_dp.finetuning.recipe_arguments import chosen, held_out, repeated
from mindnlp_dp.finetuning.saved_model import adapters_of, load_saved
from mindnlp_dp.finetuning.settings import FROM_SCRATCH, InputError
from mindnlp_dp.finetuning.tokenizers import as_pretrained, encoded_text, pretrained_tokenizer
from mindnlp_dp.language_modeling import row_cache, templates
from mindnlp_dp.language_modeling.conversations import (
    Conversation,
    read_conversations,
    read_preferences,
    topics_of_python,
)
from mindnlp_dp.language_modeling.language_modeling_config import LanguageModelingConfig
from mindnlp_dp.language_modeling.rows import PACKABLE, TokenRows, codes_of, pack
from mindnlp_dp.language_modeling.tokenize_conversations import (
    BOS,
    EOS,
    PAD,
    SPECIAL_TOKENS,
    add_control_tokens,
    encode_all,
    encode_documents,
    end_of_turn,
    train_tokenizer,
)
from mindnlp_dp.runtime.adapters import has_adapters
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
        ends: the tokens that end what the assistant says: the template's, and the tokenizer's.
        is_extended: whether tokens were added to the tokenizer of a pretrained model.
        num_truncated: number of texts that were truncated.
        num_without_labels: number of texts that were left out, because nothing that counts was left of them.
        ignored_keys: keys of the files' lines that are not used.
    """

    train: TokenRows
    test: TokenRows
    tokenizer_json: str
    pad: int
    ends: list[int]
    is_extended: bool = False
    prompts: list[Prompt] = field(default_factory=list)
    num_truncated: int = 0
    num_without_labels: int = 0
    ignored_keys: list[str] = field(default_factory=list)

    @property
    def vocab_size(self) -> int:
        return Tokenizer.from_str(self.tokenizer_json).get_vocab_size()


@dataclass(frozen=True)
class ConversationSplits:
    """Both splits as conversations."""

    train: list[Conversation]
    test: list[Conversation]

    def __str__(self) -> str:
        return f"{len(self.train)} training and {len(self.test)} held-out texts"


def read_splits(config: LanguageModelingConfig) -> ConversationSplits:
    """Read the data; raise InputError if a file cannot be read."""
    if not config.train_file:
        train, test = topics_of_python()
        return ConversationSplits(_some(train, config), test)
    train, test = [], []
    read_file = read_conversations if config.objective == "sft" else read_preferences
    for path, weight in weighted_files(config.train_file):
        read = read_file(path)
        if config.test_fraction:
            is_test = held_out(np.zeros(len(read), int), config.test_fraction, config.seed, path)
            test += [read[at] for at in np.flatnonzero(is_test)]
            read = [read[at] for at in np.flatnonzero(~is_test)]
        train += [read[at] for at in repeated(len(read), weight, config.seed)]
    for path, weight in weighted_files(config.test_file):
        if weight != 1:
            raise InputError(f"test_file: {path} has the weight {weight:g}, and held-out rows count once; leave it out")
        test += read_file(path)
    return ConversationSplits(_some(train, config), test)


def _some(train: list[Conversation], config: LanguageModelingConfig) -> list[Conversation]:
    return [train[at] for at in chosen(len(train), config.max_train_samples, config.seed)]


def prepare_task(config: LanguageModelingConfig, read: Optional[ConversationSplits] = None) -> LanguageModelingTask:
    """Make rows of tokens of the conversations, which are read if they are not given.

    Raises:
        InputError: a file or a tokenizer cannot be loaded, or no text has a label.
    """
    read = read or read_splits(config)
    splits = read.train, read.test
    if config.model == FROM_SCRATCH:
        texts = [
            message.content or ""
            for conversation in splits[0]
            for message in (*conversation, *(conversation.rejected or ()))
        ]
        tokenizer = _of_tiny_model(config, train_tokenizer(texts, config.vocab_size).to_str())
        added: list[str] = []
    else:
        tokenizer, added = _of_pretrained(config)
    fast = tokenizer.backend_tokenizer
    template = (
        templates.of_tokenizer(tokenizer) if config.template == "tokenizer" else templates.BY_NAME[config.template]
    )
    # A tokenizer's own template has the token that begins a text.
    has_own_marks = config.template == "tokenizer"
    chat = next((each for each in splits[0] if not each.is_document), None)
    end, eos = chat and end_of_turn(chat, template, fast), tokenizer.eos_token_id
    end_of_text = eos if end is None else None

    def tokenize(conversations: list[Conversation], name: str) -> tuple[TokenRows, int, int]:
        """Return a split's rows, and the numbers of truncated texts and of those without labels."""
        # A row is a text, or the two texts of a preference.
        encoded: Iterator[list[tuple[np.ndarray, np.ndarray, bool]]] = (
            row
            for is_document, some in itertools.groupby(conversations, lambda each: each.is_document)
            for row in (
                ([row] for row in encode_documents(list(some), fast, eos, config.max_length))
                if is_document
                else _encoded(
                    list(some), template, fast, end_of_text, config.max_length, adds_special_tokens=not has_own_marks
                )
            )
        )
        kept, num_truncated, num_without_labels = [], 0, 0
        for row in encoded:
            num_truncated += sum(truncated for _, _, truncated in row)
            if all((labels >= 0).any() for _, labels, _ in row):
                kept.append([codes_of(ids, labels) for ids, labels, _ in row])
            else:
                num_without_labels += 1
        if not kept:
            raise InputError(f"no text of the {name} split has a completion within max_length ({config.max_length})")
        if config.packing:
            places = pack([len(codes) for [codes] in kept], config.max_length)
            kept = [[kept[number][0] for number in place] for place in places]
        return TokenRows.of_codes(kept), num_truncated, num_without_labels

    settings = (
        tokenizers.__version__, fast.to_str(), getattr(tokenizer, "chat_template", None), eos, config.template,
        config.max_length, config.packing, end,
    )  # fmt: skip
    cached = [
        row_cache.cached(config.cache_dir, row_cache.key_of(split, settings), functools.partial(tokenize, split, name))
        for split, name in zip(splits, ("training", "held-out"))
    ]
    rows = [each[0] for each in cached]
    num_truncated, num_without_labels = sum(each[1] for each in cached), sum(each[2] for each in cached)
    prompts = [
        _prompt(each, template, fast, adds_special_tokens=not has_own_marks)
        for each in [each for each in splits[1] if not each.is_document][: config.num_samples]
    ]
    pad = tokenizer.pad_token_id
    return LanguageModelingTask(
        rows[0], rows[1], fast.to_str(),
        # Padding has no labels and is not seen, so that any token will do.
        pad=pad if pad is not None else eos if eos is not None else 0,
        ends=[token for token in dict.fromkeys((end, eos)) if token is not None],
        is_extended=bool(added), prompts=prompts, num_truncated=num_truncated,
        num_without_labels=num_without_labels,
        ignored_keys=sorted({str(key) for split in splits for each in split for key in each.ignored}),
    )  # fmt: skip


def _encoded(
    conversations: list[Conversation], *arguments: Any, adds_special_tokens: bool
) -> Iterator[list[tuple[np.ndarray, np.ndarray, bool]]]:
    pairs = [[text for text in (each, each.rejected) if text is not None] for each in conversations]
    texts = encode_all(list(itertools.chain(*pairs)), *arguments, adds_special_tokens=adds_special_tokens)
    return ([next(texts) for _ in pair] for pair in pairs)


def _prompt(
    conversation: Conversation, template: templates.Template, fast: Tokenizer, *, adds_special_tokens: bool
) -> Prompt:
    text = templates.prompt_of(conversation, template)
    encoding, length = encoded_text(text, fast, adds_special_tokens=adds_special_tokens)
    return Prompt(text, list(encoding.ids[:length]), conversation[-1].content or "")


def _of_tiny_model(config: LanguageModelingConfig, tokenizer_json: str) -> Any:
    pad, bos, eos = SPECIAL_TOKENS[:3]
    positions = config.max_length + config.max_new_tokens
    return as_pretrained(tokenizer_json, positions, pad_token=pad, bos_token=bos, eos_token=eos)


def _of_pretrained(config: LanguageModelingConfig) -> tuple[Any, list[str]]:
    """Return the tokenizer of a pretrained model, and the template's tokens that were added to it."""
    tokenizer, _ = pretrained_tokenizer(config.model)
    added = add_control_tokens(tokenizer, templates.CONTROL_TOKENS.get(config.template, ()))
    if added and (config.lora_rank or adapters_of(config.model)):
        raise InputError(
            f"{config.model} has no token {added[0]}, and LoRA does not train the embeddings of new tokens; choose "
            "another --template, or train all weights (--lora-rank 0)"
        )
    return tokenizer, added


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
        model = load_saved(config.model, is_trainable=True, trust_pickle=config.trust_pickle)
    if task.is_extended and task.vocab_size > model.config.vocab_size:
        model.resize_token_embeddings(task.vocab_size)
    _set_ends(model.generation_config, task.ends)
    kind = model.config.model_type
    if kind in ENCODERS and not getattr(model.config, "is_decoder", False):
        raise InputError(f"{config.model} is a {kind}, in which tokens see later ones; pass a causal language model")
    if config.packing and kind not in PACKABLE:
        raise InputError(f"packing needs a model with masks for pairs of tokens ({', '.join(PACKABLE)}), got {kind}")
    largest = max(rows.largest_token for rows in (task.train, task.test))
    if largest >= model.config.vocab_size:
        raise InputError(
            f"the tokenizer of {config.model} makes the token {largest}, and the model has {model.config.vocab_size}"
        )
    check_max_length(model.config, config.max_length, config.model)
    if not config.lora_rank or has_adapters(model):
        return model
    return with_lora(model, config.model, config, "CAUSAL_LM")


def _set_ends(generation: Any, ends: list[int]) -> None:
    """Let any of the tokens end what is generated, beside the model's own, in the report and from the saved folder."""
    own = generation.eos_token_id
    own = own if isinstance(own, list) else [own] if own is not None else []
    if not set(ends) <= set(own):
        generation.eos_token_id = [*dict.fromkeys([*ends, *own])]
        # Without this, Transformers takes the tokens of config.json instead.
        generation._from_model_config = False


def save_tokenizer(config: LanguageModelingConfig, task: LanguageModelingTask, folder: str) -> None:
    """Write the tokenizer into the model's folder, from which ``--model FOLDER`` loads it again."""
    if config.model == FROM_SCRATCH:
        tokenizer = _of_tiny_model(config, task.tokenizer_json)
    else:
        tokenizer, _ = _of_pretrained(config)
    if config.template in templates.CHAT_TEMPLATES:
        # apply_chat_template() does not add the tokens that the tokenizer puts in front of a text.
        encoding = tokenizer.backend_tokenizer.encode("a")
        added = itertools.takewhile(lambda token: token[1] == (0, 0), zip(encoding.tokens, encoding.offsets))
        first = "".join(token for token, _ in added)
        tokenizer.chat_template = first + templates.CHAT_TEMPLATES[config.template]
    tokenizer.save_pretrained(folder)
