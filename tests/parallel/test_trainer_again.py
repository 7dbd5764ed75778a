"""Test a Trainer that is used again, with another model, optimizer or set of trainable parameters."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from library import TrainerCallback, is_0_5, optim, set_seed

import mindnlp_dp as dp
from models import Rows, tiny_config, tiny_roberta, train, weights

SETTINGS = {"max_steps": 2, "per_device_train_batch_size": 2, "logging_steps": 1}


def freeze_encoder(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.startswith("classifier")


def unfreeze(model):
    for parameter in model.parameters():
        parameter.requires_grad = True


def trained_again(trainer):
    """Train, and return by how much each parameter moved, and the warnings of parameters left out."""
    before = weights(trainer.model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.output = trainer.train()
    after = weights(trainer.model)
    moved = {name: float(np.abs(after[name] - before[name]).max()) for name in before}
    return moved, [str(each.message) for each in caught if "in no group of" in str(each.message)]


def reset(trainer):
    trainer.optimizer = trainer.lr_scheduler = None


def test_a_reused_trainer_trains_unfrozen_parameters_with_a_new_optimizer(group, tmp_path):
    model = tiny_roberta()
    freeze_encoder(model)
    trainer = train(model, Rows(8 * group.world_size), tmp_path, **SETTINGS)
    unfreeze(model)
    moved, told = trained_again(trainer)
    assert not any(value for name, value in moved.items() if not name.startswith("classifier"))
    assert len(told) == (1 if group.is_main else 0)
    assert all("'roberta.embeddings.word_embeddings.weight'" in each and "and 1" in each for each in told)
    reset(trainer)
    moved, told = trained_again(trainer)
    assert moved["roberta.embeddings.word_embeddings.weight"] > 1e-3
    assert told == []
    freeze_encoder(model)
    moved, told = trained_again(trainer)
    assert {name for name, value in moved.items() if value} == {n for n in moved if n.startswith("classifier")}


@pytest.mark.core
def test_a_trainer_trains_another_model_as_a_new_trainer_does(group, tmp_path):
    rows = Rows(8 * group.world_size)
    trainer = train(tiny_roberta(seed=1), rows, tmp_path, **SETTINGS)
    trainer.model = tiny_roberta(seed=2)
    reset(trainer)
    trained_again(trainer)
    new = train(tiny_roberta(seed=2), rows, tmp_path, **SETTINGS)
    assert trainer.output.training_loss == new.output.training_loss
    for name, weight in weights(new.model).items():
        np.testing.assert_array_equal(weights(trainer.model)[name], weight, err_msg=name)


def test_a_trainer_reads_the_columns_of_another_model(group, tmp_path):
    class Renamed(type(tiny_roberta())):
        def forward(self, tokens, attention_mask=None, labels=None):
            return super().forward(input_ids=tokens, attention_mask=attention_mask, labels=labels)

    class Both(Rows):
        def __getitem__(self, index):
            row = super().__getitem__(index)
            return {**row, "tokens": row["input_ids"]}

    data = {"train_dataset": Both(8 * group.world_size), "eval_dataset": Both(3)}
    trainer = train(tiny_roberta(), data["train_dataset"], tmp_path, eval_dataset=data["eval_dataset"], **SETTINGS)
    new = type(trainer)(tiny_roberta(seed=2), trainer.args, **data)
    set_seed(2)
    trainer.model = Renamed(tiny_config())
    reset(trainer)
    assert trainer.evaluate()["eval_loss"] == new.evaluate()["eval_loss"]
    trained_again(trainer)
    new.train()
    for name, weight in weights(new.model).items():
        np.testing.assert_array_equal(weights(trainer.model)[name], weight, err_msg=name)


@pytest.mark.skipif(is_0_5, reason="PEFT's adapters are tried with MindNLP 0.4")
def test_a_trainer_trains_a_model_with_merged_lora_adapters(group, tmp_path):
    from mindnlp.peft import LoraConfig, get_peft_model

    config = LoraConfig(task_type="SEQ_CLS", r=2, lora_alpha=4, target_modules=["query", "value"], lora_dropout=0.0)
    trainer = train(get_peft_model(tiny_roberta(), config), Rows(8 * group.world_size), tmp_path, **SETTINGS)
    trainer.model = trainer.model.merge_and_unload()
    unfreeze(trainer.model)
    reset(trainer)
    moved, told = trained_again(trainer)
    assert moved["roberta.embeddings.word_embeddings.weight"] > 1e-3
    assert told == []


def test_a_trainer_trains_parameter_groups_added_to_its_optimizer(group, tmp_path):
    model = tiny_roberta()
    freeze_encoder(model)
    trainer = train(model, Rows(8 * group.world_size), tmp_path, **SETTINGS)
    unfreeze(model)
    known = {id(p) for each in trainer.optimizer.param_groups for p in each["params"]}
    added = [p for p in model.parameters() if id(p) not in known]
    trainer.optimizer.add_param_group({"params": added, "lr": 1e-2})
    moved, told = trained_again(trainer)
    assert moved["roberta.embeddings.word_embeddings.weight"] > 1e-3
    assert told == []


def test_a_train_step_warns_of_parameters_missing_from_its_optimizer(group):
    model = tiny_roberta()
    some = [p for name, p in model.named_parameters() if name.startswith("classifier")]

    def forward(**batch):
        return model(**batch).loss

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dp.make_train_step(forward, optim.SGD(some, lr=0.1), list(model.parameters()), model=model)
    told = [str(each.message) for each in caught if "in no group of SGD" in str(each.message)]
    assert len(told) == (1 if group.is_main else 0)
    assert all("'roberta.embeddings.word_embeddings.weight'" in each for each in told)


def test_optimizer_moments_are_kept_when_a_callback_needs_the_stock_step(group, tmp_path):
    """A callback that looks at gradients needs the optimizer's own code, whose state the ranks had sharded before."""

    class Looks(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            pass

    def run(*callbacks):
        trainer = train(tiny_roberta(), Rows(8 * group.world_size), tmp_path, **SETTINGS, max_grad_norm=0)
        for callback in callbacks:
            trainer.add_callback(callback)
        trainer.train()
        return weights(trainer.model)

    expected = run()
    for name, weight in run(Looks()).items():
        if not name.endswith("key.bias"):  # its gradient is rounding noise
            np.testing.assert_allclose(weight, expected[name], rtol=0, atol=1e-4, err_msg=name)


class FreezesEmbeddings(TrainerCallback):
    """Freezes the embeddings at the end of an update, and lets them train again after another."""

    def __init__(self, first, last):
        self.first, self.last, self.at = first, last, {}

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.at[state.global_step] = weights(model)
        if state.global_step in (self.first, self.last):
            for name, parameter in model.named_parameters():
                if "embeddings" in name:
                    parameter.requires_grad = state.global_step == self.last


@pytest.mark.core
@pytest.mark.parametrize(
    "settings",
    [{"zero_stage": 0}, {"zero_stage": 1}, {"zero_stage": 2}, {"gradient_accumulation_steps": 2}, {"max_grad_norm": 0}],
    ids=str,
)
def test_a_layer_frozen_by_a_callback_does_not_change(group, tmp_path, settings):
    callback = FreezesEmbeddings(2, 4)
    settings = {**SETTINGS, "max_steps": 6, "weight_decay": 0.1, **settings}
    train(tiny_roberta(), Rows(32 * group.world_size), tmp_path, callbacks=[callback], **settings)
    name, at = "roberta.embeddings.word_embeddings.weight", callback.at
    np.testing.assert_array_equal(at[4][name], at[2][name])
    assert np.abs(at[2][name] - at[1][name]).max() > 0
    assert np.abs(at[5][name] - at[4][name]).max() > 0
    assert np.abs(at[4]["classifier.dense.weight"] - at[2]["classifier.dense.weight"]).max() > 0


def test_a_layer_frozen_in_a_custom_loop_does_not_change_with_overlap(group):
    model = tiny_roberta()
    frozen = model.roberta.embeddings.word_embeddings.weight
    parameters = list(model.parameters())

    def forward(input_ids, labels):
        return model(input_ids=input_ids, labels=labels).loss

    optimizer, overlap = optim.AdamW(parameters, lr=1e-2), group.world_size > 1 and not is_0_5
    step = dp.make_train_step(forward, optimizer, parameters, model=model, overlap=overlap)
    batch = next(dp.make_loader(Rows(2 * group.world_size), 2, columns=["input_ids", "label"]).updates())[0]
    for _ in range(3):
        step(batch)
    frozen.requires_grad = False
    before, others = frozen.asnumpy().copy(), weights(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            step(batch)
    np.testing.assert_array_equal(frozen.asnumpy(), before)
    assert np.abs(weights(model)["classifier.dense.weight"] - others["classifier.dense.weight"]).max() > 0
