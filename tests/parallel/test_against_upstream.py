"""Show what MindNLP 0.4.1's own Trainer gets wrong in several processes and ours gets right.

Every test runs twice: with MindNLP's Trainer and arguments, where it must fail, and with ours, where it must
pass. Few of the defects show in one process, so the stock Trainer is tested only at world sizes above 1.
"""

from __future__ import annotations

import inspect
import os

import mindspore
import numpy as np
import pytest
from mindnlp.engine import EarlyStoppingCallback, Trainer, TrainingArguments
from mindspore.dataset import GeneratorDataset

import mindnlp_dp as dp
from mindnlp_dp.data.dataset_adapter import is_batched
from models import Rows, tiny_roberta, weights


class Upstream:
    """MindNLP's unpatched Trainer, without our check that refuses to start it in several processes."""

    arguments = TrainingArguments

    class Trainer(Trainer):
        train = inspect.unwrap(Trainer.train)


class Ours:
    arguments = dp.DataParallelArguments
    Trainer = dp.DataParallelTrainer


# The errors of the stock Trainer in tests where it raises instead of giving a wrong answer. The hook fails under MPI
# because MindSpore's communication was not started, and under MindSpore's backend because it divides a tuple.
DIES_OF = {"test_gradient_hook_averages_over_ranks": (RuntimeError, TypeError)}


def pytest_generate_tests(metafunc):
    kinds = [pytest.param(Ours, id="ours")]
    if dp.get_process_group().world_size > 1:
        fails = pytest.mark.xfail(strict=True, raises=DIES_OF.get(metafunc.function.__name__, AssertionError))
        kinds.append(pytest.param(Upstream, id="upstream", marks=fails))
    metafunc.parametrize("kind", kinds)


class NumberedRows(Rows):
    """Rows as tuples of columns, which record the index of every row that is read."""

    def __getitem__(self, index):
        self.read.append(int(index))
        return self.input_ids[index], self.labels[index]

    def pipeline(self, **sharding):
        return GeneratorDataset(self, ["input_ids", "labels"], shuffle=False, **sharding)


def run(kind, rows, folder, batch_size=2, *, model=None, eval_dataset=None, resume=None, callbacks=None, **settings):
    settings = {
        "num_train_epochs": 1, "learning_rate": 0.1, "optim": "sgd", "save_strategy": "no", "disable_tqdm": True,
        "logging_steps": 1, "remove_unused_columns": False, **settings,
    }  # fmt: skip
    args = kind.arguments(str(folder), per_device_train_batch_size=batch_size, **settings)
    if kind is Upstream and not is_batched(rows):
        rows = rows.batch(batch_size)
    trainer = kind.Trainer(
        model or tiny_roberta(seed=1), args, train_dataset=rows, eval_dataset=eval_dataset, callbacks=callbacks
    )
    trainer.output = trainer.train(resume_from_checkpoint=resume)
    return trainer


def assert_same_on_every_rank(group, value):
    values = group.all_gather_object(value)
    assert all(other == values[0] for other in values), values


def test_models_with_different_seeds_are_identical_on_all_ranks(kind, group, tmp_path):
    """Models built from a different seed on each rank are identical when training begins."""
    trainer = run(kind, NumberedRows(8).pipeline(), tmp_path, model=tiny_roberta(seed=group.rank), max_steps=1)
    assert_same_on_every_rank(group, dp.replica_digest(trainer.model))


@pytest.mark.core
def test_gradient_hook_averages_over_ranks(kind, group, tmp_path, monkeypatch):
    """update_gradient_by_distributed_type averages the gradients, also with frozen and unused parameters."""
    from mindnlp.accelerate.utils import DistributedType
    from mindnlp.engine.trainer import base

    monkeypatch.setattr(base, "accelerate_distributed_type", DistributedType.MULTI_NPU)
    model = tiny_roberta()
    trainer = kind.Trainer(model, kind.arguments(str(tmp_path)), train_dataset=NumberedRows(4).pipeline())
    parameters = dict(model.named_parameters())
    parameters["classifier.out_proj.bias"].requires_grad = False
    for name, parameter in parameters.items():
        if name != "classifier.out_proj.bias":
            parameter.grad = mindspore.ops.ones_like(parameter) * (group.rank + 1)
    trainer.update_gradient_by_distributed_type(model)
    mean = np.float32((group.world_size + 1) / 2)
    np.testing.assert_allclose(parameters["classifier.dense.bias"].grad.asnumpy(), mean)


def test_one_process_logs_and_saves(kind, group, tmp_path):
    """Exactly one process logs, writes and deletes files."""
    args = kind.arguments(str(tmp_path))
    assert (args.world_size, args.process_index) == (group.world_size, group.rank)
    assert group.all_gather_object(args.should_save).count(True) == 1
    assert group.all_gather_object(args.should_log).count(True) == 1


@pytest.mark.core
def test_an_epoch_is_sharded_among_the_ranks(kind, group, tmp_path, monkeypatch):
    """An epoch trains on each row once in total, not once per rank."""
    seen = []

    class Spy(kind.Trainer):
        def training_step(self, model, inputs):
            seen.extend(inputs["input_ids"].asnumpy().tolist())
            return super().training_step(model, inputs)

    rows = NumberedRows(8 * group.world_size)
    monkeypatch.setattr(kind, "Trainer", Spy)
    trainer = run(kind, rows.pipeline(), tmp_path)
    assert trainer.output.global_step == 4
    assert sorted(sum(group.all_gather_object(seen), [])) == sorted(np.asarray(rows.input_ids).tolist())


def test_epochs_have_different_sample_orders(kind, group, tmp_path):
    """Every epoch has a different order."""
    mindspore.set_seed(1)
    orders = []

    class Spy(kind.Trainer):
        def training_step(self, model, inputs):
            orders.append(inputs["labels"].asnumpy().tolist())
            return super().training_step(model, inputs)

    rows = NumberedRows(32)
    source = GeneratorDataset(rows, ["input_ids", "labels"], shuffle=True)
    if kind is Upstream:
        # This is what load_dataset does: one seed for the process, and a new iterator for each epoch.
        mindspore.dataset.config.set_seed(7)
    args = kind.arguments(
        str(tmp_path), per_device_train_batch_size=4, num_train_epochs=2, disable_tqdm=True, save_strategy="no",
        remove_unused_columns=False,
    )  # fmt: skip
    dataset = source.batch(4) if kind is Upstream else source
    Spy(tiny_roberta(), args, train_dataset=dataset).train()
    half = len(orders) // 2
    assert half > 0
    assert orders[:half] != orders[half:]


def test_uneven_data_sets_are_not_padded_with_repeated_samples(kind, group, tmp_path):
    """A data set whose size is not a multiple of the ranks is read once, without repeated samples."""
    n = 4 * group.world_size + 1
    rows = NumberedRows(n)
    if kind is Upstream:  # sharded as by mindnlp.dataset.load_dataset
        dataset = rows.pipeline(num_shards=group.world_size, shard_id=group.rank).batch(2)
        seen = [label for batch in dataset.create_dict_iterator(output_numpy=True) for label in batch["labels"]]
    else:
        args = kind.arguments(str(tmp_path), per_device_train_batch_size=2, remove_unused_columns=False)
        loader = kind.Trainer(tiny_roberta(), args, train_dataset=rows.pipeline()).get_train_dataset()
        batches = [batch for micro_batches in loader.updates() for batch in micro_batches if batch is not None]
        seen = [index for batch in batches for index in batch.indices.tolist()]
    everyone = sum(group.all_gather_object(seen), [])
    assert len(everyone) == n
    assert kind is Upstream or sorted(everyone) == list(range(n))


def sharded_for(kind, group, rows, batch_size=2):
    """Return an evaluation set: sharded by rank for upstream, as load_dataset does it; complete for ours."""
    if kind is Upstream:
        return rows.pipeline(num_shards=group.world_size, shard_id=group.rank).batch(batch_size)
    return rows.pipeline()


@pytest.mark.core
def test_evaluation_gathers_all_samples_and_gives_one_loss(kind, group, tmp_path):
    """Predictions are gathered: every rank reports the same metrics over all samples."""
    rows = NumberedRows(6 * group.world_size)
    args = kind.arguments(str(tmp_path), per_device_eval_batch_size=2, disable_tqdm=True, remove_unused_columns=False)
    trainer = kind.Trainer(
        tiny_roberta(seed=1), args, eval_dataset=sharded_for(kind, group, rows),
        compute_metrics=lambda p: {"count": len(p.label_ids)},
    )  # fmt: skip
    metrics = trainer.evaluate()
    assert metrics["eval_count"] == len(rows)
    assert_same_on_every_rank(group, metrics["eval_loss"])


def test_early_stopping_is_the_same_on_all_ranks(kind, group, tmp_path):
    """Ranks stop at the same step; upstream's ranks do not communicate in this test, so they cannot hang."""
    rows = NumberedRows(8 * group.world_size)
    easy = NumberedRows(2 * group.world_size)
    # Upstream evaluates shards: rank 0's shard is the easy set, copies of a sample that it trains on.
    easy.input_ids[:], easy.labels[:] = rows.input_ids[0], rows.labels[0]
    hard = NumberedRows(2 * group.world_size, seed=3)
    judge = (easy if group.rank == 0 else hard) if kind is Upstream else hard
    model = tiny_roberta(seed=1 + (group.rank if kind is Upstream else 0))
    trainer = run(
        kind, rows.pipeline(), tmp_path / str(group.rank if kind is Upstream else 0), model=model,
        eval_dataset=sharded_for(kind, group, judge), evaluation_strategy="steps", eval_steps=1, save_strategy="steps",
        save_steps=1, num_train_epochs=4, load_best_model_at_end=True, metric_for_best_model="loss",
        greater_is_better=False, callbacks=[EarlyStoppingCallback(early_stopping_patience=1)],
    )  # fmt: skip
    assert_same_on_every_rank(group, (trainer.state.global_step, trainer.state.best_metric))


def test_logged_loss_is_the_same_on_all_ranks(kind, group, tmp_path):
    """The logged loss is the mean over all ranks."""
    rows = NumberedRows(4 * group.world_size)
    trainer = run(kind, sharded_for(kind, group, rows), tmp_path, learning_rate=0.0)
    assert_same_on_every_rank(group, [row["loss"] for row in trainer.state.log_history if "loss" in row])


def test_gradient_accumulation_equals_one_larger_batch(kind, group, tmp_path):
    """Two micro-batches of two samples train like one batch of four."""
    rows = NumberedRows(8)
    order = {"dataset_shuffle": False} if kind is Ours else {}
    settings = {"max_grad_norm": 0.0, "lr_scheduler_type": "constant", **order}
    whole = run(kind, rows.pipeline(), tmp_path, 4, max_steps=1, **settings)
    parts = run(kind, rows.pipeline(), tmp_path, 2, max_steps=1, gradient_accumulation_steps=2, **settings)
    if kind is Ours:
        assert whole.output.global_step == parts.output.global_step == 1
    for name, weight in weights(parts.model).items():
        if "key.bias" not in name:
            np.testing.assert_allclose(weight, weights(whole.model)[name], atol=1e-6, err_msg=name)


def test_a_resumed_run_ends_with_the_same_weights(kind, group, shared_tmp_path):
    """A resumed run continues after the batches that were already trained, and ends with the same weights."""
    n = 8 * group.world_size
    folder = shared_tmp_path if kind is Ours else shared_tmp_path / str(group.rank)
    settings = {"save_strategy": "steps", "save_steps": 2, "optim": "adamw", "learning_rate": 0.01}
    whole = run(kind, NumberedRows(n).pipeline(), folder, **settings)
    group.barrier()
    resumed = run(kind, NumberedRows(n).pipeline(), folder, resume=str(folder / "checkpoint-2"), **settings)
    for name, weight in weights(whole.model).items():
        np.testing.assert_array_equal(weights(resumed.model)[name], weight, err_msg=name)


def test_grad_norm_is_logged(kind, group, tmp_path):
    """The norm of the gradient is logged."""
    trainer = run(kind, NumberedRows(4 * group.world_size).pipeline(), tmp_path)
    assert "grad_norm" in trainer.state.log_history[0]
    assert trainer.state.log_history[0]["grad_norm"] > 0


def test_throughput_counts_samples_of_all_ranks(kind, group, tmp_path):
    """Throughput counts the samples of all ranks."""
    n = 8 * group.world_size
    trainer = run(kind, sharded_for(kind, group, NumberedRows(n)), tmp_path)
    metrics = trainer.output.metrics
    seconds = metrics.get("train_seconds", metrics["train_runtime"])
    assert metrics["train_samples_per_second"] * seconds == pytest.approx(n, rel=0.02)


def test_import_with_multi_npu_set_starts_no_communication(kind, group):
    """Importing MindNLP with MULTI_NPU=true starts nothing; without mindnlp_dp it starts communication or fails.

    The import runs in one separate process, which is not a rank of the job.
    """
    import subprocess
    import sys

    ours = "import mindnlp_dp; " if kind is Ours else ""
    code = f"{ours}import mindnlp.engine; from mindspore.communication import GlobalComm; assert not GlobalComm.INITED"
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "PRTE_", "MS_"))}

    def imports():
        done = subprocess.run([sys.executable, "-c", code], env={**clean, "MULTI_NPU": "true"}, capture_output=True)
        assert done.returncode == 0

    group.run_on(group.is_main, imports, "importing")
