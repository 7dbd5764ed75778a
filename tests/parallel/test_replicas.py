"""Test that all ranks have the same weights and buffers, that differences are reported, and who owns the memory."""

from __future__ import annotations

import mindspore
import numpy as np
import pytest
from library import TrainerCallback, optim
from mindnlp.core import nn, ops

import mindnlp_dp as dp
from mindnlp_dp.communication.replicas import ReplicaMismatchError, replicas_in_sync
from mindnlp_dp.report.page import render
from mindnlp_dp.report.runs import RecordedRun
from mindnlp_dp.text_classification.classification_config import TaskConfig
from mindnlp_dp.text_classification.classification_recorder import RunRecorder
from mindnlp_dp.text_classification.classification_results import make_report, summary
from mindnlp_dp.text_classification.classification_task import TextClassificationTask
from models import Rows, tiny_roberta, train, weights

pytestmark = pytest.mark.core


class WithBuffer(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.frozen = nn.Parameter(mindspore.Tensor([float(rank)]), requires_grad=False)
        self.register_buffer("count", mindspore.Tensor([float(rank)]))
        # This buffer is a view, like BERT's position_ids.
        self.register_buffer("positions", ops.arange(rank, rank + 3).expand((2, -1)))


def test_ranks_seeded_differently_agree_after_the_broadcast_and_after_training(group, tmp_path):
    model = tiny_roberta(seed=group.rank)
    assert replicas_in_sync(model) == (group.world_size == 1)
    dp.broadcast_parameters(model)
    expected = weights(tiny_roberta(seed=0))
    for name, weight in weights(model).items():
        np.testing.assert_array_equal(weight, expected[name])

    model = tiny_roberta(seed=group.rank)
    trainer = train(model, Rows(21), tmp_path, per_device_train_batch_size=2, seed=5 + group.rank, data_seed=1)
    assert trainer.replica_digest == dp.assert_replicas_in_sync(model)


def test_broadcast_parameters_copies_buffers_and_frozen_parameters_of_rank_0(group):
    model = WithBuffer(group.rank)
    dp.broadcast_parameters(model)
    assert float(model.count) == 0
    assert model.positions.asnumpy().tolist() == [[0, 1, 2]] * 2
    assert float(model.frozen) == 0
    assert not model.frozen.requires_grad
    dp.assert_replicas_in_sync(model)


def test_the_first_weight_that_differs_is_named_on_every_rank(group):
    if group.world_size == 1:
        pytest.skip("one replica agrees with itself")
    model = WithBuffer(0)
    dp.broadcast_parameters(model)
    last = group.world_size - 1
    if group.rank == last:
        bias = model.linear.bias.asnumpy().copy()
        bias[1] += 0.25
        mindspore.ops.assign(model.linear.bias, mindspore.Tensor(bias))
    message = rf"'linear.bias' on rank {last} differs from rank 0 \(largest difference 0.25\)"
    with pytest.raises(ReplicaMismatchError, match=message):
        dp.assert_replicas_in_sync(model)


def test_a_report_shows_replicas_that_differ(group, tmp_path):
    """One rank's weights change after the last update, where no other check would see it."""
    task = TextClassificationTask({"labels": np.zeros(8)}, {"labels": np.zeros(6)}, ["a", "b", "c"], 0)
    recorder = RunRecorder(task.label_names, num_train=8)
    trainer = train(
        tiny_roberta(), Rows(8), tmp_path, per_device_train_batch_size=2, eval_dataset=Rows(6),
        evaluation_strategy="epoch", compute_metrics=recorder.metrics, callbacks=[recorder],
        zero_stage=0,  # ranks that share weights cannot differ
    )  # fmt: skip

    def report():
        return make_report(trainer, trainer.output, recorder, TaskConfig(), task)

    equal = report()
    assert equal["replica_digests"] == [trainer.replica_digest] * group.world_size
    assert equal["replicas_in_sync"]
    assert f"yes, digest {trainer.replica_digest}" in summary(equal, tmp_path)
    assert "DIFFER" not in render([RecordedRun("run", equal)])
    if group.world_size == 1:
        return
    last = group.world_size - 1
    if group.rank == last:
        bias = trainer.model.classifier.out_proj.bias
        mindspore.ops.assign(bias, bias + 1)
    differing = report()
    assert differing["replica_digests"] == group.all_gather_object(dp.replica_digest(trainer.model))
    assert differing["replica_digests"][:last] == equal["replica_digests"][:last]
    assert differing["replica_digests"][last] != trainer.replica_digest
    assert not differing["replicas_in_sync"]
    assert f"NO, digests by rank {', '.join(differing['replica_digests'])}" in summary(differing, tmp_path)
    page = render([RecordedRun("run", differing)])
    assert "DIFFER" in page
    assert "not on every process" in page


def test_broadcast_parameters_refuses_models_of_different_structure_on_all_ranks(group):
    if group.world_size == 1:
        pytest.skip("one replica agrees with itself")
    last = group.world_size - 1
    width = 4 if group.rank == last else 3
    with pytest.raises(
        ReplicaMismatchError,
        match=rf"rank 0 has 'weight' of shape \(2, 3\) .* where rank {last} has 'weight' of shape \(2, 4\)",
    ):
        dp.broadcast_parameters(nn.Linear(width, 2))
    with pytest.raises(ReplicaMismatchError, match=f"rank 0 has 'bias' .* which rank {last} does not have"):
        dp.broadcast_parameters(nn.Linear(3, 2, bias=group.rank != last))


def test_replica_digest_depends_on_names_and_bits():
    pairs = [("a", mindspore.Tensor([1.0, 2.0]))]
    digest = dp.replica_digest(pairs)
    assert len(digest) == 16
    assert digest == dp.replica_digest([("a", mindspore.Tensor([1.0, 2.0]))])
    assert digest != dp.replica_digest([("b", mindspore.Tensor([1.0, 2.0]))])
    assert digest != dp.replica_digest([("a", mindspore.Tensor([1.0, np.nextafter(np.float32(2), np.float32(3))]))])


def halve(model, group):
    """Halve the weights in place, one rank after another, as a pruning script might; return the old weights."""
    before = weights(model)
    for rank in range(group.world_size):
        group.barrier()
        for parameter in model.parameters() if rank == group.rank else ():
            # assign writes in place; assign_value would give the parameter other memory.
            mindspore.ops.assign(parameter, parameter * 0.5)
    group.barrier()
    return before


def assert_halved(model, before):
    for name, weight in weights(model).items():
        np.testing.assert_array_equal(weight, 0.5 * before[name], err_msg=name)


def test_ranks_do_not_share_weight_memory_after_training(group, tmp_path):
    """Ranks of a host share the memory of weights only during training, when all see what one rank writes."""
    trainer = train(tiny_roberta(), Rows(24), tmp_path, per_device_train_batch_size=4)
    assert_halved(trainer.model, halve(trainer.model, group))
    trainer.train()
    dp.assert_replicas_in_sync(trainer.model)


def test_ranks_do_not_share_weight_memory_after_a_failed_training(group, tmp_path):
    class Fails(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                raise KeyboardInterrupt

    model = tiny_roberta()
    with pytest.raises(KeyboardInterrupt):
        train(model, Rows(24), tmp_path, per_device_train_batch_size=2, callbacks=[Fails()])
    assert_halved(model, halve(model, group))


def test_ranks_do_not_share_weight_memory_after_a_train_step_is_deleted(group):
    model = tiny_roberta()
    parameters = list(model.parameters())
    step = dp.make_train_step(
        lambda ids, labels: model(ids, labels=labels).loss, optim.AdamW(parameters, lr=1e-3), parameters
    )
    rows = Rows(4)
    step((mindspore.Tensor(rows.input_ids), mindspore.Tensor(rows.labels)))
    del step
    assert_halved(model, halve(model, group))
