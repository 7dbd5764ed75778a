"""Test the distributed Trainer: training, evaluation, logs, checkpoints and callbacks on several ranks."""

from __future__ import annotations

import gc
import logging
import os
import random
import warnings
import weakref

import mindspore
import numpy as np
import pytest
from library import Trainer, TrainerCallback, TrainingArguments, is_0_5, settings_here
from mindspore.dataset import GeneratorDataset

import mindnlp_dp as dp
from models import LENGTH, NUM_LABELS, Rows, alone, tiny_roberta, train, weights

pytestmark = pytest.mark.core


def accuracy_and_digest(prediction):
    return {"accuracy": float(np.mean(prediction.predictions.argmax(-1) == prediction.label_ids))}


class MyTrainer(dp.DataParallelTrainerMixin, Trainer):
    """A user's own Trainer with a different loss and a count of its steps."""

    num_steps = 0

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        outputs = model(**inputs)
        loss = outputs.loss * 2
        return (loss, outputs) if return_outputs else loss

    def training_step(self, model, inputs):
        self.num_steps += 1
        return super().training_step(model, inputs)


@pytest.mark.skipif(is_0_5, reason="the hook is MindNLP 0.4's")
def test_update_gradient_by_distributed_type_averages_every_gradient(group, tmp_path):
    """The hook must give all_reduce(grad) / rank_size for every parameter that has a gradient."""
    model = tiny_roberta()
    trainer = dp.DataParallelTrainer(model, dp.DataParallelArguments(str(tmp_path)), train_dataset=Rows(4))
    parameters = dict(model.named_parameters())
    frozen, unused = "classifier.out_proj.bias", "classifier.dense.bias"
    parameters[frozen].requires_grad = False
    for name, parameter in parameters.items():
        if name not in (frozen, unused):
            parameter.grad = mindspore.ops.ones_like(parameter) * group.rank
    trainer.update_gradient_by_distributed_type(model)
    assert parameters[frozen].grad is None
    assert parameters[unused].grad is None
    for name, parameter in parameters.items():
        if name not in (frozen, unused):
            np.testing.assert_array_equal(parameter.grad.asnumpy(), np.float32((group.world_size - 1) / 2))


def test_a_training_loop_is_freed_without_the_garbage_collector(group, tmp_path):
    """Its buckets and optimizer state would else exist twice, until the garbage collector finds them."""
    trainer = train(tiny_roberta(), Rows(8), tmp_path, per_device_train_batch_size=2)
    loop = weakref.ref(trainer.training_loop)
    gc.collect()
    gc.disable()
    try:
        vars(trainer).pop("training_loop")
        assert loop() is None
    finally:
        gc.enable()


def test_frozen_parameters_do_not_change(group, tmp_path):
    model = tiny_roberta(seed=1)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.startswith("classifier")
    before = weights(model)
    train(model, Rows(8), tmp_path, per_device_train_batch_size=2)
    for name, weight in weights(model).items():
        assert np.array_equal(weight, before[name]) == (not name.startswith("classifier")), name


def test_the_mixin_trains_a_custom_trainer_with_plain_training_arguments(group, tmp_path):
    args = TrainingArguments(str(tmp_path), per_device_train_batch_size=2, num_train_epochs=1, disable_tqdm=True)
    trainer = MyTrainer(tiny_roberta(seed=2), args, train_dataset=Rows(4 * group.world_size))
    output = trainer.train()
    assert args.world_size == 1  # the user's object is unchanged
    assert trainer.args.world_size == group.world_size
    assert trainer.args.process_index == group.rank
    assert trainer.num_steps == output.global_step == 2
    dp.assert_replicas_in_sync(trainer.model)
    with pytest.raises(TypeError, match="args must be a DataParallelArguments, got dict; write args ="):
        MyTrainer(tiny_roberta(), {}, train_dataset=Rows(4))


@pytest.mark.parametrize("kind", [TrainingArguments, dp.DataParallelArguments])
def test_default_arguments_give_no_warning(group, tmp_path, kind):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=RuntimeWarning)
        trainer = MyTrainer(tiny_roberta(), kind(str(tmp_path)), train_dataset=Rows(4))
        # A converted copy, as a second Trainer gets it.
        again = MyTrainer(tiny_roberta(), trainer.args, train_dataset=Rows(4))
        default = MyTrainer(tiny_roberta(), train_dataset=Rows(4))
    assert [each.args.world_size for each in (trainer, again, default)] == [group.world_size] * 3


def test_the_size_of_a_run_is_logged_on_rank_0_at_level_info(group, tmp_path):
    shown = []
    handler = logging.Handler()
    handler.emit = lambda record: shown.append(record.getMessage())
    root = logging.getLogger(Trainer.__module__.partition(".")[0])
    level = root.level
    root.addHandler(handler)
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "max_steps": 2}
    try:
        train(tiny_roberta(), Rows(12 * group.world_size), tmp_path, log_level="info", **settings)
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
    assert ("***** Running training *****" in shown) == group.is_main
    block = shown[shown.index("***** Running training *****") :] if group.is_main else []
    for line in (
        f"Num examples = {12 * group.world_size}", f"= {6 * group.world_size}", f"Number of ranks = {group.world_size}",
        "Gradient Accumulation steps = 3", "Total optimization steps = 2",
    ):  # fmt: skip
        assert any(each.endswith(line) for each in block) == group.is_main, (line, shown)


def test_gradients_are_exchanged_once_per_update(group, tmp_path, monkeypatch):
    exchanges = []
    reduce = dp.GradientSynchronizer.reduce
    monkeypatch.setattr(
        dp.GradientSynchronizer, "reduce", lambda self, **options: exchanges.append(1) or reduce(self, **options)
    )
    trainer = train(
        tiny_roberta(), Rows(12 * group.world_size), tmp_path, per_device_train_batch_size=2,
        gradient_accumulation_steps=3,
    )  # fmt: skip
    assert trainer.state.global_step == len(exchanges) == 2


def test_clipping_uses_the_norm_of_the_averaged_gradient(group, tmp_path):
    """Ranks with different local gradient norms clip alike: all log the same norm, that of one process."""
    rows = Rows(4 * group.world_size)
    trainer = train(
        tiny_roberta(seed=4), rows, tmp_path / "clipped", per_device_train_batch_size=4, max_grad_norm=0.05,
        logging_steps=1, optim="sgd", dataset_shuffle=False,
    )  # fmt: skip
    norms = {row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row}
    assert len(set(map(tuple, group.all_gather_object(sorted(norms))))) == 1
    with alone():
        single = train(
            tiny_roberta(seed=4), rows, tmp_path, per_device_train_batch_size=4 * group.world_size, max_grad_norm=0.05,
            logging_steps=1, optim="sgd", dataset_shuffle=False,
        )  # fmt: skip
    (norm,) = norms
    assert norm == pytest.approx(single.state.log_history[0]["grad_norm"], rel=1e-4)
    assert norm > 0.05  # it was clipped


def test_every_sample_is_read_once_per_epoch(group, tmp_path):
    trainer = train(tiny_roberta(), Rows(23), tmp_path, per_device_train_batch_size=3, num_train_epochs=2)
    read = sorted(sum(group.all_gather_object(trainer.train_dataset.read), []))
    assert read == sorted(list(range(23)) * 2)


def test_a_batched_mindspore_pipeline_trains_as_in_one_process(group, tmp_path):
    """The pipeline's batch is the global batch, so the same script trains alike on any number of ranks."""
    rows = Rows(20)

    def pipeline():
        columns = ["input_ids", "attention_mask", "labels"]
        source = [(rows.input_ids[i], np.ones(LENGTH, np.int64), rows.labels[i]) for i in range(len(rows))]
        return GeneratorDataset(source, columns, shuffle=False).batch(8)

    settings = {"optim": "sgd", "logging_steps": 1}
    together = train(tiny_roberta(seed=5), pipeline(), tmp_path, **settings)
    with alone():
        single = train(tiny_roberta(seed=5), pipeline(), tmp_path, **settings)
    assert together.state.global_step == 3
    expected = weights(single.model)
    for name, weight in weights(together.model).items():
        np.testing.assert_allclose(weight, expected[name], rtol=0, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("n", [1, 3, 17, 32])
def test_evaluation_sees_every_sample_once_in_order(group, tmp_path, n):
    model, rows = tiny_roberta(seed=6), Rows(n, seed=9)
    args = dp.DataParallelArguments(str(tmp_path), per_device_eval_batch_size=2, eval_accumulation_steps=2)
    trainer = dp.DataParallelTrainer(model, args, eval_dataset=rows, compute_metrics=accuracy_and_digest)
    rows.read.clear()
    output = trainer.predict(trainer.eval_dataset)
    np.testing.assert_array_equal(output.label_ids, rows.labels)
    assert sorted(sum(group.all_gather_object(trainer.eval_dataset.read), [])) == list(range(n))

    dp.broadcast_parameters(model)
    model.set_train(False)
    logits = model(
        input_ids=mindspore.Tensor(rows.input_ids), attention_mask=mindspore.ops.ones((n, LENGTH), mindspore.int64)
    )
    np.testing.assert_allclose(output.predictions, logits.logits.asnumpy(), atol=1e-5)
    assert output.predictions.shape == (n, NUM_LABELS)

    metrics = trainer.evaluate()
    assert metrics["eval_accuracy"] == np.mean(output.predictions.argmax(-1) == rows.labels)
    gathered = group.all_gather_object((metrics["eval_loss"], metrics["eval_accuracy"]))
    assert len(set(gathered)) == 1


def test_several_data_sets_and_a_mindspore_pipeline_are_evaluated_alike(group, tmp_path):
    rows = Rows(10)
    pipeline = GeneratorDataset(
        [(rows.input_ids[i], rows.labels[i]) for i in range(10)], ["input_ids", "labels"], shuffle=False
    ).batch(4)
    args = dp.DataParallelArguments(str(tmp_path), per_device_eval_batch_size=2, disable_tqdm=True)
    trainer = dp.DataParallelTrainer(
        tiny_roberta(), args, eval_dataset={"rows": rows, "pipeline": pipeline}, compute_metrics=accuracy_and_digest
    )
    metrics = trainer.evaluate()
    assert metrics["eval_rows_loss"] == pytest.approx(metrics["eval_pipeline_loss"], abs=1e-5)
    assert metrics["eval_rows_accuracy"] == metrics["eval_pipeline_accuracy"]


def test_only_rank_0_writes_and_logs(group, shared_tmp_path):
    trainer = train(
        tiny_roberta(), Rows(4 * group.world_size), shared_tmp_path, per_device_train_batch_size=2,
        save_strategy="steps", save_steps=1, save_total_limit=1,
    )  # fmt: skip
    assert trainer.args.should_save == trainer.args.should_log == group.is_main
    assert trainer.state.is_world_process_zero == group.is_main
    group.barrier()
    assert sorted(os.listdir(shared_tmp_path)) == ["checkpoint-2"]


def test_a_failed_checkpoint_write_is_raised_on_every_rank(group, shared_tmp_path):
    class NoRoom(dp.DataParallelTrainer):
        def _save(self, *args, **kwargs):
            raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space left on device"):
        train(tiny_roberta(), Rows(8), shared_tmp_path, NoRoom, save_strategy="steps", save_steps=1)


def test_a_failed_checkpoint_removal_is_raised_on_every_rank(group, shared_tmp_path, monkeypatch):
    """Only the writer removes it; the other ranks must not wait for a rank that has raised."""
    from mindnlp_dp.training.trainer import saving

    def refuse(*args, **kwargs):
        raise PermissionError("the folder is read-only")

    monkeypatch.setattr(saving, "remove_old_checkpoints", refuse)
    with pytest.raises(PermissionError, match="the folder is read-only"):
        train(tiny_roberta(), Rows(8), shared_tmp_path, save_strategy="steps", save_steps=1, save_total_limit=1)


def test_a_stop_requested_by_one_rank_stops_all_ranks(group, tmp_path):
    """A stop from any rank counts, other flags from ranks above 0 are overruled, and no rank hangs."""

    class StopOnLastRank(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = args.process_index == args.world_size - 1 and state.global_step == 2

    trainer = train(
        tiny_roberta(),
        Rows(6 * group.world_size),
        tmp_path,
        per_device_train_batch_size=2,
        callbacks=[StopOnLastRank()],
    )
    assert trainer.state.global_step == 2


def test_the_logged_loss_is_the_global_mean(group, tmp_path):
    rows = Rows(4 * group.world_size)
    trainer = train(
        tiny_roberta(seed=8), rows, tmp_path, per_device_train_batch_size=4, logging_steps=1, learning_rate=0.0
    )
    with alone():
        single = train(
            tiny_roberta(seed=8), rows, tmp_path, per_device_train_batch_size=4 * group.world_size, logging_steps=1,
            learning_rate=0.0,
        )  # fmt: skip
    assert trainer.state.log_history[0]["loss"] == pytest.approx(single.state.log_history[0]["loss"], abs=1.1e-4)
    assert trainer.output.training_loss == pytest.approx(single.output.training_loss, abs=1e-6)
    assert trainer.output.metrics["total_flos"] == single.output.metrics["total_flos"]


def test_loss_weight_can_be_overridden(group, tmp_path):
    """Micro-batches with a loss per token weigh by their tokens, and the result equals that of one batch."""

    class ByTokens(dp.DataParallelTrainer):
        def loss_weight(self, inputs):
            return float(inputs["attention_mask"].sum())

        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            logits = model(input_ids=inputs["input_ids"]).logits
            tokens = inputs["attention_mask"].sum(-1).astype(logits.dtype)
            losses = mindspore.ops.cross_entropy(logits, inputs["labels"].astype(mindspore.int32), reduction="none")
            return (losses * tokens).sum() / tokens.sum()

    class Lengths(Rows):
        def __getitem__(self, index):
            row = super().__getitem__(index)
            return {**row, "attention_mask": (np.arange(LENGTH) <= index % LENGTH).astype(np.int64)}

    n = 4 * group.world_size
    together = train(tiny_roberta(seed=1), Lengths(n), tmp_path, ByTokens, per_device_train_batch_size=4, optim="sgd")
    with alone():
        single = train(tiny_roberta(seed=1), Lengths(n), tmp_path, ByTokens, per_device_train_batch_size=n, optim="sgd")
    expected = weights(single.model)
    for name, weight in weights(together.model).items():
        np.testing.assert_allclose(weight, expected[name], rtol=0, atol=2e-6, err_msg=name)


def test_fewer_samples_than_ranks_are_refused(group, tmp_path):
    if group.world_size == 1:
        with pytest.raises(ValueError, match="the data set is empty"):
            train(tiny_roberta(), Rows(0), tmp_path)
        return
    n = group.world_size - 1
    with pytest.raises(ValueError, match=f"{n} training samples for {n + 1} ranks: every rank needs at least one"):
        train(tiny_roberta(), Rows(n), tmp_path)


def test_resume_continues_the_order_of_samples(group, shared_tmp_path):
    rows = Rows(12 * group.world_size)
    settings = {"per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 2, "max_steps": 5}
    whole = train(tiny_roberta(seed=1), rows, shared_tmp_path, **settings)
    read = whole.train_dataset.read
    group.barrier()

    args = dp.DataParallelArguments(
        str(shared_tmp_path), learning_rate=1e-2, disable_tqdm=True, **settings_here(**settings)
    )
    resumed = dp.DataParallelTrainer(tiny_roberta(seed=2), args, train_dataset=Rows(12 * group.world_size))
    resumed.train(resume_from_checkpoint=str(shared_tmp_path / "checkpoint-2"))
    assert resumed.state.global_step == 5
    assert resumed.train_dataset.read == read[4:]


def test_main_process_first_lets_other_ranks_wait_for_rank_0(group, shared_tmp_path):
    args = dp.DataParallelArguments(str(shared_tmp_path))
    with args.main_process_first():
        if group.is_main:
            (shared_tmp_path / "made").write_text("by rank 0")
        assert (shared_tmp_path / "made").read_text() == "by rank 0"


class CountsSteps(TrainerCallback):
    """Wraps the optimizer's step when training begins, like callbacks that add noise or keep an average."""

    def __init__(self):
        self.num_calls = 0

    def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
        step = optimizer.step

        def counted(*args, **kwargs):
            self.num_calls += 1
            return step(*args, **kwargs)

        optimizer.step = counted


@pytest.mark.parametrize("zero_stage", ["auto", 0])
def test_an_optimizer_step_wrapped_by_a_callback_is_called(group, shared_tmp_path, zero_stage):
    settings = {"per_device_train_batch_size": 12 // group.world_size, "zero_stage": zero_stage, "save_steps": 2,
                "save_strategy": "steps"}  # fmt: skip
    plain = train(tiny_roberta(), Rows(48), shared_tmp_path / "plain", **settings)
    counts = CountsSteps()
    trainer = train(tiny_roberta(), Rows(48), shared_tmp_path / "counted", callbacks=[counts], **settings)
    assert counts.num_calls == trainer.state.global_step == 4
    for name, weight in weights(plain.model).items():
        np.testing.assert_allclose(weights(trainer.model)[name], weight, rtol=0, atol=5e-5, err_msg=name)
    # After a resume, the optimizer state continues and the new wrapper is called.
    group.barrier()
    counts = CountsSteps()
    resumed = train(
        tiny_roberta(seed=1), Rows(48), shared_tmp_path / "counted", callbacks=[counts],
        resume=str(shared_tmp_path / "counted" / "checkpoint-2"), **settings,
    )  # fmt: skip
    assert counts.num_calls == 2
    assert resumed.replica_digest == trainer.replica_digest


def draw():
    """Draw a number from each generator: MindNLP's own if it has one, else MindSpore's; NumPy's, and Python's."""
    if is_0_5:
        import mindtorch

        return mindtorch.rand(1).item(), np.random.rand(), random.random()
    return float(mindspore.ops.rand(1).asnumpy()[0]), np.random.rand(), random.random()


def test_random_numbers_differ_by_rank_and_are_restored_on_resume(group, shared_tmp_path):
    """Collators draw the masks of a language model, and NEFTune its noise; callbacks draw alike on all ranks."""
    from mindnlp_dp.data.batches import default_collate

    in_collator, in_model, in_callback = [], [], []

    def collate(rows):
        in_collator.append(draw())
        return default_collate(rows)

    class Draws(dp.DataParallelTrainer):
        def compute_loss(self, *args, **kwargs):
            in_model.append(draw())
            return super().compute_loss(*args, **kwargs)

        def loss_weight(self, inputs):
            # With a known weight, the loss is not computed to compare it.
            return len(inputs["labels"])

        def train(self, *args, **kwargs):
            before = np.random.get_state()[1].copy(), random.getstate()
            result = super().train(*args, **kwargs)
            assert (np.random.get_state()[1] == before[0]).all()
            assert random.getstate() == before[1]
            return result

    class DrawsToo(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            in_callback.append(draw()[1:])

    def run(resume=None):
        for each in (in_collator, in_model, in_callback):
            each.clear()
        settings = {"per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
        train(
            tiny_roberta(), Rows(16), shared_tmp_path, Draws, data_collator=collate, callbacks=[DrawsToo()],
            resume=resume, **settings,
        )  # fmt: skip
        return list(in_collator), list(in_model), list(in_callback)

    np.random.seed(3)
    random.seed(3)
    whole = run()
    for numbers in zip(*group.all_gather_object(whole[:2])):
        for generator in zip(*sum(numbers, [])):
            assert len(set(generator)) == 4 * group.world_size
    assert len(set(map(str, group.all_gather_object(whole[2])))) == 1
    assert len(set(whole[2])) == 4
    np.random.seed(4)
    resumed = run(str(shared_tmp_path / "checkpoint-2"))
    assert resumed == tuple(numbers[2:] for numbers in whole)


def test_evaluation_draws_the_same_random_numbers_each_time(group, tmp_path):
    from mindnlp_dp.data.batches import default_collate

    drawn = []

    def collate(rows):
        drawn.append(np.random.rand())
        return default_collate(rows)

    args = dp.DataParallelArguments(str(tmp_path), **settings_here(per_device_eval_batch_size=4))
    trainer = dp.DataParallelTrainer(
        tiny_roberta(), args, eval_dataset=Rows(8 * group.world_size), data_collator=collate
    )
    trainer.evaluate()
    first = drawn.copy()
    trainer.evaluate()
    assert drawn == first * 2
    assert len({*sum(group.all_gather_object(first), [])}) == len(first) * group.world_size


class RaggedRows(Rows):
    """Rows of 2 to ``LENGTH`` tokens."""

    def __getitem__(self, index):
        length = 2 + index % (LENGTH - 1)
        return {"input_ids": self.input_ids[index, :length].tolist(), "label": int(self.labels[index])}


def test_rows_of_different_lengths_are_padded_and_train_as_in_one_process(group, tmp_path):
    settings = {"num_train_epochs": 2, "optim": "sgd", "data_collator": dp.PaddingCollator(pad_token_id=1)}
    trained = train(tiny_roberta(seed=4), RaggedRows(21), tmp_path, per_device_train_batch_size=8 // group.world_size,
                    **settings)  # fmt: skip
    with alone():
        expected = train(tiny_roberta(seed=4), RaggedRows(21), tmp_path, per_device_train_batch_size=8, **settings)
    for name, weight in weights(trained.model).items():
        np.testing.assert_allclose(weight, weights(expected.model)[name], atol=2e-6, err_msg=name)
