"""Test the sharded device update on real ranks; MCCL lacks two of its collectives, which are emulated with others."""

from __future__ import annotations

import math

import mindspore
import numpy as np
import pytest
from mccl_as_a_device import emulate_collectives
from mindnlp.core import nn, optim

import mindnlp_dp as dp
from mindnlp_dp.optim import LAMB
from mindnlp_dp.optim.updater import MindNLPUpdater
from mindnlp_dp.optim.updater_factory import make_updater
from mindnlp_dp.optim.zero.device_updater import DeviceUpdater
from mindnlp_dp.optim.zero.parameterwise import ParameterwiseZeroUpdater

# Among them: fewer elements than ranks, a scalar, no elements, and the size of two buckets.
SHAPES = [(30, 20), (1,), (50, 10), (), (0, 4), (3, 2), (64, 16)]
OPTIMIZERS = {
    "adamw": lambda ps: optim.AdamW(
        [{"params": ps[:2], "weight_decay": 0.0}, {"params": ps[2:], "lr": 3e-3}], lr=1e-2, weight_decay=0.1
    ),
    "adam": lambda ps: optim.Adam(ps, lr=1e-2, weight_decay=0.01),
    "sgd": lambda ps: optim.SGD(ps, lr=1e-2),
}


@pytest.fixture(autouse=True)
def calls(group, monkeypatch):
    """Emulate the two collectives and return how often each was called."""
    if group.backend != "mccl":
        pytest.skip("tensors that MindSpore's own library exchanges")
    return emulate_collectives(monkeypatch)


def make_parameters(dtype="float32"):
    rng = np.random.default_rng(0)
    values = [np.asarray(rng.standard_normal(shape), np.float32) for shape in SHAPES]
    tensors = [mindspore.Tensor(v) if v.size else mindspore.ops.zeros(v.shape) for v in values]
    return [nn.Parameter(tensor.astype(getattr(mindspore, dtype))) for tensor in tensors]


def gradients_of(step, rank, unused=()):
    rng = np.random.default_rng((step, rank))
    values = [np.asarray(rng.standard_normal(shape), np.float32) for shape in SHAPES]
    return [mindspore.Tensor(v) if v.size and i not in unused else None for i, v in enumerate(values)]


class Job:
    def __init__(self, group, optimizer="adamw", zero_stage=2, dtype="float32"):
        self.group, self.dtype = group, dtype
        self.parameters = make_parameters(dtype)
        self.optimizer = OPTIMIZERS[optimizer](self.parameters)
        self.sync = dp.GradientSynchronizer(self.parameters, group, overlap=False, bucket_cap_mb=2e-3)
        if zero_stage:
            self.updater = DeviceUpdater(self.optimizer, self.sync, zero_stage)
        else:
            self.updater = MindNLPUpdater(self.optimizer, self.sync.parameters)
        self.done = 0

    def run(self, num_updates, unused=(), max_norm=1.0):
        norms = []
        for _ in range(num_updates):
            gradients = gradients_of(self.done, self.group.rank, unused)
            wanted = getattr(mindspore, self.dtype)
            self.sync.accumulate([g if g is None else g.astype(wanted) for g in gradients], 1.0)
            averaged, norm = self.updater.clip(
                self.updater.receive(self.sync.reduce(in_place=self.updater.reads_buckets), self.sync), max_norm
            )
            norms.append(norm)
            self.updater.update(averaged)
            self.updater.finish()
            self.done += 1
        return norms

    def weights(self):
        return [p.astype(mindspore.float32).asnumpy() for p in self.parameters]

    def arrays(self):
        """Return the full optimizer state as arrays, by parameter number and name."""
        state = self.updater.optimizer_state()["state"]
        return {
            (int(number), name): value.asnumpy() if hasattr(value, "asnumpy") else value
            for number, of_one in state.items()
            for name, value in of_one.items()
        }


def assert_close(job, reference, tolerance=1e-6):
    for index, (mine, other) in enumerate(zip(job.weights(), reference.weights())):
        np.testing.assert_allclose(mine, other, rtol=tolerance, atol=tolerance, err_msg=f"parameter {index}")
    mine, other = job.arrays(), reference.arrays()
    # MindNLP creates state also for parameters without elements.
    other = {key: value for key, value in other.items() if np.size(value)}
    assert mine.keys() == other.keys()
    for key, value in mine.items():
        np.testing.assert_allclose(value, other[key], rtol=1e-4, atol=tolerance, err_msg=str(key))


@pytest.mark.core
@pytest.mark.parametrize("zero_stage", [1, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_zero_device_update_equals_the_unsharded_update(group, calls, optimizer, zero_stage):
    job, reference = Job(group, optimizer, zero_stage), Job(group, optimizer, 0)
    before = job.weights()
    np.testing.assert_allclose(job.run(20), reference.run(20), rtol=1e-6)
    assert_close(job, reference)
    assert any((a != b).any() for a, b in zip(before, job.weights()))
    num_buckets = len(job.sync.buckets)
    assert num_buckets > 2
    assert (calls["scatter"], calls["gather"]) == (20 * num_buckets * (zero_stage == 2), 20 * num_buckets)
    everyone = group.all_gather_object([weight.tobytes() for weight in job.weights()])
    assert everyone == [everyone[0]] * group.world_size


@pytest.fixture
def as_on_a_device(group, monkeypatch):
    monkeypatch.setattr(type(group), "on_device", True)


@pytest.mark.core
@pytest.mark.parametrize("max_norm", [0.5, 1e9])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_zero_stages_agree_on_a_device(group, as_on_a_device, optimizer, max_norm):
    """Check that stages 0 and 1 clip by the same norm, to the bit, and that the weights of all stages agree.

    Weights agree to rounding: a kernel may round the elements at the end of a slice in another way.
    """
    jobs = {zero_stage: Job(group, optimizer, zero_stage) for zero_stage in (0, 1, 2)}
    norms = {zero_stage: job.run(10, max_norm=max_norm) for zero_stage, job in jobs.items()}
    assert norms[0] == norms[1]
    # Those of stage 2 are summed in slices.
    np.testing.assert_allclose(norms[2], norms[0], rtol=1e-6)
    assert (min(norms[0]) > max_norm) is (max_norm == 0.5)
    assert group.all_gather_object(norms) == [norms] * group.world_size
    for zero_stage in (1, 2):
        assert_close(jobs[zero_stage], jobs[0])


def train_with_a_bad_loss(group, overlap):
    """Do six updates of two micro-batches per rank; the loss of one is NaN on the last rank."""
    weight = nn.Parameter(mindspore.Tensor(np.linspace(0.5, 1.5, 12, dtype=np.float32)))
    step = dp.make_train_step(
        lambda x: ((weight * x) ** 2).mean(), optim.SGD([weight], lr=0.1), [weight], accumulation_steps=2,
        max_grad_norm=0.5, zero_stage=0, overlap=overlap, loss_weight_of=len, group=group,
    )  # fmt: skip
    losses, norms = [], []
    for update in range(6):
        rng = np.random.default_rng((update, group.rank))
        micro_batches = [rng.standard_normal((rows, 12)).astype(np.float32) for rows in (2, 3 + group.rank)]
        if update == 3 and group.rank == group.world_size - 1:
            micro_batches[update % 2][0, 0] = np.nan
        losses.append(step([mindspore.Tensor(x) for x in micro_batches]))
        norms.append(step.grad_norm)
    return weight.asnumpy().copy(), losses, norms, step.mean_loss()


@pytest.mark.filterwarnings("ignore:the loss of:RuntimeWarning")
@pytest.mark.parametrize("overlap", [True, False])
def test_nan_losses_are_left_out_on_a_device_as_on_a_cpu(group, monkeypatch, overlap):
    expected = train_with_a_bad_loss(group, overlap=False)
    monkeypatch.setattr(type(group), "on_device", True)
    for mine, other in zip(train_with_a_bad_loss(group, overlap), expected):
        np.testing.assert_allclose(mine, other, rtol=1e-5)


def test_zero_shards_the_optimizer_state_among_ranks(group):
    job = Job(group)
    job.run(1)
    mine = sum(state["exp_avg"].size for state in job.updater._state.values())
    total = sum(map(math.prod, SHAPES))
    assert sum(group.all_gather_object(mine)) == total
    assert mine < 0.75 * total or group.world_size == 1
    assert not job.optimizer.state
    assert all(p.grad is None for p in job.parameters)


def test_zero_does_not_change_unused_parameters(group):
    job, reference = Job(group), Job(group, zero_stage=0)
    first = job.weights()
    for one in (job, reference):
        one.run(3, unused=(0, 3))
    np.testing.assert_array_equal(job.weights()[0], first[0])
    for one in (job, reference):
        one.run(3)
    assert_close(job, reference)


def assign_a_weight(job):
    mindspore.ops.assign(job.parameters[2], mindspore.ops.ones_like(job.parameters[2]))


def repack_the_buckets(job):
    job.sync.pack_in_order(range(len(SHAPES)))


@pytest.mark.parametrize("change", [assign_a_weight, repack_the_buckets])
def test_zero_update_follows_changed_weights_and_repacked_buckets(group, change):
    job, reference = Job(group), Job(group, zero_stage=0)
    for one in (job, reference):
        one.run(2)
        change(one)
        one.run(2)
    assert_close(job, reference)


@pytest.mark.parametrize("stages", [(2, 0), (0, 2), (2, 1)])
def test_optimizer_state_resumes_at_another_zero_stage(group, stages):
    before, after = (Job(group, zero_stage=stage) for stage in stages)
    before.run(3)
    saved = before.updater.optimizer_state()
    after.updater.load_optimizer_state(saved)
    for parameter, weight in zip(after.parameters, before.weights()):
        if weight.size:
            mindspore.ops.assign(parameter, mindspore.Tensor(weight))
    after.done = 3
    for one in (before, after):
        one.run(3)
    assert_close(after, before)


def test_zero_uses_state_loaded_by_optimizer_load_state_dict(group):
    before, after = Job(group, zero_stage=0), Job(group)
    before.run(2)
    after.run(1)
    after.optimizer.load_state_dict(before.optimizer.state_dict())
    np.testing.assert_array_equal(after.arrays()[0, "exp_avg"], before.arrays()[0, "exp_avg"])
    assert after.arrays()[0, "step"] == 2


def test_zero_detects_a_nan_gradient_of_one_rank(group):
    job = Job(group)
    for is_finite in (True, False):
        gradients = gradients_of(0, group.rank)
        if not is_finite and group.rank == group.world_size - 1:
            gradients[6] = gradients[6] * float("nan")
        job.sync.accumulate(gradients, 1.0)
        averaged = job.updater.receive(job.sync.reduce(in_place=job.updater.reads_buckets), job.sync)
        assert job.updater.are_finite(averaged) == is_finite


def test_zero_receives_no_gradients_when_no_rank_had_samples(group):
    job = Job(group)
    job.sync.skip()
    assert job.updater.receive(job.sync.reduce(in_place=job.updater.reads_buckets), job.sync) is None


def test_zero_updates_lamb_parameterwise_on_a_device(group, monkeypatch):
    monkeypatch.setattr(type(group), "on_device", True)
    parameters = make_parameters()
    for optimizer, kind in (
        (optim.AdamW(parameters), DeviceUpdater),
        (LAMB(parameters), ParameterwiseZeroUpdater),
    ):
        sync = dp.GradientSynchronizer(parameters, group, overlap=False)
        assert type(make_updater(optimizer, sync, 2)) is kind
