"""Test Muon on several ranks: owners, state per rank, gradients that are not finite, adapters, and the Trainer."""

from __future__ import annotations

import mindspore
import numpy as np
import pytest
from library import nn, optim

import mindnlp_dp as dp
from mindnlp_dp.data_parallel.synchronizer_base import MicroStep
from mindnlp_dp.optim import Muon, muon_groups
from mindnlp_dp.optim.updater_factory import make_updater
from mindnlp_dp.training.metrics import LossMeter
from mindnlp_dp.training.train_step import TrainStep
from models import alone, tiny_roberta, train

MANY = [(48, 40), (40, 96), (130,), (33, 33), (70, 20), (20, 70)]


PACKED = {"num_packed": 3, "adjust_lr_fn": "match_rms_adamw"}


class MuonWithoutRule(Muon):
    """Runs its own code on full parameters, as Muon does on devices."""


class Job:
    """Runs updates with known gradients, each on one rank only, so that all numbers of ranks have the same means."""

    def __init__(self, group, shapes, zero_stage, kind=Muon, **options):
        rng = np.random.default_rng(0)
        self.group, self.shapes, self.done = group, shapes, 0
        self.parameters = [nn.Parameter(mindspore.Tensor(rng.standard_normal(s).astype(np.float32))) for s in shapes]
        self.optimizer = kind(
            [
                {"params": [p for p in self.parameters if p.ndim == 2]},
                {"params": [p for p in self.parameters if p.ndim != 2], "use_muon": False},
                # A group may be empty.
                {"params": [], "lr": 1.0},
            ],
            lr=1e-2,
            **options,
        )
        self.scheduler = optim.lr_scheduler.LambdaLR(
            self.optimizer, [lambda step: 1 / (1 + step), lambda step: 0.5**step, lambda step: 1.0]
        )
        sync = dp.GradientSynchronizer(self.parameters, group, bucket_cap_mb=0.01, overlap=False)
        self.updater = make_updater(self.optimizer, sync, zero_stage, self.scheduler)
        self.step = TrainStep(sync, self.updater, LossMeter(group), max_grad_norm=1.0)

    def run(self, num_updates, value=None):
        for _ in range(num_updates):
            micro = []
            if self.done % self.group.world_size == self.group.rank:
                rng = np.random.default_rng((7, self.done))
                found = [rng.standard_normal(s) if value is None else np.full(s, value) for s in self.shapes]
                micro = [MicroStep(1.0, [mindspore.Tensor(x.astype(np.float32)) for x in found], 1.0)]
            self.step(micro, self.done, lambda micro_steps, step: micro_steps)
            self.done += 1
        return [p.asnumpy().copy() for p in self.parameters]


def same(first, second):
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.core
@pytest.mark.parametrize("zero_stage", [0, 1, 2])
@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        pytest.param(MANY, {}, id="many"),
        pytest.param([(64, 40)], {}, id="one-matrix"),
        pytest.param([(5,)], {}, id="no-matrix"),
        pytest.param([(9, 4), (4, 9)], {"weight_decay": 0.0, "num_packed": 1}, id="without-decay"),
        pytest.param([(12, 5), (6, 9), (8,), (3, 3)], {**PACKED, "kind": MuonWithoutRule}, id="without-rule"),
        pytest.param([(12, 5), (6, 9), (8,), (3, 3)], PACKED, id="packed"),
    ],
)
def test_muon_on_n_ranks_equals_one_rank_to_the_bit(group, shapes, options, zero_stage):
    with alone() as single:
        expected = Job(single, shapes, 0, **options).run(6)
    same(Job(group, shapes, zero_stage, **options).run(6), expected)


def test_muon_state_is_sharded_among_ranks(group):
    # Slices consist of blocks, of which each of these has many.
    shapes = [(480, 400), (400, 960), (1300,), (330, 330), (700, 200)]
    job = Job(group, shapes, 2)
    job.run(1)
    shards = job.updater._state
    mine = sum(
        len(part) for i, names in enumerate(shards.names) for name in names for _, part in shards._parts(i, name)
    )
    numels = [int(np.prod(shape)) for shape in shapes]
    whole = sum(numel * (1 if len(shape) == 2 else 2) for numel, shape in zip(numels, shapes))
    assert group.all_reduce(np.array([mine]))[0] == whole
    assert mine <= whole / group.world_size + max(numels)


def test_nan_gradients_change_neither_weights_nor_muon_state(group):
    job = Job(group, MANY, 2)
    before = job.run(2)

    def state():
        entries = job.updater.optimizer_state()["state"]
        return [entries[n][name].asnumpy().copy() for n in entries for name in sorted(entries[n]) if name != "step"]

    moments = state()
    with pytest.warns(RuntimeWarning):
        same(job.run(1, value=np.nan), before)
    same(state(), moments)
    assert any((a != b).any() for a, b in zip(job.run(1), before))


@pytest.mark.parametrize(("first", "second"), [(0, 2), (2, 0), (1, 2)])
def test_muon_state_resumes_at_another_zero_stage_and_world_size(group, first, second):
    with alone() as single:
        expected = Job(single, MANY, 0).run(7)
        halfway = Job(single, MANY, 0)
        halfway.run(3)
    before = Job(group, MANY, first)
    before.run(3)
    after = Job(group, MANY, second)
    for saved in (before, halfway):
        state = saved.updater.optimizer_state()
        for mine, theirs in zip(after.parameters, saved.parameters):
            mine.assign_value(mindspore.Tensor(theirs.asnumpy().copy()))
        after.updater.load_optimizer_state(state)
        after.scheduler.load_state_dict(saved.scheduler.state_dict())
        after.done = 3
        same(after.run(4), expected)


def test_a_matrix_added_later_gets_muon_momentum_that_is_saved(group):
    with alone() as single:
        jobs = [Job(single, MANY, 0), Job(group, MANY, 2)]
        late = [job.optimizer.param_groups[0]["params"].pop(0) for job in jobs]
        jobs[0].run(2)
        jobs[0].optimizer.param_groups[0]["params"].append(late[0])
        expected = jobs[0].run(2)
    jobs[1].run(2)
    jobs[1].optimizer.param_groups[0]["params"].append(late[1])
    same(jobs[1].run(2), expected)
    number = len(jobs[1].optimizer.param_groups[0]["params"]) - 1
    assert set(jobs[1].updater.optimizer_state()["state"][number]) == {"momentum_buffer", "step"}


class Rows:
    def __init__(self, count):
        rng = np.random.default_rng(0)
        self.rows = rng.integers(5, 40, (count, 8))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "attention_mask": np.ones(8, np.int64), "labels": int(index % 3)}


@pytest.mark.parametrize("saving", [{"async_save": True}, {"sharded_checkpoints": True}], ids=["async", "sharded"])
def test_trainer_with_muon_resumes_with_the_same_digest(group, tmp_path_factory, saving):
    folder = group.broadcast_object(str(tmp_path_factory.mktemp("muon")))
    settings = {
        "optim": "muon", "optim_args": "momentum=0.9, nesterov=False, ns_coefficients=(3.0, -4.0, 2.0)",
        "learning_rate": 1e-3, "global_batch_size": 8,
        "per_device_train_batch_size": 8 // group.world_size, "num_train_epochs": 2, **saving,
        "save_strategy": "steps", "save_steps": 2,
    }  # fmt: skip
    trainer = train(tiny_roberta(), Rows(16), folder, **settings)
    assert type(trainer.optimizer) is Muon
    assert trainer.optimizer.param_groups[0]["momentum"] == 0.9
    assert not trainer.optimizer.param_groups[0]["nesterov"]
    assert trainer.optimizer.param_groups[0]["ns_coefficients"] == (3.0, -4.0, 2.0)
    again = tiny_roberta()
    resumed = train(again, Rows(16), folder, resume=f"{folder}/checkpoint-2", zero_stage=0, **settings)
    assert resumed.state.global_step == 4
    assert resumed.replica_digest == trainer.replica_digest


def test_muon_groups_exclude_frozen_weights(group):
    model = tiny_roberta()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "query" in name
    groups = muon_groups(model)
    assert [(each["use_muon"], len(each["params"])) for each in groups] == [(True, 1), (False, 1)]
