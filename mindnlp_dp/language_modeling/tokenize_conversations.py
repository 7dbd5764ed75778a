"""This module makes tokens and labels of conversations, and trains the tiny model's tokenizer."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, Optional

import numpy as np
from tokenizers import Encoding, Tokenizer
from tokenizers.implementations import ByteLevelBPETokenizer

from mindnlp_dp.data.loss_weight import IGNORED
from mindnlp_dp.finetuning.tokenizers import length_of_text
from mindnlp_dp.language_modeling.conversations import Conversation
from mindnlp_dp.language_modeling.templates import Part, Template, plain, text_after_content

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
PAD, BOS, EOS = range(3)
# A batch of the tokenizer, which divides it among the cores.
TEXTS_AT_A_TIME = 1024


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer, which knows every text."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        texts, vocab_size=vocab_size, min_frequency=2, special_tokens=list(SPECIAL_TOKENS), show_progress=False
    )
    return bpe._tokenizer


def encode(
    conversation: Conversation, *arguments: Any, adds_special_tokens: bool = True
) -> tuple[np.ndarray, np.ndarray, bool]:
    """Return what :func:`encode_all` yields for one conversation."""
    return next(encode_all([conversation], *arguments, adds_special_tokens=adds_special_tokens))


def encode_all(
    conversations: Sequence[Conversation],
    template: Template,
    tokenizer: Tokenizer,
    eos: Optional[int],
    max_length: int,
    *,
    adds_special_tokens: bool = True,
) -> Iterator[tuple[np.ndarray, np.ndarray, bool]]:
    """Yield each conversation's tokens and labels, of shape (length,), and whether they were truncated.

    Tokens that begin or end in a part that counts have themselves as labels; others, and the first token, have -100.

    Args:
        eos: the token that is added at the end, if the last one is another; it counts if the last message does.
        adds_special_tokens: whether the tokenizer adds its own, such as one at the beginning.
    """
    for begin in range(0, len(conversations), TEXTS_AT_A_TIME):
        some = conversations[begin : begin + TEXTS_AT_A_TIME]
        parts = [list(template(each)) for each in some]
        texts = ["".join(text for text, _ in each) for each in parts]
        for conversation, each, encoding in zip(
            some, parts, tokenizer.encode_batch(texts, add_special_tokens=adds_special_tokens)
        ):
            yield _labeled(conversation, each, encoding, eos, max_length)


def _labeled(
    conversation: Conversation, parts: Sequence[Part], encoding: Encoding, eos: Optional[int], max_length: int
) -> tuple[np.ndarray, np.ndarray, bool]:
    length = length_of_text(encoding)
    begins = np.cumsum([0, *(len(text) for text, _ in parts[:-1])])
    counts = np.array([is_counted for _, is_counted in parts])
    ids = np.array(encoding.ids[:length], np.int64)
    has_label = np.zeros(len(ids), bool)
    if len(ids):
        firsts, ends = np.array(encoding.offsets[:length], np.int64).T
        # Special tokens that the tokenizer adds have the offsets (0, 0), and do not count. A space before a
        # completion may be the prompt's, and in one token with the completion's first word.
        for at in (firsts, np.maximum(ends - 1, firsts)):
            has_label |= counts[np.searchsorted(begins, at, side="right") - 1] & (firsts != ends)
    # A template's own end, such as <|im_end|>, may be the tokenizer's.
    said = ids[has_label]
    if eos is not None and not (len(said) and said[-1] == eos):
        ids, has_label = np.append(ids, eos), np.append(has_label, conversation[-1].is_counted)
    labels = np.where(has_label, ids, IGNORED)
    labels[:1] = IGNORED
    return ids[:max_length], labels[:max_length], len(ids) > max_length


def encode_documents(
    documents: Sequence[Conversation], tokenizer: Tokenizer, eos: Optional[int], max_length: int
) -> Iterator[tuple[np.ndarray, np.ndarray, bool]]:
    """Yield the tokens and labels of texts without roles, as :func:`encode_all` does, in rows of ``max_length``.

    A row begins with the last token of the row before, so that every token but a text's first is predicted once.
    """
    for ids, labels, _ in encode_all(documents, plain, tokenizer, eos, sys.maxsize):
        for begin in range(0, max(1, len(ids) - 1), max_length - 1):
            part = slice(begin, begin + max_length)
            yield ids[part], np.where(np.arange(len(ids[part])) > 0, labels[part], IGNORED), False


def end_of_turn(conversation: Conversation, template: Template, tokenizer: Tokenizer) -> Optional[int]:
    """Return the special token that a template writes after a message, such as <|im_end|>; None if it writes none."""
    special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    ids = tokenizer.encode(text_after_content(conversation, template), add_special_tokens=False).ids
    return next((token for token in ids if token in special), None)


def add_control_tokens(tokenizer: Any, names: Sequence[str]) -> list[str]:
    """Add the tokens that a template needs, and return those that were several tokens of this tokenizer."""
    missing = [name for name in names if len(tokenizer(name, add_special_tokens=False)["input_ids"]) != 1]
    if missing:
        special = [*tokenizer.additional_special_tokens, *missing]
        tokenizer.add_special_tokens({"additional_special_tokens": special})
    return missing
