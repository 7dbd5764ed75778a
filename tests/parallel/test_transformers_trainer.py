"""Test what the Trainer of MindNLP 0.5 takes from Transformers."""

from __future__ import annotations

import dataclasses
import os

import numpy as np
import pytest
from library import Trainer, TrainerCallback, TrainingArguments, is_0_5, nn, set_seed

import mindnlp_dp as dp
from models import Rows, alone, tiny_roberta, train, weights

if is_0_5:
    from transformers.trainer_callback import ExportableState, TrainerState
else:
    ExportableState = object

pytestmark = pytest.mark.skipif(not is_0_5, reason="of MindNLP 0.5")


@pytest.mark.core
def test_a_second_train_call_trains_the_new_model_of_model_init(group, tmp_path):
    args = dp.DataParallelArguments(
        str(tmp_path), per_device_train_batch_size=2, max_steps=3, learning_rate=1e-2, save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip

    def build():
        # It has no arguments, because Transformers inspects their number.
        return tiny_roberta()

    trainer = dp.DataParallelTrainer(model_init=build, args=args, train_dataset=Rows(8 * group.world_size))
    trainer.train()
    first = weights(trainer.model)
    trainer.train()
    for name, weight in weights(trainer.model).items():
        np.testing.assert_array_equal(weight, first[name], err_msg=name)
    start = weights(tiny_roberta())
    assert any(np.abs(first[name] - start[name]).max() > 1e-3 for name in start)


def test_compute_loss_func_is_checked_like_an_own_loss(group, tmp_path, recwarn):
    """Its labels are its own, and class weights without loss_weight are found out."""
    from mindtorch.nn import functional

    def weighted(outputs, labels, num_items_in_batch=None):
        weight = outputs["logits"].new_tensor([0.1, 3.0, 1.0])
        return functional.cross_entropy(outputs["logits"], labels - 3, weight=weight)

    class Weighted(dp.DataParallelTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, compute_loss_func=weighted, **kwargs)

    class Beyond(Rows):
        def __getitem__(self, index):
            row = super().__getitem__(index)
            return {**row, "label": row["label"] + 3}

    steps = 2 if group.world_size == 1 else 1
    train(
        tiny_roberta(), Beyond(32 * group.world_size), tmp_path, Weighted, max_steps=4, per_device_train_batch_size=8,
        gradient_accumulation_steps=steps,
    )  # fmt: skip
    said = [str(each.message) for each in recwarn if "is not a mean with its loss weights" in str(each.message)]
    assert len(said) == group.is_main


def test_compute_loss_func_with_num_items_in_batch_trains_like_one_process(group, tmp_path):
    from mindtorch.nn import functional

    def loss(outputs, labels, num_items_in_batch=None):
        return functional.cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch

    class OfTheSum(dp.DataParallelTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, compute_loss_func=loss, **kwargs)

    settings = {"trainer_class": OfTheSum, "max_steps": 4, "optim": "sgd", "logging_steps": 1}
    together = train(tiny_roberta(), Rows(13), tmp_path, per_device_train_batch_size=4 // group.world_size, **settings)
    with alone():
        single = train(tiny_roberta(), Rows(13), tmp_path, per_device_train_batch_size=4, **settings)
    expected = weights(single.model)
    for name, weight in weights(together.model).items():
        np.testing.assert_allclose(weight, expected[name], rtol=0, atol=2e-6, err_msg=name)


@dataclasses.dataclass
class MyArguments(TrainingArguments):
    mine: int = 3


class Module(nn.Module):
    """A model that is not one of Transformers'."""

    def __init__(self):
        super().__init__()
        self.whole = tiny_roberta()

    def forward(self, input_ids, attention_mask, labels=None):
        return self.whole(input_ids, attention_mask, labels=labels)


@pytest.mark.parametrize(("build", "safe"), [(tiny_roberta, True), (Module, True), (Module, False)])
def test_training_arguments_are_saved_beside_a_plain_module(group, shared_tmp_path, build, safe):
    import mindtorch

    args = MyArguments(
        str(shared_tmp_path), per_device_train_batch_size=2, max_steps=2, save_steps=2, disable_tqdm=True, mine=5,
        save_safetensors=safe,
    )  # fmt: skip
    trainer = dp.DataParallelTrainer(build(), args, train_dataset=Rows(8 * group.world_size))
    trainer.train()
    trainer.save_model()
    group.barrier()
    files = {"model.safetensors" if safe else "pytorch_model.bin", "training_args.bin"}
    assert {path.name for path in shared_tmp_path.iterdir() if path.is_file()} - {"config.json"} == files
    if not safe:
        saved = mindtorch.load(str(shared_tmp_path / "pytorch_model.bin"))
        np.testing.assert_array_equal(
            saved["whole.classifier.dense.weight"].asnumpy(), weights(trainer.model)["whole.classifier.dense.weight"]
        )
    assert trainer.args.parallel_mode.value == ("distributed" if group.world_size > 1 else "not_distributed")
    if group.is_main:
        found = mindtorch.load(str(shared_tmp_path / "checkpoint-2" / "training_args.bin"), weights_only=False)
        assert (type(found), found.mine) == (MyArguments, 5)


class Counts(TrainerCallback, ExportableState):
    def __init__(self, limit=3):
        self.limit, self.count = limit, 0

    def on_step_end(self, args, state, control, **kwargs):
        self.count += 1

    def state(self):
        return {"args": {"limit": self.limit}, "attributes": {"count": self.count}}


@pytest.mark.core
@pytest.mark.parametrize("restores", [False, True])
def test_exported_callback_states_are_restored_on_resume(group, shared_tmp_path, restores):
    """As in Transformers, restore_callback_states_from_checkpoint restores the arguments of the callbacks, too."""
    settings = {"per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 2}
    train(
        tiny_roberta(), Rows(24 * group.world_size), shared_tmp_path, max_steps=4,
        callbacks=[Counts(), Counts(limit=4)], **settings,
    )  # fmt: skip
    group.barrier()
    saved = TrainerState.load_from_json(str(shared_tmp_path / "checkpoint-2" / "trainer_state.json"))
    assert [state["attributes"]["count"] for state in saved.stateful_callbacks["Counts"]] == [2, 2]
    assert "TrainerControl" in saved.stateful_callbacks
    trainer = train(
        tiny_roberta(), Rows(24 * group.world_size), shared_tmp_path, max_steps=5, callbacks=[Counts(7), Counts(7)],
        resume=str(shared_tmp_path / "checkpoint-2"), restore_callback_states_from_checkpoint=restores, **settings,
    )  # fmt: skip
    counts = [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, Counts)]
    expected = [(3, 5), (4, 5)] if restores else [(7, 5), (7, 5)]
    assert [(callback.limit, callback.count) for callback in counts] == expected
    assert trainer.state.global_step == 5


def test_a_collator_may_return_values_that_are_not_tensors(group, tmp_path):
    from transformers import default_data_collator

    seen = []

    class Watched(dp.DataParallelTrainer):
        def compute_loss(self, model, inputs, **kwargs):
            seen.append(inputs.pop("flag"))
            return super().compute_loss(model, inputs, **kwargs)

    def collate(samples):
        return {**default_data_collator(samples), "flag": True}

    train(
        tiny_roberta(), Rows(4 * group.world_size), tmp_path, per_device_train_batch_size=2, trainer_class=Watched,
        data_collator=collate, remove_unused_columns=False,
    )  # fmt: skip
    # A loss of the user's own is computed more often in the first updates.
    assert {bool(flag) for flag in seen} == {True}


def test_random_numbers_follow_their_seed_and_their_probabilities():
    import mindtorch as torch

    probabilities = torch.tensor([0.0, 0.15, 1.0]).reshape(3, 1) * torch.ones((3, 4000))
    means = torch.bernoulli(probabilities).asnumpy().mean(1)
    assert (means[0], means[2]) == (0, 1)
    assert abs(means[1] - 0.15) < 0.03
    drawn = []
    for _ in range(2):
        set_seed(7)
        drawn.append([torch.rand(5).asnumpy(), torch.randn(5).asnumpy(), torch.randint(0, 9, (5,)).asnumpy()])
    for before, after in zip(*drawn):
        np.testing.assert_array_equal(before, after)
        assert len(set(before.tolist())) > 1


def test_label_smoothing_of_a_causal_model_trains_like_one_process(group, shared_tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    class Texts:
        """Texts of different lengths, whose padding has no label."""

        def __len__(self):
            return 12

        def __getitem__(self, index):
            ids = np.arange(3 + index, 11 + index)
            return {"input_ids": ids, "labels": np.where(np.arange(8) < 3 + index % 5, ids, -100)}

    def model():
        set_seed(5)
        return GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=8, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0,
                                          embd_pdrop=0, attn_pdrop=0))  # fmt: skip

    common = {"max_steps": 3, "label_smoothing_factor": 0.1, "optim": "sgd", "learning_rate": 0.1}
    ours = train(model(), Texts(), shared_tmp_path / "all", global_batch_size=12, **common)
    with alone():
        whole = train(model(), Texts(), shared_tmp_path / f"{group.rank}", per_device_train_batch_size=12, **common)
    for name, weight in weights(whole.model).items():
        np.testing.assert_allclose(weights(ours.model)[name], weight, rtol=0, atol=2e-6, err_msg=name)


def test_files_come_from_the_hub_unless_the_user_names_another_endpoint():
    import huggingface_hub
    import transformers.utils.hub

    expected = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    assert huggingface_hub.constants.ENDPOINT == transformers.utils.hub.HUGGINGFACE_CO_RESOLVE_ENDPOINT == expected


def test_the_log_has_the_learning_rate_of_each_update_as_in_transformers(group, tmp_path):
    from transformers.optimization import Adafactor, AdafactorSchedule

    def rates(**settings):
        settings = {"max_steps": 4, "logging_steps": 1, "per_device_train_batch_size": 2, **settings}
        trainer = train(tiny_roberta(), Rows(8 * group.world_size), tmp_path, **settings)
        return [row["learning_rate"] for row in trainer.state.log_history if "loss" in row], trainer.optimizer

    np.testing.assert_allclose(rates(learning_rate=3e-3, warmup_steps=1)[0], [0, 3e-3, 2e-3, 1e-3])

    class Relative(dp.DataParallelTrainer):
        """A Trainer whose optimizer has a rate that depends on the size of the weights."""

        def create_optimizer_and_scheduler(self, num_training_steps):
            self.optimizer = Adafactor(self.model.parameters(), relative_step=True, warmup_init=True, lr=None)
            self.lr_scheduler = AdafactorSchedule(self.optimizer)

    logged, optimizer = rates(trainer_class=Relative)
    assert logged[0] == 0
    assert all(0 < before < after for before, after in zip(logged[1:], logged[2:]))
    assert optimizer.param_groups[0]["lr"] > logged[-1]


@pytest.mark.core
def test_unsupported_training_arguments_are_refused(group, tmp_path):
    with pytest.warns(RuntimeWarning, match="dataloader_num_workers has no effect"):
        dp.DataParallelArguments(str(tmp_path), dataloader_num_workers=2)
    for settings, message in [
        ({"fp16": True}, "fp16 is not supported"),
        ({"bf16": True}, 'bf16 is not supported with MindNLP 0.5; on a CPU use .*matmul_precision="medium"'),
        ({"eval_on_start": True, "eval_strategy": "epoch"}, "eval_on_start is not supported"),
        ({"skip_memory_metrics": False}, "skip_memory_metrics=False: memory is not measured"),
        ({"overlap": True}, "overlap=True"),
        ({"accelerator_config": {"split_batches": True}}, "split_batches has no effect"),
    ]:
        with pytest.raises(ValueError, match=message):
            dp.DataParallelArguments(str(tmp_path), **settings)
    trainer = dp.DataParallelTrainer(
        tiny_roberta(), dp.DataParallelArguments(str(tmp_path), max_steps=1), train_dataset=Rows(8)
    )
    trainer.loss_weight = 0.3
    with pytest.raises(TypeError, match="loss_weight of this Trainer is 0.3"):
        trainer.train()


def test_the_stock_trainer_is_refused_in_several_processes(group, tmp_path):
    trainer = Trainer(tiny_roberta(), TrainingArguments(str(tmp_path), max_steps=1), train_dataset=Rows(8))
    if group.world_size > 1:
        message = f"Transformers' own Trainer would train {group.world_size} separate models"
        with pytest.raises(RuntimeError, match=message):
            trainer.train()


def test_tensor_backward_is_refused_under_mindnlp_0_5():
    import mindtorch as torch

    with pytest.raises(RuntimeError, match="computes no gradients under MindNLP 0.5"):
        torch.ones(3).sum().backward()
