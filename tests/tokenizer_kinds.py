"""Texts, and small tokenizers of the kinds that models have, for tests that compare tokens between libraries."""

from __future__ import annotations

import functools
import random
from types import SimpleNamespace

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.implementations import BertWordPieceTokenizer, ByteLevelBPETokenizer

from mindnlp_dp.finetuning.settings import parse_config
from mindnlp_dp.language_modeling import language_modeling_task, tokenize_conversations
from mindnlp_dp.language_modeling.language_modeling_config import LanguageModelingConfig
from mindnlp_dp.runtime.mindnlp_api import transformers_api
from mindnlp_dp.text_classification import classification_task, tokenize_texts
from mindnlp_dp.text_classification.classification_config import FinetuneConfig
from mindnlp_dp.text_classification.tokenize_texts import SPECIAL_TOKENS

PIECES = (
    "the red house", "When", "it's", "don't", "I'm 42", "3.14", "don 't .", "Hello!", "naïve café", "\uff21\uff22",
    "e\u0301", "你好", "狗用英语怎么说", "中文", "。", "😀", "\U0001f469\u200d\U0001f467", "🇨🇳", " ", "  ", "\t", "\n",
    "\n\n", "\r\n", "\u200b", "_x", "<", "</", "|", "<s>", "</s>", "<pad>", "<unk>", "<mask>", "<|im_start|>",
    "<|im_end|>", "<|endoftext|>", "[CLS]", "[MASK]", "\x00",
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
    tokenizer.train_from_iterator(
        ["the red house 你好"] * 9, trainers.BpeTrainer(vocab_size=330, special_tokens=tokens)
    )
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


BYTES = {"unk_token": "<|endoftext|>", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
LLAMA = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
BERT = {name: f"[{name[:-6].upper()}]" for name in ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")}
PRETRAINED = {
    "byte-level": (byte_level_after_pre_tokenizer, "PreTrainedTokenizerFast", {"eos_token": "</s>"}),
    "GPT2TokenizerFast": (byte_level, "GPT2TokenizerFast", BYTES),
    "RobertaTokenizerFast": (byte_level, "RobertaTokenizerFast", {"add_prefix_space": True}),
    "Qwen2TokenizerFast": (byte_level, "Qwen2TokenizerFast", {"eos_token": "<|endoftext|>", "pad_token": "<|im_end|>"}),
    "LlamaTokenizerFast": (sentence_piece, "LlamaTokenizerFast", LLAMA),
    "BertTokenizerFast": (word_piece, "BertTokenizerFast", BERT),
}


@functools.cache
def pretrained(kind):
    """Return a tokenizer of a class that models have; it is trained once, because WordPiece gives another each time."""
    make, name, options = PRETRAINED[kind]
    special = {"Bert": [*BERT.values()], "Llam": ["<unk>", "<s>", "</s>"], "Robe": [*SPECIAL_TOKENS]}
    tokens = special.get(name[:4], ["<|endoftext|>", "<|im_end|>", "</s>"])
    return getattr(transformers_api(), name)(tokenizer_object=make(tokens), **options)


def save_trained(kind, folder):
    """Save the tokenizer that a recipe trains as the recipe does; return it, and the most tokens of its model."""
    if kind == "language model":
        config = parse_config(LanguageModelingConfig, ["--max-length", "40", "--max-new-tokens", "8"])
        trained = tokenize_conversations.train_tokenizer(texts(), 400)
        language_modeling_task.save_tokenizer(config, SimpleNamespace(tokenizer_json=trained.to_str()), str(folder))
        return trained, 48
    flags = ["--max-length", "24", "--lowercase", str("lower" in kind)]
    config = parse_config(FinetuneConfig, flags)
    trained = tokenize_texts.train_tokenizer(texts(), 400, 24, lowercase=config.lowercase)
    classification_task.save_tokenizer(config, SimpleNamespace(tokenizer_json=trained.to_str()), str(folder))
    return trained, 24


def without_padding(encoding):
    return [token for token, is_seen in zip(encoding.ids, encoding.attention_mask) if is_seen]
