"""These patches let MindNLP 0.4.1 read the tokenizers that newer versions of Transformers save."""

from __future__ import annotations

import functools
import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mindnlp_dp.compat.import_hook import around


# Versions: MindNLP 0.4.1, which pins tokenizers 0.19. Cause: since 0.20 the merges of a BPE model are saved as pairs:
# "data did not match any variant of untagged enum ModelWrapper".
# Remove when: it requires tokenizers 0.20.
@around("mindnlp.transformers.tokenization_utils_fast")
def _merges_as_pairs(module: types.ModuleType) -> Iterator[None]:
    yield
    stock = module.TokenizerFast

    class TokenizerFast:
        """Reads tokenizers; stands for the class of the library, of which Python has no subclasses."""

        from_str = staticmethod(stock.from_str)

        @staticmethod
        def from_file(path: str) -> Any:
            """Return the tokenizer of a tokenizer.json of any version."""
            saved = json.loads(Path(path).read_text(encoding="utf-8"))
            merges = saved["model"].get("merges")
            if not merges or isinstance(merges[0], str):
                return stock.from_file(path)
            if any(" " in token for merge in merges for token in merge):
                raise ValueError(f"{path} has tokens with spaces, which the installed tokenizers 0.19 cannot merge")
            saved["model"]["merges"] = [" ".join(merge) for merge in merges]
            return stock.from_str(json.dumps(saved))

    module.TokenizerFast = TokenizerFast  # type: ignore[attr-defined]


# Versions: MindNLP 0.4.1. Cause: newer versions of Transformers save the chat template in a file of its own.
# Remove when: a tokenizer has the template of chat_template.jinja.
@around("mindnlp.transformers.tokenization_utils_base")
def _chat_template_files(module: types.ModuleType) -> Iterator[None]:
    yield
    base = module.PreTrainedTokenizerBase
    stock = base.from_pretrained.__func__

    @functools.wraps(stock)
    def from_pretrained(cls: Any, name: Any, *inputs: Any, **options: Any) -> Any:
        tokenizer = stock(cls, name, *inputs, **options)
        if tokenizer.chat_template is None:
            where = {key: options[key] for key in ("cache_dir", "token", "revision", "mirror") if key in options}
            file = module.cached_file(
                str(name), "chat_template.jinja", _raise_exceptions_for_gated_repo=False,
                _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False, **where,
            )  # fmt: skip
            if file is not None:
                tokenizer.chat_template = Path(file).read_text(encoding="utf-8")
        return tokenizer

    base.from_pretrained = classmethod(from_pretrained)


# Versions: MindNLP 0.4.1. Cause: Transformers 5 names the class of a tokenizer that is its tokenizer.json
# TokenizersBackend: "Tokenizer class TokenizersBackend does not exist".
# Remove when: AutoTokenizer knows the name.
@around("mindnlp.transformers.models.auto.tokenization_auto")
def _classes_of_transformers_5(module: types.ModuleType) -> Iterator[None]:
    yield
    stock = module.tokenizer_class_from_name

    @functools.wraps(stock)
    def tokenizer_class_from_name(class_name: str) -> Any:
        return stock("PreTrainedTokenizerFast" if class_name.startswith("TokenizersBackend") else class_name)

    module.tokenizer_class_from_name = tokenizer_class_from_name  # type: ignore[attr-defined]
