"""Test that Transformers and PEFT on PyTorch open our checkpoints, and compute the same outputs.

Both the newest Transformers and a 4.x do: the variables TORCH_PYTHON and TORCH_PYTHON_4 name a Python that has torch,
transformers and peft of each; without them, these tests make the environments .venv-transformers and
.venv-transformers-4 (3 GB each).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import chat_models
import numpy as np
import pytest
import tokenizer_kinds
from library import is_0_5

import mindnlp_dp as dp
from mindnlp_dp.checkpoint.directory import checkpoints_in
from mindnlp_dp.commands.main import main
from mindnlp_dp.finetuning.saved_model import load_saved
from mindnlp_dp.finetuning.tokenizers import pretrained_tokenizer
from models import train

pytestmark = [pytest.mark.slow, pytest.mark.skipif(is_0_5, reason="MindNLP 0.5 writes these files itself")]
if not is_0_5:
    import tiny_transformers

ROOT = Path(__file__).resolve().parent.parent.parent
# What the other Python runs: logits of a model, or of a model with adapters, for the same rows.
BY_TORCH = """
import sys
import numpy as np, torch
from transformers import AutoModelForCausalLM

folder, adapters, rows, output = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
if adapters:
    from peft import PeftModel
    model = PeftModel.from_pretrained(model, adapters)
model.eval()
with torch.no_grad():
    np.save(output, model(input_ids=torch.from_numpy(np.load(rows))).logits.numpy())
"""


# The packages beside torch of each environment, by the end of its variable's name.
PACKAGES = {"": ["transformers>=5", "peft"], "_4": ["transformers==4.55.4", "peft==0.17.1"]}


@pytest.fixture(scope="session", params=PACKAGES, ids=["newest", "4"])
def torch_python(request):
    if given := os.environ.get(f"TORCH_PYTHON{request.param}"):
        return given
    folder = ROOT / f".venv-transformers{request.param.replace('_', '-')}"
    python = folder / "bin/python"
    if not (folder / ".installed").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--no-compile", "torch", *PACKAGES[request.param]]
        if subprocess.run(install, check=False).returncode:
            pytest.skip("torch, transformers and peft cannot be installed here")
        (folder / ".installed").touch()
    return str(python)


def logits_by_torch(python, folder, rows, tmp_path, adapters=""):
    np.save(tmp_path / "rows.npy", rows)
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [python, "-c", BY_TORCH, str(folder), str(adapters), str(tmp_path / "rows.npy"), str(tmp_path / "y.npy")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    return np.load(tmp_path / "y.npy")


def test_a_saved_model_in_several_files_opens_in_transformers(tmp_path, torch_python):
    model = tiny_transformers.build("llama")
    model.save_pretrained(str(tmp_path / "model"), max_shard_size="10KB")
    assert len(list((tmp_path / "model").glob("model-*.safetensors"))) > 1
    rows = Rows("llama").batch["input_ids"]
    found = logits_by_torch(torch_python, tmp_path / "model", rows, tmp_path)
    np.testing.assert_allclose(found, logits_by_mindnlp(model, rows), atol=1e-4)


def logits_by_mindnlp(model, rows):
    from mindspore import Tensor

    model.set_train(False)
    return model(input_ids=Tensor(rows)).logits.asnumpy()


class Rows:
    def __init__(self, kind):
        self.batch = tiny_transformers.batch(kind, 8)

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {name: column[index] for name, column in self.batch.items()}


SETTINGS = {"per_device_train_batch_size": 4, "max_steps": 2, "save_strategy": "steps", "save_steps": 2}


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "opt"])
def test_a_checkpoint_opens_in_transformers(tmp_path, torch_python, kind):
    dp.init_process_group()
    trainer = train(tiny_transformers.build(kind), Rows(kind), tmp_path / "out", **SETTINGS)
    (checkpoint,) = checkpoints_in(tmp_path / "out")
    rows = Rows(kind).batch["input_ids"]
    found = logits_by_torch(torch_python, checkpoint, rows, tmp_path)
    np.testing.assert_allclose(found, logits_by_mindnlp(trainer.model, rows), atol=1e-4)


def test_lora_adapters_open_in_peft(tmp_path, torch_python):
    dp.init_process_group()
    kind = "llama" + tiny_transformers.LORA
    base = tiny_transformers.build("llama")
    base.save_pretrained(str(tmp_path / "base"))
    model = tiny_transformers.build(kind)
    trainer = train(model, Rows(kind), tmp_path / "out", **SETTINGS)
    (checkpoint,) = checkpoints_in(tmp_path / "out")
    rows = Rows(kind).batch["input_ids"]
    found = logits_by_torch(torch_python, tmp_path / "base", rows, tmp_path, adapters=checkpoint)
    np.testing.assert_allclose(found, logits_by_mindnlp(trainer.model, rows), atol=1e-4)


# What the other Python runs: the tokens of texts, by AutoTokenizer and by the library tokenizers; and, with a folder to
# write, the tokenizer as this version of Transformers saves it.
TOKENS_BY_TRANSFORMERS = """
import json, sys
from tokenizers import Tokenizer
from transformers import AutoTokenizer

folder, texts, output, saved = sys.argv[1:]
tokenizer, texts = AutoTokenizer.from_pretrained(folder), json.load(open(texts))
raw = Tokenizer.from_file(folder + "/tokenizer.json")
raw.no_padding()
json.dump(
    {
        "ids": [tokenizer(text, truncation=True)["input_ids"] for text in texts],
        "raw": [raw.encode(text).ids for text in texts],
        "length": tokenizer.model_max_length, "names": list(tokenizer("a")), "template": tokenizer.chat_template,
    },
    open(output, "w"),
)
if saved:
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(saved)
"""


def tokens_by_transformers(python, folder, tmp_path, saved=""):
    (tmp_path / "texts.json").write_text(json.dumps(tokenizer_kinds.texts()))
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [python, "-c", TOKENS_BY_TRANSFORMERS, str(folder), "texts.json", "ids.json", str(saved)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads((tmp_path / "ids.json").read_text())


@pytest.mark.parametrize("kind", ["classifier", "classifier in lower case", "language model"])
def test_a_trained_tokenizer_is_the_same_in_transformers(tmp_path, torch_python, kind):
    trained, max_length = tokenizer_kinds.save_trained(kind, tmp_path / "model")
    model_type = "llama" if "language" in kind else "roberta"
    (tmp_path / "model/config.json").write_text(json.dumps({"model_type": model_type}))
    found = tokens_by_transformers(torch_python, tmp_path / "model", tmp_path)
    assert found["ids"] == [tokenizer_kinds.without_padding(trained.encode(text)) for text in tokenizer_kinds.texts()]
    assert found["raw"] == found["ids"]
    assert found["length"] == max_length
    assert found["names"] == ["input_ids", "attention_mask"]


@pytest.mark.parametrize("kind", tokenizer_kinds.PRETRAINED)
def test_a_pretrained_tokenizer_is_the_same_in_transformers_and_back(tmp_path, torch_python, kind, request):
    if "newest" in request.node.callspec.id and kind != "byte-level":
        pytest.skip("Transformers 5 gives a model's class the steps of published tokenizers, and these are made up")
    tokenizer = tokenizer_kinds.pretrained(kind)
    tokenizer.save_pretrained(str(tmp_path / "model"))
    found = tokens_by_transformers(torch_python, tmp_path / "model", tmp_path, saved=tmp_path / "saved")
    expected = [tokenizer(text)["input_ids"] for text in tokenizer_kinds.texts()]
    assert found["ids"] == expected
    back, _ = pretrained_tokenizer(str(tmp_path / "saved"))
    assert [back(text)["input_ids"] for text in tokenizer_kinds.texts()] == expected
    assert back.chat_template == "{{ messages[0]['content'] }}"


# What the other Python runs: what a model answers to the first words, by greedy generation as its folder says.
ANSWERS_BY_TORCH = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, words, output = sys.argv[1:]
tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).eval()
found = []
for word in words.split():
    chat = [{"role": "user", "content": "say " + word}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    asked = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    answer = model.generate(**asked, max_new_tokens=16, do_sample=False)[0, asked["input_ids"].shape[1]:]
    found.append(tokenizer.decode(answer).strip())
json.dump(found, open(output, "w"))
"""


@pytest.mark.parametrize("kind", chat_models.CASES)
def test_generation_stops_at_the_end_of_a_chat_turn_in_transformers(monkeypatch, tmp_path, torch_python, kind):
    _, end = chat_models.train(monkeypatch, tmp_path, kind)
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = " ".join(chat_models.WORDS[:3])
    command = [torch_python, "-c", ANSWERS_BY_TORCH, str(tmp_path / "out/model"), words, "answers.json"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "answers.json").read_text()) == [f"{word} it is{end}" for word in words.split()]


@pytest.mark.parametrize(
    ("kind", "flags"),
    [("qwen base", []), ("qwen base", ["--use-rslora"]), ("qwen base", ["--use-dora"]), ("gpt2", ["--use-dora"])],
    ids=str,
)
def test_lora_adapters_and_the_merged_model_give_the_same_logits_in_pytorch(
    monkeypatch, tmp_path, torch_python, kind, flags
):
    folder = chat_models.train_adapters(monkeypatch, tmp_path, kind, *flags, "--max-steps", 20)
    assert main(["export", str(tmp_path / "out"), str(tmp_path / "merged"), "--merge-lora"]) == 0
    rows = np.arange(4, 24).reshape(2, 10)
    expected = logits_by_mindnlp(load_saved(str(folder)), rows)
    found = logits_by_torch(torch_python, tmp_path / "merged", rows, tmp_path)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    found = logits_by_torch(torch_python, tmp_path / "base", rows, tmp_path, adapters=folder)
    np.testing.assert_allclose(found, expected, atol=1e-4)
