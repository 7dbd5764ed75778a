"""Compares training at world size 1 with MindNLP's own Trainer: the wrapper changes nothing."""

from __future__ import annotations

import os

import numpy as np
import pytest
from mindnlp.core import nn
from mindnlp.core.serialization import load_checkpoint
from mindnlp.engine import Trainer, TrainingArguments
from mindspore.dataset import GeneratorDataset

import mindnlp_dp as dp
from models import LENGTH, Rows, tiny_roberta, train, weights


@pytest.fixture(autouse=True)
def group():
    return dp.init_process_group()


def pipeline(rows):
    source = [(rows.input_ids[i], np.ones(LENGTH, np.int64), rows.labels[i]) for i in range(len(rows))]
    return GeneratorDataset(source, ["input_ids", "attention_mask", "labels"], shuffle=False)


@pytest.mark.parametrize("optim", ["sgd", "adamw"])
def test_the_same_weights_and_losses_as_the_stock_trainer(tmp_path, optim):
    rows = Rows(22)
    settings = {
        "per_device_train_batch_size": 4, "num_train_epochs": 2, "learning_rate": 1e-2, "optim": optim,
        "logging_steps": 3, "save_strategy": "no", "disable_tqdm": True, "warmup_steps": 2, "max_grad_norm": 0.3,
    }  # fmt: skip
    stock = Trainer(tiny_roberta(seed=1), TrainingArguments(str(tmp_path), **settings), train_dataset=pipeline(rows))
    expected = stock.train()
    ours = train(tiny_roberta(seed=1), rows, tmp_path, dataset_shuffle=False, **settings)
    assert ours.output.global_step == expected.global_step == 12
    for mine, theirs in zip(ours.state.log_history, stock.state.log_history):
        assert mine.get("learning_rate") == theirs.get("learning_rate")
        assert mine.get("epoch") == theirs.get("epoch")
    # Gradients of key biases are rounding noise, which AdamW turns into full steps (see test_equivalence.py).
    for name, weight in weights(ours.model).items():
        loose = optim == "adamw" and name.endswith("key.bias")
        np.testing.assert_allclose(
            weight, weights(stock.model)[name], rtol=0, atol=0.12 if loose else 1e-4, err_msg=name
        )


def test_the_hook_leaves_gradients_as_they_are(tmp_path):
    model = tiny_roberta()
    trainer = dp.DataParallelTrainer(model, dp.DataParallelArguments(str(tmp_path)), train_dataset=Rows(4))
    from mindspore import ops

    for parameter in model.parameters():
        parameter.grad = ops.ones_like(parameter) * 3
    trainer.update_gradient_by_distributed_type(model)
    assert all((parameter.grad.asnumpy() == 3).all() for parameter in model.parameters())


def test_a_group_is_needed(tmp_path, monkeypatch):
    from mindnlp_dp.communication import default_group

    monkeypatch.setattr(default_group, "_group", None)
    with pytest.raises(RuntimeError, match="call mindnlp_dp.init_process_group"):
        dp.DataParallelTrainer(tiny_roberta(), TrainingArguments(str(tmp_path)))


def test_a_saved_model_is_loaded_by_plain_mindnlp(tmp_path):
    from mindnlp.transformers import RobertaForSequenceClassification

    trainer = train(tiny_roberta(), Rows(8), tmp_path, per_device_train_batch_size=4)
    trainer.save_model(str(tmp_path / "model"))
    loaded = RobertaForSequenceClassification.from_pretrained(str(tmp_path / "model"))
    for name, weight in weights(loaded).items():
        np.testing.assert_array_equal(weight, weights(trainer.model)[name], err_msg=name)


def test_a_module_is_saved_without_safetensors_as_mindnlp_does(tmp_path):
    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.whole = tiny_roberta()

        def forward(self, input_ids, attention_mask, labels=None):
            return self.whole(input_ids, attention_mask, labels=labels)

    trainer = train(Module(), Rows(8), tmp_path, per_device_train_batch_size=4, save_safetensors=False)
    trainer.save_model(str(tmp_path / "model"))
    assert os.listdir(tmp_path / "model") == ["mindspore_model.ckpt"]
    saved = load_checkpoint(str(tmp_path / "model" / "mindspore_model.ckpt"))
    for name, weight in weights(trainer.model).items():
        np.testing.assert_array_equal(saved[name].asnumpy(), weight, err_msg=name)


def test_streams_need_max_steps(tmp_path):
    def stream():
        rows = Rows(50)
        while True:
            yield {key: value for key, value in rows[0].items() if key != "row"}

    class Endless:
        def __iter__(self):
            return stream()

    trainer = train(tiny_roberta(), Endless(), tmp_path, max_steps=3)
    assert trainer.state.global_step == 3
    with pytest.raises(ValueError, match="max_steps"):
        train(tiny_roberta(), Endless(), tmp_path)
