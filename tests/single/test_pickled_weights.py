"""Test that the fine-tuning jobs run no code that comes with a pretrained model or a data set."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pytest
from library import is_0_5
from safetensors.numpy import load_file

import mindnlp_dp as dp
from mindnlp_dp.finetuning import pretrained
from mindnlp_dp.finetuning.pretrained import check_weights, load_pretrained
from mindnlp_dp.finetuning.settings import InputError
from mindnlp_dp.runtime.mindnlp_api import mindnlp_api, transformers_api
from mindnlp_dp.text_classification.hub import load_examples
from models import tiny_roberta

ROOT = Path(__file__).resolve().parents[2]


class WritesFile:
    """An object whose pickle creates a file when it is read."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    dp.init_process_group()
    folder = tmp_path_factory.mktemp("saved")
    tiny_roberta(seed=1).save_pretrained(str(folder))
    return folder


def index_of(file):
    return json.dumps({"metadata": {"total_size": 4}, "weight_map": {"classifier.weight": file}})


# The files of a folder, of which the first one is read first, and whether trusting them runs their code in MindNLP 0.4
# and 0.5, which reads no files of MindSpore.
FOLDERS = {
    "bin": (["pytorch_model.bin"], (True, True)),
    "shards": (["pytorch_model.bin.index.json", "a.bin"], (True, True)),
    "index of safetensors": (["model.safetensors.index.json", "a.bin"], (True, True)),
    "MindSpore": (["mindspore_model.ckpt"], (False, False)),
    "shards of MindSpore": (["mindspore_model.ckpt.index.json", "a.bin"], (True, False)),
    "PyTorch": (["weights.pt"], (False, False)),
}


def folder_of(name, saved, tmp_path):
    """Write the files of a folder, whose pickles create the file ``ran``."""
    (tmp_path / "config.json").write_bytes((saved / "config.json").read_bytes())
    for file in FOLDERS[name][0]:
        content = index_of("a.bin").encode() if file.endswith(".json") else pickle.dumps(WritesFile(tmp_path / "ran"))
        (tmp_path / file).write_bytes(content)
    return tmp_path


def classifier(folder, **options):
    return load_pretrained(transformers_api().AutoModelForSequenceClassification, str(folder), "model", **options)


@pytest.mark.parametrize("name", [pytest.param("bin", marks=pytest.mark.core), *list(FOLDERS)[1:]])
def test_pickled_weights_are_refused_and_their_code_does_not_run(name, saved, tmp_path):
    folder = folder_of(name, saved, tmp_path)
    files, runs = FOLDERS[name]
    file = "a.bin" if name == "index of safetensors" else files[0]
    with pytest.raises(InputError, match=f"{folder / file}.* is not a safetensors file.* --trust-pickle") as refused:
        classifier(folder)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "ran").exists()
    # The file is neither a model nor a checkpoint, so loading it fails after its code has run.
    with pytest.raises(InputError, match="cannot be loaded"):
        classifier(folder, trust_pickle=True)
    assert (tmp_path / "ran").exists() == runs[is_0_5]


def test_a_pickle_named_in_a_safetensors_index_is_not_loaded(saved, tmp_path, monkeypatch):
    """As for a hub name, whose files are known only when the library has downloaded them."""
    folder = folder_of("index of safetensors", saved, tmp_path)
    monkeypatch.setattr(pretrained, "check_weights", lambda name, trust_pickle: None)
    with pytest.raises(InputError, match=r"a\.bin is not a safetensors file"):
        classifier(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.skipif(not is_0_5, reason="MindNLP 0.4.1 does not load adapters by the name of a model")
def test_pickled_adapters_are_not_loaded(saved, tmp_path, monkeypatch):
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(saved), "peft_type": "LORA", "target_modules": ["query"]})
    )
    (tmp_path / "adapter_model.bin").write_bytes(pickle.dumps(WritesFile(tmp_path / "ran")))
    with pytest.raises(InputError, match=r"adapter_model\.bin is not a safetensors file"):
        classifier(tmp_path)
    monkeypatch.setattr(pretrained, "check_weights", lambda name, trust_pickle: None)
    with pytest.raises(InputError, match=r"adapter_model\.bin is not a safetensors file"):
        classifier(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("shard", [None, "5KB"])
def test_safetensors_are_loaded_from_a_folder_that_also_has_pickles(saved, tmp_path, shard):
    model = tiny_roberta(seed=1)
    model.save_pretrained(str(tmp_path), **({} if shard is None else {"max_shard_size": shard}))
    for name in ("training_args.bin", "optimizer.pt", "pytorch_model.bin"):
        (tmp_path / name).write_bytes(pickle.dumps(WritesFile(tmp_path / "ran")))
    name = "classifier.dense.weight"
    loaded = dict(classifier(tmp_path).named_parameters())[name].asnumpy()
    np.testing.assert_array_equal(loaded, load_file(str(saved / "model.safetensors"))[name])
    assert not (tmp_path / "ran").exists()


def test_trust_pickle_loads_one_pickle_and_the_next_is_refused(saved, tmp_path):
    (tmp_path / "config.json").write_bytes((saved / "config.json").read_bytes())
    mindnlp_api().save(tiny_roberta(seed=1).state_dict(), str(tmp_path / "pytorch_model.bin"))
    with pytest.raises(InputError, match="is not a safetensors file"):
        classifier(tmp_path)
    name = "classifier.dense.weight"
    loaded = dict(classifier(tmp_path, trust_pickle=True).named_parameters())[name].asnumpy()
    np.testing.assert_array_equal(loaded, load_file(str(saved / "model.safetensors"))[name])
    with pytest.raises(InputError, match="is not a safetensors file"):
        classifier(tmp_path)


@pytest.mark.parametrize("text", ["[]", "{}", '{"weight_map": [1]}', "no JSON", "\ud800"])
def test_an_invalid_safetensors_index_is_refused(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(InputError, match=r"model\.safetensors\.index\.json is not the index of a model"):
        check_weights(str(tmp_path), trust_pickle=False)


def test_model_names_folders_without_weights_and_trusted_files_are_accepted(tmp_path):
    (tmp_path / "training_args.bin").write_bytes(b"")
    for name in ("bert-base-uncased", "someone/model", str(tmp_path)):
        check_weights(name, trust_pickle=False)
    (tmp_path / "model.pt").write_bytes(b"")
    check_weights(str(tmp_path / "model.pt"), trust_pickle=True)
    with pytest.raises(InputError, match=r"model\.pt is not a safetensors file"):
        check_weights(str(tmp_path / "model.pt"), trust_pickle=False)


RECIPE = """
import sys
from mindnlp_dp.{module} import main
try:
    main()
except SystemExit as end:
    print(end, "mindspore" in sys.modules)
"""


@pytest.mark.parametrize(
    "module", ["text_classification.finetune_classifier", "language_modeling.finetune_language_model"]
)
def test_recipes_refuse_pickled_weights_before_importing_mindspore(saved, tmp_path, module):
    folder = folder_of("bin", saved, tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", RECIPE.format(module=module), "--model", str(folder), "--output-dir", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.stdout.startswith(f"error: the model {folder} is not loaded: {folder / 'pytorch_model.bin'} is not")
    assert done.stdout.endswith(" False\n")
    assert not (tmp_path / "ran").exists()


def test_the_script_of_a_data_set_is_not_run(tmp_path, monkeypatch):
    folder = tmp_path / "phrases"
    folder.mkdir()
    (folder / "phrases.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    # A variable of the environment may allow it for other programs.
    monkeypatch.setattr(datasets.config, "HF_DATASETS_TRUST_REMOTE_CODE", True)
    with pytest.raises(InputError, match=f"the data set {folder} "):
        load_examples(str(folder), "train")
    assert not Path(tmp_path / "ran").exists()
