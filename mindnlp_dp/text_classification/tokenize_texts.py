"""This module trains a byte-level BPE tokenizer on the training split and encodes texts with it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer
from tokenizers.implementations import ByteLevelBPETokenizer
from tokenizers.processors import RobertaProcessing

# The ids are RoBERTa's: its position embeddings start after the padding token's id.
SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
BOS, PAD, EOS = range(3)


def train_tokenizer(texts: Sequence[str], vocab_size: int, max_length: int, *, lowercase: bool = False) -> Tokenizer:
    """Train a tokenizer that pads and truncates to ``max_length`` tokens."""
    bpe = ByteLevelBPETokenizer(add_prefix_space=True, lowercase=lowercase)
    bpe.train_from_iterator(
        texts, vocab_size=vocab_size, min_frequency=2, special_tokens=list(SPECIAL_TOKENS), show_progress=False
    )
    tokenizer: Tokenizer = bpe._tokenizer
    tokenizer.post_processor = RobertaProcessing(("</s>", EOS), ("<s>", BOS))
    tokenizer.enable_truncation(max_length)
    tokenizer.enable_padding(pad_id=PAD, pad_token="<pad>", length=max_length)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[dict[str, np.ndarray], int]:
    """Return ``input_ids`` and ``attention_mask``, int64 (texts, max_length), and the number of truncated texts."""
    encodings = tokenizer.encode_batch(list(texts))
    columns = {
        "input_ids": np.array([encoding.ids for encoding in encodings], np.int64),
        "attention_mask": np.array([encoding.attention_mask for encoding in encodings], np.int64),
    }
    return columns, sum(bool(encoding.overflowing) for encoding in encodings)
