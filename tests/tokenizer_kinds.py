"""Texts, and small tokenizers of the kinds that models have, for tests that compare tokens between libraries."""

from __future__ import annotations

import random

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.implementations import BertWordPieceTokenizer, ByteLevelBPETokenizer

PIECES = (
    "the red house", "When", "it's", "don't", "I'm 42", "3.14", "don 't .", "Hello!", "naïve café", "ＡＢＣ", "é", "你好",
    "狗用英语怎么说？", "中文", "。", "😀", "👩‍👩‍👧", "🇨🇳", " ", "  ", "\t", "\n", "\n\n", "\r\n", "\u200b", "_x", "<", "</", "|",
    "<s>", "</s>", "<pad>", "<unk>", "<mask>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "[CLS]", "[MASK]", "\x00",
)  # fmt: skip


def texts(number=500):
    """Return texts of English, Chinese, emoji, spaces, newlines and control tokens, each piece alone first."""
    rng = random.Random(0)
    joined = ["".join(rng.choice(PIECES) for _ in range(rng.randrange(1, 9))) for _ in range(number)]
    return ["", *PIECES, *joined][:number]


def byte_level(special):
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts(), vocab_size=400, min_frequency=2, special_tokens=special, show_progress=False)
    return bpe._tokenizer


def sentence_piece(special):
    """Return BPE over characters with spaces as ▁, and bytes for unknown ones, as Llama 2 and Gemma have."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(["the red house 你好"] * 9, trainers.BpeTrainer(vocab_size=330, special_tokens=tokens))
    return tokenizer


def word_piece(special):
    bert = BertWordPieceTokenizer(lowercase=True)
    bert.train_from_iterator(texts(), vocab_size=300, special_tokens=special, show_progress=False)
    return bert._tokenizer


def byte_level_after_pre_tokenizer(special):
    tokenizer = byte_level(special)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer
