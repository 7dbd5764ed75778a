"""This module makes a tokenizer for the model's folder of one that a recipe has trained; the recipes save it."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer

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
