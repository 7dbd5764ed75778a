"""Test that models stop where their turn ends, after they are trained on chats with the templates of known models."""

from __future__ import annotations

import json
import sys

import chat_models
import numpy as np
import pytest
from library import is_0_5

pytestmark = pytest.mark.skipif(is_0_5, reason="the recipe is for MindNLP 0.4")
if not is_0_5:
    from mindspore import Tensor

    from mindnlp_dp.language_modeling.finetune import main
    from mindnlp_dp.language_modeling.tokenization import pretrained_tokenizer
    from mindnlp_dp.runtime.mindnlp_api import transformers_api


def train(monkeypatch, folder, *flags):
    """Train for a minute at most; return the report."""
    sizes = "--hidden-size 64 --num-layers 2 --num-heads 2 --intermediate-size 128 --max-length 64 --vocab-size 300"
    steps = "--max-steps 100 --global-batch-size 8 --learning-rate 5e-3 --max-new-tokens 16 --num-samples 2"
    words = ["finetune_llm.py", *sizes.split(), *steps.split(), "--output-dir", str(folder / "out"), *map(str, flags)]
    monkeypatch.setattr(sys, "argv", [*words, *chat_models.write_chats(folder)])
    main()
    return json.loads((folder / "out/report.json").read_text())


def answers(folder):
    """Return what the saved model answers, as tokens, and what it was taught to."""
    tokenizer, _ = pretrained_tokenizer(str(folder))
    model = transformers_api().AutoModelForCausalLM.from_pretrained(str(folder))
    model.set_train(False)
    for word in chat_models.WORDS[:3]:
        text = tokenizer.apply_chat_template(chat_models.chat(word)[:1], tokenize=False, add_generation_prompt=True)
        ids = np.array([tokenizer(text, add_special_tokens=False)["input_ids"]])
        output = model.generate(
            Tensor(ids), attention_mask=Tensor(np.ones_like(ids)), max_new_tokens=16, pad_token_id=0
        )
        found = tokenizer.decode(output.asnumpy()[0, ids.shape[1] :].tolist(), skip_special_tokens=False)
        yield found.strip(), f"{word} it is"


CASES = {
    "tiny": ("chatml", "<|im_end|>"),
    "qwen base": ("chatml", "<|im_end|>"),
    "qwen instruct": ("tokenizer", "<|im_end|>"),
    "gpt2": ("chatml", "<|im_end|>"),
    "gemma": ("tokenizer", "<end_of_turn>"),
    "gemma base": ("tokenizer", "<end_of_turn>"),
    "llama3": ("tokenizer", "<|eot_id|>"),
    "mistral": ("tokenizer", "</s>"),
}


def trained(monkeypatch, tmp_path, kind):
    """Train a model of a kind on chats, with its template; return the report, and the end of a turn."""
    template, end = CASES[kind]
    flags = ["--template", template]
    if kind != "tiny":
        chat_models.save_untrained(kind, tmp_path / "base")
        flags += ["--model", tmp_path / "base"]
    return train(monkeypatch, tmp_path, *flags), end


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.core] * (kind == "qwen base")) for kind in CASES]
)
def test_an_answer_ends_where_it_should(monkeypatch, tmp_path, kind):
    report, end = trained(monkeypatch, tmp_path, kind)
    assert [sample["completion"].strip() for sample in report["samples"]] == ["red it is", "blue it is"]
    assert list(answers(tmp_path / "out/model")) == [(text + end, text) for _, text in answers(tmp_path / "out/model")]
