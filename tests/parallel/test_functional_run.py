"""Test custom loops: a stopped and resumed run ends like an uninterrupted one; evaluation sees every row."""

from __future__ import annotations

import mindspore
import numpy as np
import pytest
from library import optim
from mindspore import nn as cells
from mindspore import ops

import mindnlp_dp as dp
from mindnlp_dp.checkpoint.directory import checkpoints_in
from mindnlp_dp.checkpoint.manifest import CheckpointError
from mindnlp_dp.data.batches import default_collate
from models import NUM_LABELS, Rows, alone, tiny_roberta

NUM_SAMPLES, NUM_EPOCHS, NUM_FEATURES = 37, 3, 6


class Points:
    """Samples for a dense network."""

    def __init__(self, num_samples=NUM_SAMPLES):
        rng = np.random.default_rng(2)
        self.features = rng.standard_normal((num_samples, NUM_FEATURES)).astype(np.float32)
        self.labels = rng.integers(0, NUM_LABELS, num_samples).astype(np.int32)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"features": self.features[index], "labels": self.labels[index]}


def roberta(group, seed, schedules=True, **options):
    """Return a MindNLP model with dropout, its step with a schedule and two micro steps, and its loader."""
    model = tiny_roberta(seed=seed, dropout=0.2)
    model.set_train(True)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = optim.AdamW(parameters, lr=1e-2)
    scheduler = optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step) if schedules else None
    step = dp.make_train_step(
        lambda input_ids, attention_mask, labels: model(input_ids, attention_mask, labels=labels).loss,
        optimizer, parameters, accumulation_steps=2, scheduler=scheduler, max_grad_norm=1.0, seed=5, **options,
    )  # fmt: skip
    columns = ["input_ids", "attention_mask", "label"]
    return model, step, loader_of(Rows(NUM_SAMPLES), group, accumulation_steps=2, columns=columns)


def with_noise(rows):
    """Augment samples with NumPy's global generator, whose state a checkpoint must contain."""
    batch = default_collate(rows)
    noise = np.random.standard_normal(batch["features"].shape)
    return {**batch, "features": batch["features"] + 0.1 * noise.astype(np.float32)}


def cell(group, seed, make_optimizer=None, **options):
    mindspore.set_seed(seed)
    net = cells.SequentialCell(cells.Dense(NUM_FEATURES, 16), cells.ReLU(), cells.Dense(16, NUM_LABELS))
    schedule = cells.cosine_decay_lr(0.0, 0.05, 30, 5, 6)
    optimizer = (make_optimizer or (lambda p: cells.Adam(p, schedule)))(net.trainable_params())
    loss_fn = cells.CrossEntropyLoss()
    step = dp.make_train_step(
        lambda features, labels: loss_fn(net(ops.dropout(features, 0.2)), labels),
        optimizer, optimizer.parameters, seed=5, **options,
    )  # fmt: skip
    return net, step, loader_of(Points(), group, collate=with_noise)


def loader_of(dataset, group, accumulation_steps=1, **options):
    """Return a loader with eight samples per update for any number of ranks."""
    size = 8 // accumulation_steps // group.world_size
    return dp.make_loader(dataset, size, accumulation_steps, shuffle=True, seed=1, **options)


def train_for(make, folder, group, *, seed=3, stop_at=None, save_every=2, resume=False, sharded=False, **options):
    """Train to the end or for ``stop_at`` updates, and return weights, losses by update, and the run."""
    model, step, loader = make(group, seed, **options)
    dp.broadcast_parameters(model)
    run = dp.FunctionalRun(folder, model, step, loader, sharded=sharded)
    assert run.resume() == resume
    losses = {}
    for micro_batches in run.updates(NUM_EPOCHS):
        step(micro_batches)
        losses[step.num_updates] = step.mean_loss()
        if step.num_updates % save_every == 0:
            run.save()
        if step.num_updates == stop_at:
            break
    parameters = model.trainable_params() if isinstance(model, cells.Cell) else model.parameters()
    return [p.asnumpy().copy() for p in parameters], losses, run


def test_a_run_with_a_scheduler_is_not_resumed_without_one(group, shared_tmp_path):
    train_for(roberta, shared_tmp_path, group, stop_at=2)
    with pytest.raises(ValueError, match="has another learning-rate scheduler .*lr_lambdas.* than this one .none."):
        train_for(lambda *given, **options: roberta(*given, schedules=False), shared_tmp_path, group, resume=True)


@pytest.mark.parametrize("make", [roberta, cell])
@pytest.mark.parametrize("stop_at", [3, pytest.param(5, marks=pytest.mark.core), 6])
def test_custom_loop_resumed_from_a_checkpoint_ends_with_the_same_weights(group, shared_tmp_path, make, stop_at):
    """The run stops within an epoch, at the end of one, and directly after a checkpoint."""
    expected, all_losses, _ = train_for(make, shared_tmp_path / "whole", group)
    assert len(all_losses) == 15
    train_for(make, shared_tmp_path / "stopped", group, stop_at=stop_at, sharded=stop_at == 5)
    # The resumed run has different initial weights, so all weights must come from the checkpoint.
    mine, losses, run = train_for(make, shared_tmp_path / "stopped", group, seed=4, resume=True)
    for one, other in zip(mine, expected):
        np.testing.assert_array_equal(one, other)
    first = stop_at - stop_at % 2 + 1
    # The last bit of the mean loss of a short batch can vary, even without a stop. The weights never vary.
    assert losses == pytest.approx({step: loss for step, loss in all_losses.items() if step >= first}, rel=1e-6)
    assert run.step.num_updates == 15
    assert [path.name for path in checkpoints_in(run.folder)] == ["checkpoint-12", "checkpoint-14"]


def test_checkpoint_at_the_end_of_an_epoch_resumes_with_the_same_weights(group, shared_tmp_path):
    expected, _, _ = train_for(cell, shared_tmp_path / "whole", group)
    train_for(cell, shared_tmp_path / "stopped", group, stop_at=5, save_every=5)
    mine, losses, _ = train_for(cell, shared_tmp_path / "stopped", group, resume=True)
    assert min(losses) == 6
    for one, other in zip(mine, expected):
        np.testing.assert_array_equal(one, other)


def test_resume_continues_from_the_checkpoint_that_was_chosen_before(group, shared_tmp_path):
    train_for(cell, shared_tmp_path, group, stop_at=6)
    model, step, loader = cell(group, 3)
    run = dp.FunctionalRun(shared_tmp_path, model, step, loader, keep=1)
    assert run.resume(shared_tmp_path / "checkpoint-4")
    # It is stopped before it saves.
    step(next(run.updates(NUM_EPOCHS)))
    del run
    model, step, loader = cell(group, 3)
    run = dp.FunctionalRun(shared_tmp_path, model, step, loader, keep=1)
    assert run.resume()
    assert step.num_updates == 4
    step(next(run.updates(NUM_EPOCHS)))
    run.save()
    group.barrier()
    # The abandoned checkpoint-6 stays, as those of every other run.
    assert [path.name for path in checkpoints_in(shared_tmp_path)] == ["checkpoint-5", "checkpoint-6"]


def test_updates_with_other_data_do_not_change_the_resume_position(group, shared_tmp_path):
    """The step is warmed up, used between updates and after an epoch, and one update is left out."""
    net, step, loader = cell(group, 3)
    run = dp.FunctionalRun(shared_tmp_path, net, step, loader)
    other = next(loader_of(Points(8), group, collate=with_noise).updates())[0]
    step(other)
    assert (run.position.epoch, run.position.update) == (0, 0)
    done = []
    for number, micro_batches in enumerate(run.updates(2)):
        assert (run.position.epoch, run.position.update) == divmod(number, len(loader))
        if number != 1:
            step(micro_batches)
        if number in (2, 6):
            step(other)
            step(other)
        done.append((run.position.epoch, run.position.update))
        if number == 6:
            break
    assert done == [(0, 1), (0, 1), (0, 3), (0, 4), (0, 5), (1, 1), (1, 2)]
    run.save()
    group.barrier()
    net, step, loader = cell(group, 4)
    run = dp.FunctionalRun(shared_tmp_path, net, step, loader)
    assert run.resume()
    assert (run.position.epoch, run.position.update, step.num_updates) == (1, 2, 11)
    assert sum(1 for micro_batches in run.updates(2)) == len(loader) - 2


def test_resume_skips_a_damaged_checkpoint(group, shared_tmp_path):
    train_for(cell, shared_tmp_path, group, stop_at=4)
    if group.is_main:
        (shared_tmp_path / "checkpoint-4" / "model.safetensors").write_bytes(b"half")
    group.barrier()
    _, step, _ = parts = cell(group, 3)
    run = dp.FunctionalRun(shared_tmp_path, *parts)
    if group.is_main:
        with pytest.warns(RuntimeWarning, match=r"model.safetensors has 4 bytes"):
            assert run.resume()
    else:
        assert run.resume()
    assert step.num_updates == 2


def test_resume_refuses_other_data_batch_sizes_models_and_optimizers(group, shared_tmp_path):
    train_for(cell, shared_tmp_path, group, stop_at=2)
    net, step, loader = cell(group, 3)

    def resume(model=net, step=step, loader=loader):
        return dp.FunctionalRun(shared_tmp_path, model, step, loader).resume()

    fewer = dp.make_loader(Points(30), 8 // group.world_size, shuffle=True, seed=1)
    with pytest.raises(ValueError, match=r"num_samples was 37 and is 30.* or save to another folder"):
        resume(loader=fewer)
    smaller = dp.make_loader(Points(), 4 // group.world_size, shuffle=True, seed=1)
    with pytest.raises(ValueError, match="updates have 8 samples, this loader's 4; .*global_batch_size=8"):
        resume(loader=smaller)
    other = cells.SequentialCell(cells.Dense(NUM_FEATURES, NUM_LABELS))
    with pytest.raises(CheckpointError, match="which the model"):
        resume(model=other)
    net, step, _ = cell(group, 3, lambda p: cells.Momentum(p, 0.1, 0.9))
    with pytest.raises(ValueError, match="the saved optimizer differs: only one of the two has .*moment"):
        resume(model=net, step=step)


@pytest.mark.core
@pytest.mark.parametrize("num_samples", [1, 37])
def test_evaluation_sees_every_row_once_in_order(group, num_samples):
    net, _, _ = cell(group, 3)
    dp.broadcast_parameters(net)
    loss_fn, points = cells.CrossEntropyLoss(), Points(num_samples)

    def predict(features, labels):
        logits = net(features)
        return loss_fn(logits, labels), {"logits": logits, "labels": labels}

    evaluation = dp.evaluate(predict, dp.make_loader(points, 3), has_loss=True)
    assert evaluation.num_samples == num_samples
    np.testing.assert_array_equal(evaluation.outputs["labels"], points.labels)
    with alone():
        expected = dp.evaluate(predict, dp.make_loader(points, num_samples), has_loss=True)
    np.testing.assert_allclose(evaluation.outputs["logits"], expected.outputs["logits"], rtol=1e-5, atol=1e-6)
    assert evaluation.loss == pytest.approx(expected.loss, rel=1e-6)
    without = dp.evaluate(lambda features, labels: net(features), dp.make_loader(points, 3))
    assert without.loss is None
    np.testing.assert_array_equal(without.outputs, evaluation.outputs["logits"])


def test_evaluate_refuses_outputs_without_a_row_per_sample(group):
    loader = dp.make_loader(Points(), 3)
    with pytest.raises(ValueError, match=r"predict_fn returned an array of shape \(\) .* pass has_loss=True"):
        dp.evaluate(lambda features, labels: (features.sum(), labels), loader)
    with pytest.raises(ValueError, match=r"returned an array of shape \(1, 3\) for a batch of 3 rows"):
        dp.evaluate(lambda features, labels: labels.reshape(1, -1), loader)


def test_resume_refuses_another_dropout_seed_or_other_samples(group, shared_tmp_path):
    def run(seed, samples):
        mindspore.set_seed(1)
        net = cells.SequentialCell(cells.Dense(NUM_FEATURES, NUM_LABELS))
        loss_fn, parameters = cells.CrossEntropyLoss(), net.trainable_params()
        step = dp.make_train_step(
            lambda features, labels: loss_fn(net(features), labels), cells.SGD(parameters, 0.1), parameters, seed=seed
        )
        return dp.FunctionalRun(shared_tmp_path, net, step, dp.make_loader(samples, 3))

    first = run(0, Points())
    for number, micro_batches in enumerate(first.updates(1)):
        first.step(micro_batches)
        if number == 1:
            first.save()
            break
    del first
    other = Points()
    other.features = other.features + 1
    with pytest.raises(ValueError, match="seed was 0 and is 5.*save to another folder"):
        run(5, Points()).resume()
    with pytest.raises(ValueError, match="samples differ in 'features'"):
        run(0, other).resume()
    assert run(0, Points()).resume()
