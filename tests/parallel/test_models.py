"""Test models with frozen, unused or tied weights, with LoRA adapters, and with losses weighted by tokens."""

from __future__ import annotations

import os

import mindspore
import numpy as np
import pytest
from mindnlp.transformers import RobertaForMaskedLM

import mindnlp_dp as dp
from mindnlp_dp.runtime.named_weights import all_names
from models import LENGTH, Rows, alone, tiny_config, tiny_roberta, train, weights

SETTINGS = {"optim": "sgd", "learning_rate": 1e-1, "logging_steps": 1}


def together_and_alone(group, folder, build, rows, trainer_class=None, **more):
    """Run the same training on all ranks and in one process with the full batch, and compare the results."""
    settings = {**SETTINGS, **more}
    together = train(build(), rows, folder, trainer_class, per_device_train_batch_size=4, **settings)
    with alone():
        settings["per_device_train_batch_size"] = 4 * group.world_size
        single = train(build(), rows, folder / "alone", trainer_class, **settings)
    assert together.state.global_step == single.state.global_step > 1
    expected, before = weights(single.model), weights(build())
    assert any(np.abs(expected[name] - before[name]).max() > 1e-3 for name in before)
    for name, weight in weights(together.model).items():
        np.testing.assert_allclose(weight, expected[name], rtol=0, atol=4e-6, err_msg=name)
    for mine, theirs in zip(together.state.log_history, single.state.log_history):
        assert mine.get("loss") == pytest.approx(theirs.get("loss"), abs=1.1e-4)
    return together, single


@pytest.mark.core
def test_parameters_unused_on_some_ranks_train_as_in_one_process(group, tmp_path):
    """A micro-batch without a label 0 does not use the head for label 0."""

    class TwoHeads(dp.DataParallelTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            labels = inputs["labels"].asnumpy()
            hidden = model.roberta(inputs["input_ids"])[0]
            losses = []
            for row, label in enumerate(labels):
                head = model.classifier.dense if label == 0 else model.classifier.out_proj
                losses.append((head(hidden[row, 0]) ** 2).mean())
            return sum(losses) / len(losses)

    rows = Rows(8 * group.world_size + 3)
    rows.labels[:] = 1
    rows.labels[::7] = 0  # so few that some micro-batches have none
    together_and_alone(group, tmp_path, lambda: tiny_roberta(seed=1), rows, TwoHeads)


def test_label_smoothing_on_n_ranks_equals_one_process(group, tmp_path):
    rows = Rows(8 * group.world_size)
    smooth, _ = together_and_alone(group, tmp_path, lambda: tiny_roberta(seed=1), rows, label_smoothing_factor=0.3)
    plain = train(tiny_roberta(seed=1), rows, tmp_path, per_device_train_batch_size=4, **SETTINGS)
    assert plain.output.training_loss != smooth.output.training_loss


class MaskedRows(Rows):
    """Samples with zero to seven masked tokens, so that micro-batches have different weights."""

    def __getitem__(self, index):
        ids = self.input_ids[index]
        masked = np.arange(LENGTH) < index % LENGTH
        return {"input_ids": np.where(masked, 4, ids), "labels": np.where(masked, ids, -100)}


class ByMaskedTokens(dp.DataParallelTrainer):
    def loss_weight(self, inputs):
        return float((inputs["labels"] != -100).sum())


def masked_lm(seed=1):
    from library import set_seed

    set_seed(seed)
    return RobertaForMaskedLM(tiny_config())


def test_token_weighted_loss_with_tied_weights_equals_one_process(group, tmp_path):
    """RoBERTa's masked language model averages over labeled tokens only, and ties its decoder to its embedding."""
    together, single = together_and_alone(group, tmp_path, masked_lm, MaskedRows(8 * group.world_size), ByMaskedTokens)
    tied = all_names(together.model)
    assert tied["lm_head.decoder.weight"] is tied["roberta.embeddings.word_embeddings.weight"]
    rows = MaskedRows(8 * group.world_size + 1, seed=3)
    loss = together.evaluate(rows)["eval_loss"]
    with alone():
        assert single.evaluate(rows)["eval_loss"] == pytest.approx(loss, abs=1e-5)


def test_tied_weights_resume_with_the_same_digest_and_stay_tied(group, shared_tmp_path):
    settings = {**SETTINGS, "per_device_train_batch_size": 4, "save_strategy": "steps", "save_steps": 1}
    rows = MaskedRows(12 * group.world_size)
    whole = train(masked_lm(), rows, shared_tmp_path, ByMaskedTokens, **settings)
    group.barrier()
    first = str(shared_tmp_path / "checkpoint-1")
    resumed = train(
        masked_lm(seed=2),
        rows,
        shared_tmp_path,
        ByMaskedTokens,
        resume=first,
        **settings,
    )
    assert resumed.replica_digest == whole.replica_digest
    tied = all_names(resumed.model)
    assert tied["lm_head.decoder.weight"] is tied["roberta.embeddings.word_embeddings.weight"]


def with_lora(base_seed=1):
    from mindnlp.peft import LoraConfig, get_peft_model

    settings = LoraConfig(task_type="SEQ_CLS", r=2, lora_alpha=4, target_modules=["query", "value"], lora_dropout=0.1)
    return get_peft_model(tiny_roberta(seed=base_seed), settings)


@pytest.mark.core
@pytest.mark.parametrize("options", [{}, {"optim": "muon", "zero_stage": 2}], ids=["adamw", "muon"])
def test_lora_trains_its_adapters_resumes_and_is_loaded_by_mindnlp(group, shared_tmp_path, options):
    from mindnlp.peft import PeftModel

    rows = Rows(12 * group.world_size)
    settings = {"per_device_train_batch_size": 4, "save_strategy": "steps", "save_steps": 1, "learning_rate": 0.1}
    settings.update(options)
    before = weights(with_lora())
    whole = train(with_lora(), rows, shared_tmp_path, **settings)
    for name, weight in weights(whole.model).items():
        trained = "lora_" in name or "modules_to_save" in name
        assert np.array_equal(weight, before[name]) != trained, name
    group.barrier()
    checkpoint = shared_tmp_path / "checkpoint-1"
    assert os.path.getsize(checkpoint / "model.safetensors") < 10_000  # the base model is not in it
    resumed = train(with_lora(), rows, shared_tmp_path, resume=str(checkpoint), **settings)
    assert resumed.replica_digest == whole.replica_digest
    with pytest.raises(ValueError, match="the model is not the one that was saved"):
        train(with_lora(base_seed=2), rows, shared_tmp_path, resume=str(checkpoint), **settings)

    loaded = PeftModel.from_pretrained(tiny_roberta(seed=1), str(shared_tmp_path / "checkpoint-3"))
    for name, weight in weights(loaded).items():
        np.testing.assert_array_equal(weight, weights(whole.model)[name], err_msg=name)


@pytest.mark.parametrize("kind", ["frozen", "all frozen but one"])
def test_frozen_parameters_resume_with_the_same_digest_and_unfreezing_is_refused(group, shared_tmp_path, kind):
    def build(seed=1):
        model = tiny_roberta(seed=seed)
        for name, parameter in model.named_parameters():
            parameter.requires_grad = name == "classifier.out_proj.bias" if "all" in kind else "layer.0" not in name
        return model

    settings = {"per_device_train_batch_size": 4, "save_strategy": "steps", "save_steps": 1}
    whole = train(build(), Rows(12 * group.world_size), shared_tmp_path, **settings)
    group.barrier()
    first = str(shared_tmp_path / "checkpoint-1")
    resumed = train(
        build(seed=2),
        Rows(12 * group.world_size),
        shared_tmp_path,
        resume=first,
        **settings,
    )
    assert resumed.replica_digest == whole.replica_digest
    if kind == "frozen":
        with pytest.raises(ValueError, match="the saved optimizer updates .* parameters in .* freeze and group them"):
            train(tiny_roberta(), Rows(12 * group.world_size), shared_tmp_path, resume=True, **settings)


def test_buffers_of_a_plain_module_are_resumed_from_a_checkpoint(group, shared_tmp_path):
    """The model is not a PreTrainedModel, and its buffers are part of a checkpoint."""
    from library import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(50, 4)
            self.out = nn.Linear(4, 3)
            self.register_buffer("calls", mindspore.Tensor(np.zeros(1, np.float32)))

        def forward(self, input_ids, labels=None):
            if self.training:
                self.calls.assign_value(self.calls + 1)
            logits = self.out(self.embedding(input_ids).mean(1))
            return mindspore.ops.cross_entropy(logits, labels.astype(mindspore.int32)), logits

    rows = Rows(12 * group.world_size)
    settings = {"per_device_train_batch_size": 4, "save_strategy": "steps", "save_steps": 1}
    whole = train(Net(), rows, shared_tmp_path, **settings)
    assert whole.model.calls.asnumpy().tolist() == [3]
    group.barrier()
    first = str(shared_tmp_path / "checkpoint-1")
    resumed = train(Net(), rows, shared_tmp_path, resume=first, **settings)
    assert resumed.replica_digest == whole.replica_digest


def test_lora_resumes_although_the_new_head_was_not_seeded(group, shared_tmp_path):
    """PEFT keeps a copy of the initial head, which is never computed and is in no checkpoint."""

    def build(seed):
        model = with_lora()
        for name, parameter in model.named_parameters():
            if "original_cell" in name or "modules_to_save" in name:
                value = np.random.default_rng(seed).standard_normal(parameter.shape).astype(np.float32)
                parameter.assign_value(mindspore.Tensor(value))
        return model

    settings = {"per_device_train_batch_size": 4, "save_strategy": "steps", "save_steps": 1}
    rows = Rows(12 * group.world_size)
    whole = train(build(1), rows, shared_tmp_path, **settings)
    group.barrier()
    resumed = train(build(2), rows, shared_tmp_path, resume=str(shared_tmp_path / "checkpoint-1"), **settings)
    assert resumed.replica_digest == whole.replica_digest
