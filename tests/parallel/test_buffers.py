"""Test running statistics: per rank during training; rank 0's when a model is compared, saved or evaluated."""

from __future__ import annotations

import mindspore
import numpy as np
import pytest
from mindnlp.core import nn
from mindnlp.transformers.modeling_outputs import SequenceClassifierOutput
from mindspore import nn as cells

import mindnlp_dp as dp
from mindnlp_dp.communication.replicas import ReplicaMismatchError
from models import LENGTH, NUM_LABELS, Rows, train, weights


class Normalized(nn.Module):
    """A classifier with batch normalization whose input features are the token ids."""

    def __init__(self):
        super().__init__()
        from mindnlp.engine.utils import set_seed

        set_seed(0)
        self.first = nn.Linear(LENGTH, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, NUM_LABELS)

    def forward(self, input_ids=None, labels=None):
        logits = self.last(self.norm(self.first(input_ids.astype(mindspore.float32) / 50)))
        return SequenceClassifierOutput(loss=nn.functional.cross_entropy(logits, labels), logits=logits)


def buffers(model):
    return {name: buffer.asnumpy().copy() for name, buffer in model.named_buffers()}


def evaluated_at(trainer):
    """Return the updates after which the trainer evaluated."""
    return [row["step"] for row in trainer.state.log_history if "eval_loss" in row]


def run(folder, group, **settings):
    return train(
        Normalized(), Rows(40), folder, eval_dataset=Rows(12, seed=1),
        per_device_train_batch_size=8 // group.world_size, **settings,
    )  # fmt: skip


@pytest.mark.core
def test_running_statistics_are_the_same_on_all_ranks_after_training(group, shared_tmp_path):
    trainer = run(shared_tmp_path, group)
    assert trainer.replica_digest == dp.assert_replicas_in_sync(trainer.model)
    assert int(buffers(trainer.model)["norm.num_batches_tracked"]) == 5
    outputs = group.all_gather_object(trainer.predict(Rows(12, seed=1)).predictions)
    for theirs in outputs:
        np.testing.assert_array_equal(theirs, outputs[0])


def test_batchnorm_run_with_evaluation_and_checkpoints_resumes_to_the_bit(group, shared_tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 2, "num_train_epochs": 2, "evaluation_strategy": "steps",
                "eval_steps": 3, "lr_scheduler_type": "constant"}  # fmt: skip
    whole = run(shared_tmp_path / "whole", group, **settings)
    run(shared_tmp_path / "parts", group, **settings, max_steps=4)
    resumed = run(shared_tmp_path / "parts", group, **settings, resume=True)
    assert evaluated_at(whole) == evaluated_at(resumed) == [3, 6, 9]
    assert resumed.replica_digest == whole.replica_digest
    for name, buffer in buffers(whole.model).items():
        np.testing.assert_array_equal(buffers(resumed.model)[name], buffer, err_msg=name)


def test_buffer_sync_for_evaluation_does_not_change_training(group, shared_tmp_path):
    often = {"evaluation_strategy": "steps", "eval_steps": 1}
    once, always = run(shared_tmp_path / "once", group), run(shared_tmp_path / "always", group, **often)
    assert (evaluated_at(once), evaluated_at(always)) == ([], [1, 2, 3, 4, 5])
    for name, weight in weights(once.model).items():
        np.testing.assert_array_equal(weights(always.model)[name], weight, err_msg=name)
    for name, buffer in buffers(once.model).items():
        np.testing.assert_array_equal(buffers(always.model)[name], buffer, err_msg=name)


def cell_run(folder, group):
    mindspore.set_seed(2)
    network = cells.SequentialCell(cells.Dense(5, 6), cells.BatchNorm1d(6), cells.Dense(6, 2))
    dp.broadcast_parameters(network)
    network.set_train()
    parameters = network.trainable_params()
    loss_fn = cells.CrossEntropyLoss()
    step = dp.make_train_step(
        lambda x, y: loss_fn(network(x), y), cells.Momentum(parameters, 0.1, 0.9), parameters
    )  # fmt: skip
    rng = np.random.default_rng(0)
    samples = [{"x": rng.standard_normal(5).astype(np.float32), "y": np.int32(i % 2)} for i in range(32)]
    loader = dp.make_loader(samples, 8 // group.world_size, shuffle=True)
    return network, step, dp.FunctionalRun(folder, network, step, loader)


def test_custom_loop_with_batchnorm_resumes_to_the_bit(group, shared_tmp_path):
    network, step, run = cell_run(shared_tmp_path, group)
    for number, micro_batches in enumerate(run.updates(num_epochs=2)):
        step(micro_batches)
        if number == 2:
            run.save()
    digest = dp.assert_replicas_in_sync(network)

    network, step, run = cell_run(shared_tmp_path, group)
    assert run.resume()
    for micro_batches in run.updates(num_epochs=2):
        step(micro_batches)
    assert dp.assert_replicas_in_sync(network) == digest


def test_differing_buffers_are_named_and_evaluation_synchronizes_them(group, shared_tmp_path):
    network, step, run = cell_run(shared_tmp_path, group)
    step(next(iter(run.updates(num_epochs=1))))
    if group.world_size > 1:
        with pytest.raises(ReplicaMismatchError, match=r"moving_mean.*It is a buffer.*call broadcast_buffers"):
            dp.assert_replicas_in_sync(network)
    network.set_train(False)
    x = np.random.default_rng(5).standard_normal((7, 5)).astype(np.float32)
    test = dp.make_loader([{"x": row} for row in x], 2)
    outputs = dp.evaluate(lambda x: network(x), test, model=network).outputs  # noqa: PLW0108 -- input is not named x
    np.testing.assert_allclose(outputs, network(mindspore.Tensor(x)).asnumpy(), rtol=1e-5, atol=1e-6)
    dp.assert_replicas_in_sync(network)


class Cached(nn.Module):
    """A classifier with a buffer of as many rows as the longest batch that this process has seen."""

    def __init__(self):
        super().__init__()
        from mindnlp.engine.utils import set_seed

        set_seed(0)
        self.embedding = nn.Embedding(50, 8)
        self.last = nn.Linear(8, NUM_LABELS)
        self.register_buffer("table", mindspore.Tensor(np.zeros((1, 8), np.float32)), persistent=False)
        self.register_buffer("scale", mindspore.Tensor(np.ones(8, np.float32)))

    def forward(self, input_ids=None, labels=None):
        if input_ids.shape[1] > self.table.shape[0]:
            self.table = mindspore.Tensor(np.full((input_ids.shape[1], 8), 0.1, np.float32))
        x = self.embedding(input_ids) * self.scale + self.table[: input_ids.shape[1]]
        logits = self.last(x.mean(1))
        return SequenceClassifierOutput(loss=nn.functional.cross_entropy(logits, labels), logits=logits)


class Ragged(Rows):
    def __getitem__(self, index):
        return {"input_ids": self.input_ids[index, : 2 + index % 6], "label": int(self.labels[index])}


def to_the_longest(samples):
    longest = max(len(sample["input_ids"]) for sample in samples)
    ids = [np.pad(sample["input_ids"], (0, longest - len(sample["input_ids"]))) for sample in samples]
    return {"input_ids": np.stack(ids), "labels": np.array([sample["label"] for sample in samples])}


def test_buffers_with_batch_dependent_shapes_stay_local_to_each_rank(group, shared_tmp_path):
    """Such buffers are not in a state dict, so they are not sent, saved or compared."""
    settings = {"save_strategy": "steps", "save_steps": 2, "evaluation_strategy": "steps", "eval_steps": 2,
                "per_device_train_batch_size": 1, "data_collator": to_the_longest, "eval_dataset": Ragged(12),
                "lr_scheduler_type": "constant"}  # fmt: skip
    whole = train(Cached(), Ragged(24), shared_tmp_path / "whole", max_steps=4, **settings)
    train(Cached(), Ragged(24), shared_tmp_path / "parts", max_steps=2, **settings)
    resumed = train(Cached(), Ragged(24), shared_tmp_path / "parts", max_steps=4, resume=True, **settings)
    assert evaluated_at(whole) == evaluated_at(resumed) == [2, 4]
    assert resumed.replica_digest == whole.replica_digest
    # But where the shapes agree, all ranks begin with rank 0's buffers.
    model = Cached()
    model.table = mindspore.Tensor(np.full((1, 8), float(group.rank), np.float32))
    dp.broadcast_parameters(model)
    np.testing.assert_array_equal(model.table.asnumpy(), np.zeros((1, 8)))


def test_broadcast_buffers_names_a_buffer_of_another_shape(group):
    if group.world_size == 1:
        pytest.skip("one rank agrees with itself")
    model = Cached()
    model.scale = mindspore.Tensor(np.ones(8 + group.rank, np.float32))
    with pytest.raises(ReplicaMismatchError, match=r"rank 0 has 'scale' of shape \(8,\) .*where rank 1 has"):
        dp.broadcast_buffers(model)
