"""Test that a saved folder tokenizes as training did, and that folders of newer libraries are read.

test_transformers_format.py opens the same folders with Transformers on PyTorch.
"""

from __future__ import annotations

import json

import pytest
import tokenizer_kinds
from library import is_0_5
from tokenizers import Tokenizer

from mindnlp_dp.finetuning.settings import InputError
from mindnlp_dp.finetuning.tokenizers import pretrained_tokenizer
from mindnlp_dp.language_modeling.tokenize_conversations import add_control_tokens
from mindnlp_dp.runtime.mindnlp_api import transformers_api

TEXTS = tokenizer_kinds.texts()
needs_0_4 = pytest.mark.skipif(is_0_5, reason="MindNLP 0.5 reads newer tokenizers itself")
TRAINED = ["classifier", "classifier in lower case", "language model"]


@pytest.mark.core
@pytest.mark.parametrize("kind", TRAINED)
def test_a_trained_tokenizer_is_the_same_after_it_is_saved(tmp_path, kind):
    trained, max_length = tokenizer_kinds.save_trained(kind, tmp_path)
    loaded = transformers_api().AutoTokenizer.from_pretrained(str(tmp_path))
    raw = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert loaded.model_max_length == max_length
    assert loaded.pad_token_id == trained.token_to_id("<pad>")
    assert loaded.eos_token_id == trained.token_to_id("</s>")
    for text in TEXTS:
        expected = tokenizer_kinds.without_padding(trained.encode(text))
        assert tokenizer_kinds.without_padding(raw.encode(text)) == expected
        encoded = loaded(text, truncation=True, max_length=max_length)
        assert encoded["input_ids"] == expected, repr(text)
        assert set(encoded) == {"input_ids", "attention_mask"}
    assert max(len(loaded(text)["input_ids"]) for text in TEXTS) > 12


@pytest.mark.parametrize("kind", tokenizer_kinds.PRETRAINED)
def test_a_pretrained_tokenizer_is_the_same_after_it_is_saved(tmp_path, kind):
    tokenizer_kinds.pretrained(kind).save_pretrained(str(tmp_path / "given"))
    tokenizer, fast = pretrained_tokenizer(str(tmp_path / "given"))
    expected = [fast.encode(text).ids for text in TEXTS]
    assert [tokenizer_kinds.pretrained(kind)(text)["input_ids"] for text in TEXTS] == expected
    tokenizer.save_pretrained(str(tmp_path / "saved"))
    saved, _ = pretrained_tokenizer(str(tmp_path / "saved"))
    assert [saved(text)["input_ids"] for text in TEXTS] == expected
    assert type(saved) is type(tokenizer)
    assert saved.special_tokens_map == tokenizer.special_tokens_map
    raw = Tokenizer.from_file(str(tmp_path / "saved/tokenizer.json"))
    assert [raw.encode(text).ids for text in TEXTS] == expected


@pytest.mark.core
@pytest.mark.parametrize("kind", tokenizer_kinds.PRETRAINED)
def test_tokenizer_folders_of_newer_transformers_are_read(tmp_path, kind):
    tokenizer = tokenizer_kinds.pretrained(kind)
    tokenizer.save_pretrained(str(tmp_path))
    path = tmp_path / "tokenizer.json"
    saved = json.loads(path.read_text(encoding="utf-8"))
    merges = saved["model"].get("merges", [])
    saved["model"]["merges"] = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
    path.write_text(json.dumps(saved))
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}\n你好")
    found, _ = pretrained_tokenizer(str(tmp_path))
    assert [found(text)["input_ids"] for text in TEXTS] == [tokenizer(text)["input_ids"] for text in TEXTS]
    assert found.chat_template == "{{ messages[0]['content'] }}\n你好"


@needs_0_4
def test_unknown_tokenizer_classes_are_read_and_merges_with_spaces_are_refused(tmp_path):
    tokenizer_kinds.pretrained("byte-level").save_pretrained(str(tmp_path))
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": "TokenizersBackend"}))
    assert type(pretrained_tokenizer(str(tmp_path))[0]).__name__ == "PreTrainedTokenizerFast"
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    saved["model"]["merges"] = [["a b", "c"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    with pytest.raises(InputError, match="tokenizer.json has tokens with spaces"):
        pretrained_tokenizer(str(tmp_path))


@pytest.mark.parametrize("kind", ["GPT2TokenizerFast", "LlamaTokenizerFast"])
def test_control_tokens_are_added_once(tmp_path, kind):
    tokenizer_kinds.pretrained(kind).save_pretrained(str(tmp_path / "given"))
    tokenizer, _ = pretrained_tokenizer(str(tmp_path / "given"))
    size, names = len(tokenizer), ("<|im_start|>", "<|im_end|>", tokenizer.eos_token)
    missing = [name for name in names if name not in tokenizer.get_vocab()]
    assert missing[0] == "<|im_start|>"
    assert add_control_tokens(tokenizer, names) == missing
    assert add_control_tokens(tokenizer, names) == []
    tokenizer.save_pretrained(str(tmp_path / "saved"))
    found, fast = pretrained_tokenizer(str(tmp_path / "saved"))
    assert add_control_tokens(found, names) == []
    assert fast.encode("a<|im_start|>\nb").tokens.count("<|im_start|>") == 1
    assert found("<|im_start|>", add_special_tokens=False)["input_ids"] == [size]
