"""This module makes tokens and labels of conversations, and trains the tiny model's tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

import numpy as np
from tokenizers import Encoding, Tokenizer
from tokenizers.implementations import ByteLevelBPETokenizer

from mindnlp_dp.data.loss_weight import IGNORED
from mindnlp_dp.finetuning.pretrained import load_pretrained
from mindnlp_dp.finetuning.settings import InputError
from mindnlp_dp.language_modeling.conversations import Conversation
from mindnlp_dp.language_modeling.templates import Template
from mindnlp_dp.runtime.mindnlp_api import transformers_api

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
PAD, BOS, EOS = range(3)


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer, which knows every text."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        texts, vocab_size=vocab_size, min_frequency=2, special_tokens=list(SPECIAL_TOKENS), show_progress=False
    )
    return bpe._tokenizer


def encode(
    conversation: Conversation,
    template: Template,
    tokenizer: Tokenizer,
    eos: Optional[int],
    max_length: int,
    *,
    adds_special_tokens: bool = True,
) -> tuple[np.ndarray, np.ndarray, bool]:
    """Return a conversation's tokens and labels, of shape (length,), and whether they were truncated.

    Tokens that begin or end in a part that counts have themselves as labels; others, and the first token, have -100.

    Args:
        eos: the token that is added at the end, if the last one is another.
        adds_special_tokens: whether the tokenizer adds its own, such as one at the beginning.
    """
    text, starts = "", []
    for part, is_counted in template(conversation):
        starts.append((len(text), is_counted))
        text += part
    encoding, length = encoded_text(text, tokenizer, adds_special_tokens=adds_special_tokens)
    begins = np.array([start for start, _ in starts])
    counts = np.array([is_counted for _, is_counted in starts])
    ids = np.array(encoding.ids[:length], np.int64)
    # Special tokens that the tokenizer adds have the offsets (0, 0), and do not count.
    is_text = np.array([begin != end for begin, end in encoding.offsets[:length]], bool)
    has_label = np.zeros(len(ids), bool)
    if len(ids):
        firsts, ends = np.array(encoding.offsets[:length], np.int64).T
        # A space before a completion may be the prompt's, and in one token with the completion's first word.
        for at in (firsts, np.maximum(ends - 1, firsts)):
            has_label |= counts[np.searchsorted(begins, at, side="right") - 1] & is_text
    # A template's own end, such as <|im_end|>, may be the tokenizer's.
    said = ids[has_label]
    if eos is not None and not (len(said) and said[-1] == eos):
        ids, has_label = np.append(ids, eos), np.append(has_label, True)
    labels = np.where(has_label, ids, IGNORED)
    labels[:1] = IGNORED
    return ids[:max_length], labels[:max_length], len(ids) > max_length


def encoded_text(text: str, tokenizer: Tokenizer, *, adds_special_tokens: bool) -> tuple[Encoding, int]:
    """Return a text's encoding, and its number of tokens without those that the tokenizer adds at the end."""
    encoding = tokenizer.encode(text, add_special_tokens=adds_special_tokens)
    length = len(encoding.ids)
    # Their offsets are (0, 0).
    while length and encoding.offsets[length - 1][0] == encoding.offsets[length - 1][1]:
        length -= 1
    return encoding, length


def pretrained_tokenizer(name: str) -> tuple[Any, Tokenizer]:
    """Return the tokenizer of a pretrained model, and the fast one within it.

    Raises:
        InputError: it cannot be loaded, or is not a fast tokenizer.
    """
    tokenizer = load_pretrained(transformers_api().AutoTokenizer, name, "tokenizer")
    if (Path(name) / "adapter_config.json").is_file():
        raise InputError(f"{name} has adapters, and no model; pass the model that they were trained for")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise InputError(f"the tokenizer {name} has no fast form (tokenizer.json), from which labels are made")
    # Many published tokenizers were saved with their own.
    backend.no_truncation()
    backend.no_padding()
    return tokenizer, backend
