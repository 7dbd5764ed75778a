"""This module loads and saves tokenizers, so that those of a saved folder give the tokens of training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Encoding, Tokenizer

from mindnlp_dp.finetuning.pretrained import load_pretrained
from mindnlp_dp.finetuning.saved_model import base_of
from mindnlp_dp.finetuning.settings import InputError
from mindnlp_dp.runtime.mindnlp_api import transformers_api


def as_pretrained(tokenizer_json: str, max_length: int, **special_tokens: str) -> Any:
    """Return a tokenizer whose ``save_pretrained`` writes what AutoTokenizer opens with the same tokens.

    Args:
        tokenizer_json: the trained tokenizer.
        max_length: the most tokens that the model takes.
        special_tokens: such as ``eos_token="</s>"``.
    """
    pre_tokenizer = json.loads(tokenizer_json)["pre_tokenizer"] or {}
    # A class without a model's name changes nothing in the JSON, if it gets the JSON's own add_prefix_space.
    return transformers_api().PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer_json),
        model_max_length=max_length,
        model_input_names=["input_ids", "attention_mask"],
        add_prefix_space=pre_tokenizer.get("add_prefix_space", False),
        clean_up_tokenization_spaces=False,
        **special_tokens,
    )


def load_tokenizer(name: str, base: str = "") -> Any:
    """Return the tokenizer of a model; raise InputError if it cannot be loaded.

    For a folder with adapters and without a tokenizer, it is that of ``base``, or of the model that they name.
    """
    # Adapters that a Trainer has saved have no tokenizer.
    if not (Path(name) / "tokenizer_config.json").is_file():
        name = base_of(name, base)
    return load_pretrained(transformers_api().AutoTokenizer, name, "tokenizer")


def pretrained_tokenizer(name: str, base: str = "") -> tuple[Any, Tokenizer]:
    """Return what :func:`load_tokenizer` returns, and the fast tokenizer within it.

    Raises:
        InputError: it cannot be loaded, or is not a fast tokenizer.
    """
    tokenizer = load_tokenizer(name, base)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise InputError(f"the tokenizer {name} has no fast form (tokenizer.json), from which labels are made")
    # Many published tokenizers were saved with their own.
    backend.no_truncation()
    backend.no_padding()
    return tokenizer, backend


def encoded_text(text: str, tokenizer: Tokenizer, *, adds_special_tokens: bool) -> tuple[Encoding, int]:
    """Return a text's encoding, and its number of tokens without those that the tokenizer adds at the end."""
    encoding = tokenizer.encode(text, add_special_tokens=adds_special_tokens)
    return encoding, length_of_text(encoding)


def length_of_text(encoding: Encoding) -> int:
    """Return the number of tokens without those that the tokenizer adds at the end."""
    offsets = encoding.offsets
    length = len(offsets)
    # Their offsets are (0, 0).
    while length and offsets[length - 1][0] == offsets[length - 1][1]:
        length -= 1
    return length
