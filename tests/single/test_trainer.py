"""Test the Trainer at world size 1: training, saving and loading as with MindNLP's own Trainer."""

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
def test_one_process_trains_the_same_weights_as_the_stock_trainer(tmp_path, optim):
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


def stack(samples):
    columns = {"input_ids": "input_ids", "label": "labels"}
    return {new: np.stack([np.asarray(sample[name]) for sample in samples]) for name, new in columns.items()}


class OtherOrder(Trainer):
    def __init__(self, model, reference=None, beta=0.1, args=None, data_collator=None, **rest):
        super().__init__(model=model, args=args, **rest)
        self.reference, self.beta, self.data_collator = reference, beta, data_collator or stack


class PassesOn(Trainer):
    def __init__(self, *args, beta=0.1, **rest):
        super().__init__(*args, **rest)
        self.beta = beta


class TakesACollatorFromTheRest(Trainer):
    def __init__(self, *args, **rest):
        data_collator = rest.pop("data_collator", None)
        super().__init__(*args, **rest)
        self.data_collator = data_collator


class PassesOnToOtherOrder(OtherOrder):
    def __init__(self, beta, *args, **rest):
        super().__init__(*args, beta=beta, **rest)


class KeywordsOnly(Trainer):
    def __init__(self, *, args, model, **rest):
        super().__init__(model, args, **rest)


class MakesItsArguments(Trainer):
    def __init__(self, folder, model, train_dataset):
        args = TrainingArguments(folder, per_device_train_batch_size=4, max_steps=2, save_strategy="no")
        super().__init__(model, args, train_dataset=train_dataset)


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        (OtherOrder, lambda kind, model, args, rows: kind(model, None, 0.5, args, stack, train_dataset=rows)),
        (OtherOrder, lambda kind, model, args, rows: kind(model, args=args, train_dataset=rows, data_collator=stack)),
        (PassesOn, lambda kind, model, args, rows: kind(model, args, None, rows, beta=0.5, data_collator=stack)),
        (PassesOn, lambda kind, model, args, rows: kind(args=args, model=model, train_dataset=rows)),
        (PassesOnToOtherOrder, lambda kind, model, args, rows: kind(0.5, model, args=args, train_dataset=rows)),
        (
            TakesACollatorFromTheRest,
            lambda kind, model, args, rows: kind(model, args, train_dataset=rows, data_collator=stack),
        ),
        (KeywordsOnly, lambda kind, model, args, rows: kind(model=model, args=args, train_dataset=rows)),
        (MakesItsArguments, lambda kind, model, args, rows: kind(args.output_dir, model, rows)),
        (Trainer, lambda kind, model, args, rows: kind(model, args, None, rows)),
    ],
)
def test_a_trainer_with_its_own_constructor_trains(tmp_path, kind, call):
    mixed = type(f"DataParallel{kind.__name__}", (dp.DataParallelTrainerMixin, kind), {})
    args = TrainingArguments(str(tmp_path), per_device_train_batch_size=4, max_steps=2, save_strategy="no")
    trainer = call(mixed, tiny_roberta(), args, Rows(8))
    assert isinstance(trainer.args, dp.DataParallelArguments)
    if kind in (OtherOrder, TakesACollatorFromTheRest):
        assert trainer.data_collator is stack
    assert trainer.train().global_step == 2


def test_the_dpo_trainer_of_mindnlp_is_refused_because_it_sums_logits(tmp_path):
    import mindspore
    from mindnlp.trl import DPOConfig, DPOTrainer

    mixed = type("MyDPOTrainer", (dp.DataParallelTrainerMixin, DPOTrainer), {})
    with pytest.raises(NotImplementedError, match=r"adds up logits .* examples/preference.py"):
        mixed(tiny_roberta(), args=DPOConfig(str(tmp_path)))
    logits, labels = mindspore.Tensor(np.full((1, 3, 5), 7, np.float32)), mindspore.Tensor([[1, 2, 3]])
    # Each of the two labels has a log probability of -log(5). If this fails, the refusal can be removed.
    assert DPOTrainer.get_batch_logps(logits, labels)[0].asnumpy() == pytest.approx([14.0])


def test_update_gradient_by_distributed_type_does_not_change_gradients(tmp_path):
    model = tiny_roberta()
    trainer = dp.DataParallelTrainer(model, dp.DataParallelArguments(str(tmp_path)), train_dataset=Rows(4))
    from mindspore import ops

    for parameter in model.parameters():
        parameter.grad = ops.ones_like(parameter) * 3
    trainer.update_gradient_by_distributed_type(model)
    assert all((parameter.grad.asnumpy() == 3).all() for parameter in model.parameters())


def test_a_trainer_without_a_process_group_is_refused(tmp_path, monkeypatch):
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
