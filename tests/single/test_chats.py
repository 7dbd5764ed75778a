"""Test that models trained on chats, with the templates of known models, stop at the end of their turn."""

from __future__ import annotations

import chat_models
import numpy as np
import pytest

from mindnlp_dp.finetuning.tokenizers import pretrained_tokenizer
from mindnlp_dp.runtime.mindnlp_api import transformers_api


def answers(folder):
    """Return what the saved model answers to the first words, with its special tokens."""
    from mindspore import Tensor

    tokenizer, _ = pretrained_tokenizer(str(folder))
    model = transformers_api().AutoModelForCausalLM.from_pretrained(str(folder))
    model.set_train(False)
    found = []
    for word in chat_models.WORDS[:3]:
        text = tokenizer.apply_chat_template(chat_models.chat(word)[:1], tokenize=False, add_generation_prompt=True)
        ids = np.array([tokenizer(text, add_special_tokens=False)["input_ids"]])
        output = model.generate(
            Tensor(ids), attention_mask=Tensor(np.ones_like(ids)), max_new_tokens=16, pad_token_id=0
        )
        found.append(tokenizer.decode(output.asnumpy()[0, ids.shape[1] :].tolist()).strip())
    return found


CORE = ("qwen base", "gemma base", "gpt2")


@pytest.mark.core
@pytest.mark.parametrize("kind", [kind for kind in chat_models.CASES if kind in CORE])
def test_generation_stops_at_the_end_of_a_chat_turn(monkeypatch, tmp_path, kind):
    train_and_answer(monkeypatch, tmp_path, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in chat_models.CASES if kind not in CORE])
def test_generation_of_other_models_stops_at_the_end_of_a_chat_turn(monkeypatch, tmp_path, kind):
    train_and_answer(monkeypatch, tmp_path, kind)


def train_and_answer(monkeypatch, tmp_path, kind):
    report, end = chat_models.train(monkeypatch, tmp_path, kind)
    assert [sample["completion"].strip() for sample in report["samples"]] == ["red it is", "blue it is"]
    assert answers(tmp_path / "out/model") == [f"{word} it is{end}" for word in chat_models.WORDS[:3]]
