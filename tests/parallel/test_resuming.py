"""Test that a run stopped anywhere and resumed has the same weights, losses and decisions as an uninterrupted one."""

from __future__ import annotations

import copy
import errno
import json
import math
import shutil
import threading
import time
import warnings

import numpy as np
import pytest
from library import EarlyStoppingCallback, Stop, TrainerCallback, is_0_5, optim
from mindspore.dataset import NumpySlicesDataset

import mindnlp_dp as dp
from mindnlp_dp.checkpoint import collective_save, shard_files
from mindnlp_dp.checkpoint.directory import WORKSPACE, checkpoints_in
from mindnlp_dp.checkpoint.manifest import CheckpointError, check_checkpoint
from mindnlp_dp.checkpoint.reader import read_state
from mindnlp_dp.checkpoint.state_tree import unpack_state
from mindnlp_dp.data.batches import default_collate
from mindnlp_dp.training.trainer import resuming
from models import LENGTH, Rows, alone, tiny_roberta, train, weights

NUM_SAMPLES = 37
# Three epochs of five updates with a short last one; two micro steps per update. Dropout is on.
SETTINGS = {
    "num_train_epochs": 3, "gradient_accumulation_steps": 2, "learning_rate": 1e-2, "warmup_steps": 3,
    "lr_scheduler_type": "cosine", "logging_steps": 3, "save_strategy": "steps", "save_steps": 2,
}  # fmt: skip
NUM_STEPS = 15
# Early stopping needs a metric.
EVALUATING = {
    "eval_dataset": Rows(8, seed=1), "load_best_model_at_end": True, "metric_for_best_model": "loss",
    "evaluation_strategy": "steps", "eval_steps": 100, "save_steps": 100,
}  # fmt: skip


def settings_for(group, **more):
    # An update has eight samples on any number of ranks up to four.
    return {**SETTINGS, "per_device_train_batch_size": 4 // group.world_size, **more}


def run(folder, group, rows=None, *, stop_at=None, dropout=0.2, seed=3, **more):
    callbacks = [*more.pop("callbacks", []), *([Stop(stop_at)] if stop_at else [])]
    settings = settings_for(group, **more)
    return train(
        tiny_roberta(seed=seed, dropout=dropout), rows or Rows(NUM_SAMPLES), folder, callbacks=callbacks, **settings
    )


def stopped_and_resumed(folder, group, stop_at, **more):
    # The callbacks are new, as in a new process, so their state must come from the checkpoint too.
    fresh = copy.deepcopy(more.get("callbacks", []))
    with pytest.raises(KeyboardInterrupt):
        run(folder, group, stop_at=stop_at, **more)
    group.barrier()
    # The initial weights are different, so all weights must come from the checkpoint.
    return run(folder, group, seed=4, resume=True, **{**more, "callbacks": fresh})


def history(trainer):
    """Return the log without measured times."""
    timed = ("runtime", "seconds", "per_second", "share", "gib")
    rows = [{k: v for k, v in row.items() if not k.endswith(timed)} for row in trainer.state.log_history]
    return json.loads(json.dumps(rows))


def assert_same_run(resumed, whole):
    for name, weight in weights(whole.model).items():
        np.testing.assert_array_equal(weights(resumed.model)[name], weight, err_msg=name)
    assert resumed.replica_digest == whole.replica_digest
    assert history(resumed) == history(whole)
    assert resumed.state.global_step == whole.state.global_step
    assert resumed.output.training_loss == whole.output.training_loss


def pytest_generate_tests(metafunc):
    """Run every test with a sharded update, where each rank saves part of the state; one of them also without."""
    is_first = metafunc.definition.name == "test_a_resumed_run_equals_an_uninterrupted_one"
    stages = [0] if dp.get_process_group().world_size == 1 else [0, 2] if is_first else [2]
    metafunc.parametrize("zero_stage", stages, indirect=True, scope="module")


@pytest.fixture(scope="module", autouse=True)
def zero_stage(request):
    SETTINGS["zero_stage"] = request.param


@pytest.fixture(scope="module")
def whole(group, zero_stage, tmp_path_factory):
    return run(tmp_path_factory.mktemp("whole"), group)


@pytest.mark.skipif(is_0_5, reason="MindNLP 0.5 exchanges gradients after the backward pass")
def test_a_resumed_run_packs_gradients_in_the_recorded_order(group, tmp_path_factory):
    """The packing order affects the bits of sums that are compressed, or added over three hosts."""

    class Orders(TrainerCallback):
        def __init__(self):
            self.seen = []

        def on_step_begin(self, args, state, control, **kwargs):
            self.seen.append(list(self.trainer._synchronizer.order))

    class Watched(dp.DataParallelTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            orders.trainer = self

    settings = {"overlap": True, "bucket_cap_mb": 0.001, "trainer_class": Watched}
    folder = tmp_path_factory.mktemp("order")
    orders = Orders()
    whole = run(folder, group, stop_at=None, callbacks=[orders], **settings, max_steps=5)
    first, recorded_order = orders.seen[0], orders.seen[-1]
    assert recorded_order == whole._synchronizer.order
    orders = Orders()
    run(folder, group, callbacks=[orders], resume=True, **settings, max_steps=7)
    assert orders.seen[0] == recorded_order
    assert (first == recorded_order) == (group.world_size == 1)


@pytest.mark.parametrize(
    "exchange",
    [
        pytest.param({"overlap": True}, id="overlap", marks=pytest.mark.skipif(is_0_5, reason="no overlap there")),
        pytest.param({"compression": "powersgd", "powersgd_rank": 1, "zero_stage": 0}, id="powersgd"),
    ],
)
def test_a_run_with_overlap_or_powersgd_resumes_exactly(group, tmp_path_factory, whole, exchange):
    """Overlap learns its order again, with the same result; PowerSGD drops its errors at every save."""
    reference = run(tmp_path_factory.mktemp("reference"), group, **exchange)
    resumed = stopped_and_resumed(tmp_path_factory.mktemp("resumed"), group, 7, **exchange)
    assert_same_run(resumed, reference)
    assert resumed._synchronizer.order == reference._synchronizer.order
    assert (reference.replica_digest == whole.replica_digest) == ("overlap" in exchange)


# Stops within an epoch, at its last step, at the first step of the next, before a log line, and at the last step.
@pytest.mark.parametrize(
    "stop_at",
    [
        3,
        pytest.param(5, marks=pytest.mark.core),
        6,
        pytest.param(8, marks=pytest.mark.slow),
        13,
        15,
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(group, shared_tmp_path, whole, stop_at):
    assert whole.state.global_step == NUM_STEPS
    resumed = stopped_and_resumed(shared_tmp_path, group, stop_at)
    assert_same_run(resumed, whole)


def test_a_run_resumed_several_times_equals_an_uninterrupted_one(group, shared_tmp_path, whole):
    for stop_at in (3, 5, 9, 12):
        with pytest.raises(KeyboardInterrupt):
            run(shared_tmp_path, group, stop_at=stop_at, resume=True if stop_at > 3 else None)
        group.barrier()
    assert_same_run(run(shared_tmp_path, group, resume=True), whole)


def test_a_finished_run_is_not_trained_further(group, shared_tmp_path, whole):
    finished = run(shared_tmp_path, group, save_steps=5)
    group.barrier()
    again = run(shared_tmp_path, group, save_steps=5, seed=4, resume=True)
    assert again.replica_digest == finished.replica_digest == whole.replica_digest


class LowersTheRate(TrainerCallback):
    """Halves the schedule after the fourth update, as users of PyTorch do."""

    def on_step_end(self, args, state, control, lr_scheduler=None, **kwargs):
        if state.global_step == 4:
            lr_scheduler.base_lrs = [rate / 2 for rate in lr_scheduler.base_lrs]


def test_a_resumed_run_keeps_a_schedule_that_a_callback_has_changed(group, shared_tmp_path):
    whole = run(shared_tmp_path / "whole", group, callbacks=[LowersTheRate()])
    resumed = stopped_and_resumed(shared_tmp_path / "stopped", group, 8, callbacks=[LowersTheRate()])
    assert resumed.lr_scheduler.base_lrs == [5e-3] * len(resumed.lr_scheduler.base_lrs)
    assert_same_run(resumed, whole)


def test_a_finished_run_of_a_stream_ends_when_it_is_resumed(group, shared_tmp_path):
    class Stream:
        def __iter__(self):
            return (Rows(10)[index] for index in range(10))

    settings = {"max_steps": 6, "save_steps": 3}
    finished = run(shared_tmp_path, group, Stream(), **settings)
    group.barrier()
    again = run(shared_tmp_path, group, Stream(), seed=4, resume=True, **settings)
    assert (again.state.global_step, again.replica_digest) == (6, finished.replica_digest)
    # Fewer updates than the checkpoint has.
    assert run(shared_tmp_path, group, Stream(), resume=True, **{**settings, "max_steps": 4}).state.global_step == 6


def test_resume_refuses_a_loader_of_the_trainer_with_another_batch_and_names_a_batch_that_is_kept(
    group, shared_tmp_path, capsys
):
    def with_own_loader(size):
        name = "get_train_dataloader" if is_0_5 else "get_train_dataset"
        columns = ["input_ids", "label"]
        own = {name: lambda self, *args: dp.make_loader(Rows(37), size, shuffle=True, columns=columns)}
        return type("WithOwnLoader", (dp.DataParallelTrainer,), own)

    run(shared_tmp_path / "own", group, trainer_class=with_own_loader(2), max_steps=2)
    group.barrier()
    larger = with_own_loader(4)
    with pytest.raises(ValueError, match=rf"updates have {2 * group.world_size} samples, and those of this Trainer's"):
        run(shared_tmp_path / "own", group, trainer_class=larger, max_steps=4, resume=True)
    run(shared_tmp_path / "given", group, global_batch_size=8, gradient_accumulation_steps=1, max_steps=2)
    group.barrier()
    capsys.readouterr()
    again = run(
        shared_tmp_path / "given", group, global_batch_size=16, gradient_accumulation_steps=1, max_steps=4, resume=True
    )
    assert again.training_loop.loader.global_batch_size == 8
    assert ("the checkpoint's global batch of 8 samples" in capsys.readouterr().out) == group.is_main


def test_a_finished_run_resumes_with_more_epochs(group, shared_tmp_path):
    constant = {"lr_scheduler_type": "constant", "save_strategy": "epoch"}
    long = run(shared_tmp_path / "long", group, **constant)
    run(shared_tmp_path / "short", group, **{**constant, "num_train_epochs": 2})
    group.barrier()
    longer = run(shared_tmp_path / "short", group, seed=4, resume=True, **constant)
    assert longer.replica_digest == long.replica_digest


def test_a_resumed_run_restores_the_random_masks_of_a_collator(group, shared_tmp_path):
    """A collator with random masks draws the same masks as without the stop."""

    def masking(rows):
        batch = default_collate([{k: v for k, v in row.items() if k != "row"} for row in rows])
        batch["input_ids"][np.random.rand(*batch["input_ids"].shape) < 0.3] = 4
        return batch

    whole = run(shared_tmp_path / "whole", group, data_collator=masking)
    resumed = stopped_and_resumed(shared_tmp_path / "stopped", group, 8, data_collator=masking)
    assert_same_run(resumed, whole)


def test_a_resumed_run_restores_the_random_numbers_of_an_iterable_data_set(group, shared_tmp_path):
    """Reading again up to the position must not advance the random generators."""

    class Noisy:
        def __iter__(self):
            rows = Rows(30)
            for index in range(30):
                ids = np.where(np.random.rand(LENGTH) < 0.3, 4, rows[index]["input_ids"])
                yield {"input_ids": ids, "label": rows[index]["label"]}

    more = {"rows": Noisy(), "max_steps": 9, "save_steps": 1}
    whole = run(shared_tmp_path / "whole", group, **more)
    resumed = stopped_and_resumed(shared_tmp_path / "stopped", group, 6, **more)
    assert_same_run(resumed, whole)


def deciding(group):
    """Return settings of a run that depends on its evaluations: plateau scheduler, best model, early stop."""

    class Deciding(dp.DataParallelTrainer):
        def create_scheduler(self, num_training_steps, optimizer=None):
            self.lr_scheduler = optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=0, factor=0.5)
            self._created_lr_scheduler = True
            return self.lr_scheduler

    return {
        "trainer_class": Deciding, "eval_dataset": Rows(20, seed=5), "evaluation_strategy": "epoch",
        "save_strategy": "epoch", "num_train_epochs": 8, "load_best_model_at_end": True,
        "metric_for_best_model": "loss", "greater_is_better": False, "dropout": 0.0,
    }  # fmt: skip


def stopper():
    return [EarlyStoppingCallback(early_stopping_patience=3)]


@pytest.fixture(scope="module")
def decided(group, tmp_path_factory):
    """Return an uninterrupted run with many decisions."""
    return run(
        group.broadcast_object(tmp_path_factory.mktemp("decided")), group, callbacks=stopper(), **deciding(group)
    )


# -2 counts from the end, where early stopping has already seen two evaluations without improvement.
@pytest.mark.parametrize("stop_at", [pytest.param(7, marks=pytest.mark.core), 12, -2])
def test_a_resumed_run_restores_the_scheduler_best_model_and_early_stopping(group, shared_tmp_path, decided, stop_at):
    whole = decided
    stop_at = stop_at if stop_at > 0 else whole.state.global_step + stop_at
    resumed = stopped_and_resumed(shared_tmp_path / "stopped", group, stop_at, callbacks=stopper(), **deciding(group))
    assert_same_run(resumed, whole)
    assert 15 < whole.state.global_step < 40  # it stopped early, but only after the resume
    assert resumed.state.best_metric == whole.state.best_metric
    rates = {row["learning_rate"] for row in whole.state.log_history if "learning_rate" in row}
    assert len(rates) > 1  # the scheduler has reacted to a plateau


class StopAt4(TrainerCallback):
    """Stops and saves after update 4, as a time limit or a signal does."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 4:
            control.should_training_stop = control.should_save = True


class Silent(TrainerCallback):
    pass


def test_a_run_that_was_stopped_and_saved_resumes_to_its_end(group, shared_tmp_path, capsys):
    whole = run(shared_tmp_path / "whole", group, callbacks=[Silent()])
    assert run(shared_tmp_path / "stopped", group, callbacks=[StopAt4()]).state.global_step == 4
    group.barrier()
    capsys.readouterr()
    resumed = run(shared_tmp_path / "stopped", group, callbacks=[Silent()], seed=4, resume=True)
    said = f"this run was stopped at update 4 of {NUM_STEPS}; it is resumed there, and continues to its end"
    assert (said in capsys.readouterr().out) == group.is_main
    assert_same_run(resumed, whole)


@pytest.mark.parametrize("why", ["its job was restarted", "early stopping"])
def test_a_stopped_run_stays_stopped_after_a_job_restart_or_early_stopping(
    group, shared_tmp_path, capsys, monkeypatch, why
):
    """A job restarted between its last checkpoint and its end stays stopped; so does one that stopped early."""
    stopper = EarlyStoppingCallback(early_stopping_patience=1)
    if why == "early stopping":
        stopper.early_stopping_patience_counter = 1
    stopped = run(shared_tmp_path, group, callbacks=[StopAt4(), stopper], **EVALUATING)
    group.barrier()
    if why != "early stopping":
        monkeypatch.setattr(resuming, "job_if_restarted", lambda environ: "a job")
    capsys.readouterr()
    fresh = [Silent(), EarlyStoppingCallback(early_stopping_patience=1)]
    again = run(shared_tmp_path, group, callbacks=fresh, seed=4, resume=True, **EVALUATING)
    said = capsys.readouterr().out
    assert (f"this run was stopped at update 4 of {NUM_STEPS}" in said) == group.is_main
    assert (why in said) == group.is_main
    assert again.state.global_step == stopped.state.global_step == 4
    assert again.replica_digest == stopped.replica_digest


def test_resume_refuses_other_data_and_warns_of_other_settings(group, shared_tmp_path):
    run(shared_tmp_path, group, max_steps=2)
    group.barrier()
    for other in (Rows(NUM_SAMPLES, seed=1), Relabelled(NUM_SAMPLES)):
        with pytest.raises(ValueError, match="samples differ in '(input_ids|label)'"):
            run(shared_tmp_path, group, other, resume=True, max_steps=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(shared_tmp_path, group, resume=True, max_steps=4, max_grad_norm=0.5)
    said = [str(warning.message) for warning in caught if "other settings" in str(warning.message)]
    assert len(said) == group.is_main
    assert all("max_grad_norm was 1.0 and is 0.5" in message for message in said)


class Relabelled(Rows):
    def __getitem__(self, index):
        row = super().__getitem__(index)
        return {**row, "label": row["label"] + 1} if index == NUM_SAMPLES - 1 else row


def test_a_run_resumes_exactly_if_a_callback_ends_epochs(group, shared_tmp_path):
    """The number of updates is then not a multiple of the length of a full epoch."""

    class ThreeAnEpoch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_epoch_stop = state.global_step % 3 == 0

    whole = run(shared_tmp_path / "whole", group, callbacks=[ThreeAnEpoch()], save_steps=1)
    assert whole.state.global_step == 9
    resumed = stopped_and_resumed(shared_tmp_path / "stopped", group, 5, callbacks=[ThreeAnEpoch()], save_steps=1)
    assert_same_run(resumed, whole)


@pytest.mark.parametrize(
    ("micro", "steps"),
    [pytest.param(2, 4, marks=pytest.mark.core), pytest.param(3, 3, marks=pytest.mark.slow), (16, 1)],
)
def test_resume_on_another_number_of_ranks_keeps_the_global_batch_and_the_order(
    group, shared_tmp_path, capsys, micro, steps
):
    rows = Rows(NUM_SAMPLES)
    whole = run(shared_tmp_path / "whole", group, rows, dropout=0.0, optim="sgd")
    with pytest.raises(KeyboardInterrupt):
        run(shared_tmp_path / "stopped", group, rows, dropout=0.0, optim="sgd", stop_at=8, sharded_checkpoints=True)
    group.barrier()
    with alone() as single:
        mine = shared_tmp_path / f"alone_{group.rank}"
        shutil.copytree(shared_tmp_path / "stopped", mine)
        # Micro-batches divide the global batch, or the last one is smaller, or one could hold more than the batch.
        resumed = run(mine, single, rows, dropout=0.0, optim="sgd", resume=True, per_device_train_batch_size=micro)
    assert resumed.training_loop.loader.micro_steps == steps
    assert resumed.state.train_batch_size == resumed._train_batch_size == min(micro, 8)
    said = f"training with the checkpoint's global batch of 8 samples: gradient_accumulation_steps is {steps}"
    assert said in capsys.readouterr().out
    for name, weight in weights(whole.model).items():
        np.testing.assert_allclose(weights(resumed.model)[name], weight, rtol=0, atol=2e-6, err_msg=name)
    losses, expected = ([row["loss"] for row in t.state.log_history if "loss" in row] for t in (resumed, whole))
    assert losses == pytest.approx(expected, abs=1.1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": Rows(NUM_SAMPLES + 1)}, "num_samples was 37 and is 38"),
        ({"data_seed": 5}, "data_seed was 42 and is 5"),
        ({"dataset_shuffle": False}, "dataset_shuffle was True and is False"),
        ({"optim": "sgd"}, "saved with another optimizer than SGD: only one of the two has betas, eps"),
    ],
)  # fmt: skip
def test_resume_refuses_other_data_and_another_optimizer(group, shared_tmp_path, change, message):
    run(shared_tmp_path, group, max_steps=2)
    group.barrier()
    with pytest.raises(ValueError, match=message):
        run(shared_tmp_path, group, max_steps=4, resume=True, **change)
    if "data_seed" in change:
        run(shared_tmp_path, group, max_steps=4, resume=True, ignore_data_skip=True, **change)


@pytest.mark.parametrize("sharded_checkpoints", [False, True])
@pytest.mark.parametrize("stop_at", [pytest.param(5, marks=pytest.mark.core), 12])
def test_a_run_resumes_exactly_from_async_checkpoints(group, shared_tmp_path, whole, stop_at, sharded_checkpoints):
    resumed = stopped_and_resumed(
        shared_tmp_path, group, stop_at, async_save=True, sharded_checkpoints=sharded_checkpoints
    )
    assert_same_run(resumed, whole)
    assert not list(shared_tmp_path.glob(".*-*"))


@pytest.mark.core
def test_a_run_resumes_exactly_from_sharded_checkpoints(group, shared_tmp_path, whole):
    resumed = stopped_and_resumed(shared_tmp_path / "sharded", group, 5, sharded_checkpoints=True)
    assert_same_run(resumed, whole)
    run(shared_tmp_path / "one", group, max_steps=2)
    folders = [shared_tmp_path / name / "checkpoint-2" for name in ("sharded", "one")]
    one, other = (unpack_state(read_state(folder)) for folder in folders)
    for number, state in other["optimizer"]["state"].items():
        for name in ("exp_avg", "exp_avg_sq"):
            mine = one["optimizer"]["state"][number][name]
            np.testing.assert_array_equal(mine.asnumpy(), state[name].asnumpy(), err_msg=f"{name} of {number}")
    # Each rank has written its own moments, and rank 0 alone the rest.
    files = [sorted(folder.glob("state-*.safetensors")) for folder in folders]
    assert list(map(len, files)) == [group.world_size if group.world_size > 1 else 0, 0]
    if group.world_size > 1:
        sizes = [file.stat().st_size for file in files[0]]
        assert max(sizes) < 2 * min(sizes)
        assert sum(sizes) > (folders[0] / "state.safetensors").stat().st_size
    assert not list((shared_tmp_path / "sharded").glob(".*-*"))


@pytest.mark.core
@pytest.mark.parametrize("is_async", [False, True])
def test_a_failed_write_of_a_checkpoint_shard_is_raised_on_every_rank(group, shared_tmp_path, monkeypatch, is_async):
    if group.world_size == 1:
        pytest.skip("one rank shards nothing")

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    if group.rank == group.world_size - 1:
        monkeypatch.setattr(shard_files, "save_file", fail)
    with pytest.raises((OSError, RuntimeError), match="No space left on device"):
        run(shared_tmp_path, group, sharded_checkpoints=True, async_save=is_async)
    group.barrier()
    assert not list(shared_tmp_path.glob("*checkpoint-*"))


SHARDED_IN_BACKGROUND = {"async_save": True, "sharded_checkpoints": True}


def of_last_rank(group, monkeypatch, put):
    """Let the last rank's thread call ``put`` where it puts its file into the workspace."""
    if group.rank == group.world_size - 1 > 0:
        monkeypatch.setattr(collective_save, "_put", put)


def test_an_async_checkpoint_is_complete_after_the_last_rank_has_written_its_shard(group, shared_tmp_path, monkeypatch):
    """The last rank's thread writes after update 7, and training continues meanwhile; the ranks agree after each."""
    may_write, seen, put = threading.Event(), {}, collective_save._put

    def wait_and_put(*arguments):
        assert may_write.wait(60)
        put(*arguments)

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            group.barrier()
            seen[state.global_step] = [path.name for path in checkpoints_in(shared_tmp_path)]
            if state.global_step == 7:
                may_write.set()

    of_last_rank(group, monkeypatch, wait_and_put)
    run(shared_tmp_path, group, max_steps=9, save_steps=4, callbacks=[Watch()], **SHARDED_IN_BACKGROUND)
    group.barrier()
    if group.world_size > 1:
        assert seen[7] == []
    last = checkpoints_in(shared_tmp_path)[-1]
    assert last.name == "checkpoint-8"
    check_checkpoint(last)
    assert not list(shared_tmp_path.glob(".*-*"))


@pytest.mark.core
@pytest.mark.parametrize("what", ["checkpoint", "shard"])
def test_a_failed_async_save_stops_every_rank_at_the_same_update(group, shared_tmp_path, monkeypatch, what):
    """Rank 0 cannot put ``checkpoint-2`` together, or the last rank cannot put its shard there, before update 3 ends.

    An incomplete checkpoint is dropped, and none is written after it.
    """
    if what == "shard" and group.world_size == 1:
        pytest.skip("one rank shards nothing")
    updates, failed = [], threading.Event()

    def fail(*_):
        failed.set()
        raise OSError(errno.EIO, "the disk is broken")

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            updates.append(state.global_step)
            if state.global_step > 2 and fails_here:
                assert failed.wait(60)

    if what == "shard":
        fails_here, settings = group.rank == group.world_size - 1, SHARDED_IN_BACKGROUND
        of_last_rank(group, monkeypatch, fail)
    else:
        fails_here, settings = group.is_main, {"async_save": True}
        monkeypatch.setattr(collective_save, "publish_checkpoint", fail)
    with warnings.catch_warnings(), pytest.raises((OSError, RuntimeError), match="the disk is broken"):
        warnings.filterwarnings("ignore", "the last checkpoint is incomplete", RuntimeWarning)
        run(shared_tmp_path, group, callbacks=[Watch()], **settings)
    group.barrier()
    assert updates == [1, 2, 3]
    assert not list(shared_tmp_path.glob("*checkpoint-*"))


@pytest.mark.core
@pytest.mark.parametrize("is_there", [False, True])
def test_an_error_completes_or_discards_a_pending_async_checkpoint(group, shared_tmp_path, monkeypatch, is_there):
    """All ranks fail in the update after a save; rank 0 completes the checkpoint if the last rank's file is there."""
    if group.world_size == 1:
        pytest.skip("one rank shards nothing")
    dropped, put = threading.Event(), collective_save._put

    def put_late(*arguments):
        assert is_there or dropped.wait(60)
        put(*arguments)

    def is_time_to_fail():
        if is_there:
            return len(list(shared_tmp_path.glob(f"{WORKSPACE}*/state-*"))) == group.world_size - 1
        return group.rank < group.world_size - 1 or not list(shared_tmp_path.glob(f"{WORKSPACE}*"))

    class Fail(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step < 3:
                return
            while not is_time_to_fail():
                time.sleep(0.01)
            dropped.set()
            raise ValueError("a callback has failed")

    of_last_rank(group, monkeypatch, put_late)
    with warnings.catch_warnings(record=True) as caught, pytest.raises(ValueError, match="a callback has failed"):
        warnings.simplefilter("always")
        run(shared_tmp_path, group, callbacks=[Fail()], **SHARDED_IN_BACKGROUND)
    is_told = any("is incomplete and was removed: FileNotFoundError" in str(warning.message) for warning in caught)
    assert is_told == (not is_there and (group.is_main or group.rank == group.world_size - 1))
    group.barrier()
    assert [path.name for path in checkpoints_in(shared_tmp_path)] == (["checkpoint-2"] if is_there else [])
    assert not list(shared_tmp_path.glob(".*-*"))
    again = run(shared_tmp_path, group, resume=is_there, max_steps=4, **SHARDED_IN_BACKGROUND)
    assert again.state.global_step == 4
    check_checkpoint(shared_tmp_path / "checkpoint-4")


@pytest.mark.core
def test_resume_skips_a_damaged_checkpoint(group, shared_tmp_path):
    run(shared_tmp_path, group, max_steps=6)
    group.barrier()
    if group.is_main:
        damaged = shared_tmp_path / "checkpoint-6" / "state.safetensors"
        damaged.write_bytes(damaged.read_bytes()[:-1])
        (shared_tmp_path / "checkpoint-4" / "model.safetensors").unlink()
    group.barrier()
    if group.is_main:
        with pytest.warns(RuntimeWarning) as caught:
            resumed = run(shared_tmp_path, group, max_steps=2, resume=True)
        text = "\n".join(str(warning.message) for warning in caught)
        assert "checkpoint-6 is damaged: state.safetensors has" in text
        assert "checkpoint-4 is damaged: model.safetensors is missing; it is skipped, and checkpoint-2 is used" in text
    else:
        resumed = run(shared_tmp_path, group, max_steps=2, resume=True)
    assert resumed.state.global_step == 2

    with pytest.raises(CheckpointError, match="checkpoint-6 is damaged: state.safetensors has"):
        run(shared_tmp_path, group, resume=str(shared_tmp_path / "checkpoint-6"))
    with pytest.raises(CheckpointError, match="no complete checkpoint in"):
        run(shared_tmp_path / "none", group, resume=True)


def test_a_new_run_in_a_folder_with_checkpoints_gives_a_warning(group, shared_tmp_path):
    run(shared_tmp_path, group, max_steps=2)
    group.barrier()
    if group.is_main:
        with pytest.warns(RuntimeWarning, match="holds checkpoint-2 of an earlier run, and this one begins"):
            run(shared_tmp_path, group, max_steps=2)
    else:
        run(shared_tmp_path, group, max_steps=2)


@pytest.mark.parametrize("rows", ["indexed", "pipeline", "batched pipeline"])
def test_global_batch_size_is_the_same_on_any_number_of_ranks(group, shared_tmp_path, rows):
    """This includes pipelines: unbatched ones are batched, and batched ones keep their batches."""
    samples = Rows(NUM_SAMPLES)

    def data():
        if rows == "indexed":
            return samples
        columns = {name: np.stack([samples[i][name] for i in range(NUM_SAMPLES)]) for name in samples[0]}
        columns["labels"] = columns.pop("label")
        pipeline = NumpySlicesDataset(columns, shuffle=False)
        return pipeline.batch(4) if rows == "batched pipeline" else pipeline

    common = {"dropout": 0.0, "optim": "sgd", "dataset_shuffle": False, "global_batch_size": 12}
    together = run(shared_tmp_path / "together", group, data(), per_device_train_batch_size=5, **common)
    with alone() as single:
        whole = run(shared_tmp_path / f"alone_{group.rank}", single, data(), per_device_train_batch_size=7, **common)
    assert together.training_loop.loader.global_batch_size == 12
    assert together.state.max_steps == whole.state.max_steps == 3 * math.ceil(NUM_SAMPLES / 12)
    for name, weight in weights(whole.model).items():
        np.testing.assert_allclose(weights(together.model)[name], weight, rtol=0, atol=2e-6, err_msg=name)
    if rows == "batched pipeline":
        with pytest.raises(ValueError, match="10 samples is not a multiple of this pipeline's batches of 4"):
            run(shared_tmp_path / "wrong", group, data(), **{**common, "global_batch_size": 10})
