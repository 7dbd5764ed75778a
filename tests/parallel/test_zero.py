"""Test the sharded update: every number of ranks and every zero_stage gives the same weights, to the bit."""

from __future__ import annotations

import math
import warnings
import weakref

import mindspore
import numpy as np
import pytest
from library import is_0_5, nn, optim

import mindnlp_dp as dp
from mindnlp_dp.checkpoint.state_tree import PackedState, pack_state, unpack_state
from mindnlp_dp.communication.gradient_channel import open_gradient_channel
from mindnlp_dp.communication.lazy_arrays import materialize
from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.communication.replicas import ReplicaMismatchError
from mindnlp_dp.communication.transports.single import SingleProcessTransport
from mindnlp_dp.data_parallel import synchronizer
from mindnlp_dp.data_parallel.buckets import bucket_factory
from mindnlp_dp.data_parallel.multi_group_synchronizer import MultiGroupSynchronizer
from mindnlp_dp.data_parallel.overlap import OverlapState
from mindnlp_dp.data_parallel.synchronizer_base import MicroStep
from mindnlp_dp.optim import LAMB, LARS, Muon
from mindnlp_dp.optim.updater import MindNLPUpdater
from mindnlp_dp.optim.updater_factory import make_updater
from mindnlp_dp.training.metrics import LossMeter
from mindnlp_dp.training.train_step import TrainStep

# Among them: a scalar, fewer elements than ranks, no elements, and several blocks.
SHAPES = [(300, 77), (), (5,), (1,), (20_011,), (64, 129), (0, 3), (3,)]


class OwnOptimizer(optim.Optimizer):
    """A user's optimizer that divides gradients by their mean magnitude and needs one for every parameter."""

    def step(self, grads=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["size"] = mindspore.ops.zeros_like(parameter)
                mindspore.ops.assign(state["size"], 0.9 * state["size"] + 0.1 * parameter.grad.abs())
                moved = parameter - group["lr"] * parameter.grad / (state["size"] + 1e-6)
                # Careless optimizers do this: the parameter gets other memory.
                parameter.assign_value(moved)


OPTIMIZERS = {
    "adamw": lambda p: optim.AdamW([{"params": p[::2], "weight_decay": 0.1}, {"params": p[1::2]}], lr=1e-3),
    "adam": lambda p: optim.Adam(p, lr=1e-3, weight_decay=0.01),
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3, nesterov=True),
    "lamb": lambda p: LAMB(p, lr=1e-2),
    "lars": lambda p: LARS(
        [{"params": p[::2]}, {"params": p[1::2], "use_trust_ratio": False, "lr": 0.1}], lr=1.0, weight_decay=1e-4
    ),
    "muon": lambda p: Muon(
        [
            {"params": p[:1], "weight_decay": 0.0},
            {"params": p[5:6], "num_packed": 3, "packed_axis": 1, "lr": 0.02},
            {"params": [*p[1:5], *p[6:]], "use_muon": False},
        ],
        lr=1e-2,
        adjust_lr_fn="match_rms_adamw",
    ),
    # We have no rule for this optimizer, so its own code runs on full parameters.
    "own": lambda p: OwnOptimizer(p, {"lr": 1e-3}),
}
DIVIDED = [name for name in OPTIMIZERS if name != "own"]


@pytest.fixture(scope="module")
def alone():
    """Return a group of this process only."""
    return ProcessGroup(SingleProcessTransport())


def make_parameters(seed=0):
    rng = np.random.default_rng(seed)
    made = []
    for shape in SHAPES:
        value = rng.standard_normal(shape).astype(np.float32)
        made.append(nn.Parameter(mindspore.Tensor(value) if math.prod(shape) else mindspore.ops.zeros(shape)))
    return made


def gradients_of(step, unused=()):
    rng = np.random.default_rng((7, step))
    found = []
    for index, shape in enumerate(SHAPES):
        value = rng.standard_normal(shape).astype(np.float32) * (100.0 if step % 3 else 0.01)
        is_there = math.prod(shape) and index not in unused
        found.append(mindspore.Tensor(np.asarray(value, np.float32)) if is_there else None)
    return found


def as_computed(micro_steps, step):
    """Stand for forward and backward passes: the micro-batches are their results."""
    return micro_steps


class Job:
    """Runs updates with known gradients, equal for any number of ranks: in each update only one rank has a gradient."""

    def __init__(self, optimizer, group, zero_stage, *, max_grad_norm=1.0, **options):
        self.group = group
        self.parameters = make_parameters()
        self.optimizer = OPTIMIZERS[optimizer](self.parameters)
        options = {"bucket_cap_mb": 0.02, "overlap": False, **options}
        self.sync = dp.GradientSynchronizer(self.parameters, group, **options)
        self.updater = make_updater(self.optimizer, self.sync, zero_stage)
        self.step = TrainStep(self.sync, self.updater, LossMeter(group), max_grad_norm=max_grad_norm)
        self.done = 0

    def run(self, num_updates, unused=()):
        norms = []
        for _ in range(num_updates):
            is_mine = self.done % self.group.world_size == self.group.rank
            micro = [MicroStep(1.0, gradients_of(self.done, unused), 1.0)] if is_mine else []
            norms.append(self.step(micro, self.done, as_computed))
            self.done += 1
        return norms

    def weights(self):
        return [p.asnumpy().copy() for p in self.parameters]


def assert_each_same(first, second):
    for mine, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(mine, other)


def assert_same(first, second):
    for index, (mine, other) in enumerate(zip(first, second, strict=True)):
        np.testing.assert_array_equal(mine, other, err_msg=f"parameter {index}, {SHAPES[index]}")


@pytest.mark.parametrize(
    "optimizer",
    [pytest.param(name, marks=[pytest.mark.core] * (name in ("adamw", "own"))) for name in OPTIMIZERS],
)
@pytest.mark.parametrize("zero_stage", [0, 1, 2, "auto"])
def test_every_zero_stage_gives_the_weights_of_one_rank_to_the_bit(group, alone, optimizer, zero_stage):
    reference = Job(optimizer, alone, 0)
    expected = reference.run(50)
    job = Job(optimizer, group, zero_stage)
    before = job.weights()
    norms = job.run(50)
    if optimizer in DIVIDED:
        assert norms == expected
    assert_same(job.weights(), reference.weights())
    assert any((a != b).any() for a, b in zip(before, job.weights()))


@pytest.mark.parametrize(
    "optimizer", [pytest.param("adamw", marks=pytest.mark.core), pytest.param("adam", marks=pytest.mark.slow), "sgd"]
)
@pytest.mark.parametrize("zero_stage", [0, 2])
def test_zero_matches_the_optimizers_of_mindnlp(group, optimizer, zero_stage):
    job = Job(optimizer, group, zero_stage)
    job.run(100)
    parameters = make_parameters()
    stock = OPTIMIZERS[optimizer](parameters)
    for step in range(100):
        for parameter, gradient in zip(parameters, gradients_of(step)):
            parameter.grad = mindspore.ops.zeros_like(parameter) if gradient is None else gradient
        nn.utils.clip_grad_norm_([p for p in parameters if p.size], 1.0)
        for kept in stock.param_groups:
            kept["params"] = [p for p in kept["params"] if p.size]
        stock.step()
    for mine, parameter in zip(job.weights(), parameters):
        theirs = parameter.asnumpy()
        if theirs.size:
            scale = np.abs(theirs).max()
            # MindNLP 0.5 computes the same in another order.
            assert np.abs(mine - theirs).max() <= (3e-6 if is_0_5 else 1e-6) * scale
    # The saved state has the same values under the same names.
    index_of = {id(parameter): index for index, parameter in enumerate(job.parameters)}
    ordered = [index_of[id(parameter)] for kept in job.optimizer.param_groups for parameter in kept["params"]]
    for number, entry in job.updater.optimizer_state()["state"].items():
        theirs = stock.state[parameters[ordered[int(number)]]]
        for name in entry.keys() & {"exp_avg", "exp_avg_sq"}:
            np.testing.assert_allclose(
                entry[name].asnumpy(), theirs[name].asnumpy(), rtol=1e-3, atol=1e-6, err_msg=name
            )


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("zero_stage", [0, 2])
def test_zero_matches_one_rank_with_parameters_unused_in_some_updates(group, alone, optimizer, zero_stage):
    """They keep their moments and step count, as in PyTorch; old bucket contents of another update are not used."""
    jobs = [Job(optimizer, alone, 0), Job(optimizer, group, zero_stage)]
    for job in jobs:
        job.run(3)
        job.run(2, unused=(0, 3))
        job.run(3, unused=(4, 5))
        job.run(3)
    assert_same(jobs[1].weights(), jobs[0].weights())


def test_the_bucket_size_does_not_change_a_bit_of_the_weights(group, alone, monkeypatch):
    """A kernel may round its last few elements, which do not fill a vector, differently."""
    monkeypatch.setattr(f"{__name__}.SHAPES", [(5 + index % 11,) for index in range(150)])
    jobs = [Job("adamw", alone, 0, bucket_cap_mb=0.5), Job("adamw", group, "auto", bucket_cap_mb=1e-6)]
    for job in jobs:
        job.run(10)
    assert len(jobs[0].sync.buckets) < len(jobs[1].sync.buckets) == 150
    assert_same(jobs[1].weights(), jobs[0].weights())


@pytest.mark.parametrize("zero_stage", [0, 2])
def test_an_optimizer_state_loaded_between_updates_is_used(group, alone, zero_stage):
    saved = Job("adamw", alone, 0)
    saved.run(2)
    state = pack_state(saved.updater.optimizer_state())
    state.arrays = {name: array.copy() for name, array in state.arrays.items()}
    jobs = [Job("adamw", alone, 0), Job("adamw", group, zero_stage), Job("adamw", alone, 0)]
    for number, job in enumerate(jobs):
        job.run(3)
        if number < 2:
            job.optimizer.load_state_dict(unpack_state(state))
        job.run(2)
    assert_same(jobs[1].weights(), jobs[0].weights())
    assert any((a != b).any() for a, b in zip(jobs[2].weights(), jobs[0].weights()))


def test_zero_matches_one_rank_without_clipping(group, alone):
    jobs = [Job("adamw", alone, 0, max_grad_norm=None), Job("adamw", group, "auto", max_grad_norm=None)]
    for job in jobs:
        assert job.run(5) == [None] * 5
    assert_same(jobs[1].weights(), jobs[0].weights())


@pytest.mark.core
@pytest.mark.parametrize("zero_stage", [0, 1, 2])
@pytest.mark.parametrize("max_grad_norm", [1.0, None])
def test_an_infinite_gradient_skips_the_update(group, zero_stage, max_grad_norm):
    job = Job("adamw", group, zero_stage, max_grad_norm=max_grad_norm)
    job.run(2)
    before, count = job.weights(), list(job.updater._state.steps)
    bad = gradients_of(0)
    bad[4] = mindspore.Tensor(np.full((20_011,), np.inf, np.float32))
    with pytest.warns(RuntimeWarning):
        job.step([MicroStep(1.0, bad, 1.0)] if group.is_main else [], 2, as_computed)
    assert_same(job.weights(), before)
    assert job.updater._state.steps == count
    job.run(1)
    assert any((a != b).any() for a, b in zip(before, job.weights()))


@pytest.mark.parametrize("zero_stage", [0, 2])
def test_a_gradient_with_an_infinite_norm_skips_the_update_only_with_clipping(group, zero_stage):
    """The gradient is finite and can be used without clipping, but it cannot be clipped."""
    large = [None] * len(SHAPES)
    large[4] = mindspore.Tensor(np.full((20_011,), 1e30, np.float32))
    micro = [MicroStep(1.0, large, 1.0)] if group.is_main else []
    job = Job("sgd", group, zero_stage, max_grad_norm=None)
    job.step(micro, 0, as_computed)
    np.testing.assert_allclose(job.parameters[4].asnumpy(), -1e29, rtol=1e-6)
    job = Job("sgd", group, zero_stage)
    with pytest.warns(RuntimeWarning, match="the norm of the averaged gradient is inf at step 0"):
        job.step(micro, 0, as_computed)
    assert_same(job.weights(), [p.asnumpy() for p in make_parameters()])


@pytest.fixture
def two_hosts(group, monkeypatch):
    """Make four ranks act as two hosts of two ranks: each host has its own shared memory, with a network between."""
    if group.backend != "mpi" or group.world_size != 4:
        pytest.skip("two hosts of two ranks, and MPI")
    from mpi4py import MPI

    from mindnlp_dp.communication.transports.mpi.host_memory import HostMemory
    from mindnlp_dp.communication.transports.mpi.mpi_transport import MPIChannel
    from mindnlp_dp.data_parallel import synchronizer_base

    comm = MPI.COMM_WORLD
    host, peers = comm.Split(comm.rank // 2, comm.rank), comm.Split(comm.rank % 2, comm.rank)

    def open_channel(of_group):
        if of_group is not group:
            return open_gradient_channel(of_group)
        return MPIChannel(MPI, (comm, host, peers), HostMemory(comm, host, is_available=True), "")

    monkeypatch.setattr(synchronizer_base, "open_gradient_channel", open_channel)
    yield
    for split in (host, peers):
        split.Free()


@pytest.mark.parametrize("optimizer", DIVIDED)
@pytest.mark.parametrize("zero_stage", [0, 1, 2, "auto"])
def test_zero_on_two_hosts_gives_the_weights_of_one_rank(two_hosts, group, alone, optimizer, zero_stage):
    reference, job = Job(optimizer, alone, 0), Job(optimizer, group, zero_stage)
    assert reference.run(12) == job.run(12)
    assert_same(job.weights(), reference.weights())
    assert job.updater.partition.shares_memory == (zero_stage != 0)
    # A job of one rank can resume from the state that the hosts hold in shards.
    saved = materialize(job.updater.optimizer_state())
    assert saved["state"].keys() == reference.updater.optimizer_state()["state"].keys()


@pytest.fixture
def no_memory_for_weights(monkeypatch):
    """Refuse shared memory for weights, as if gradients had used all of it."""
    from mindnlp_dp.communication.transports.mpi.host_memory import HostMemory

    refused = []

    def flat(self, num_bytes):
        refused.append((self, self.is_available))
        self.is_available = False

    monkeypatch.setattr(HostMemory, "flat", flat)
    yield
    for memory, was_available in reversed(refused):
        memory.is_available = was_available


@pytest.mark.parametrize("zero_stage", [1, 2, "auto"])
def test_zero_matches_one_rank_without_shared_memory_for_weights(no_memory_for_weights, group, alone, zero_stage):
    reference, job = Job("adamw", alone, 0), Job("adamw", group, zero_stage)
    assert reference.run(6) == job.run(6)
    assert_same(job.weights(), reference.weights())
    assert not job.updater.partition.shares_memory
    job.sync.pack_in_order(range(len(SHAPES)))
    assert reference.run(3) == job.run(3)
    assert_same(job.weights(), reference.weights())


@pytest.mark.parametrize("zero_stage", [1, 2, "auto"])
def test_zero_matches_one_rank_without_shared_memory_on_two_hosts(
    no_memory_for_weights, two_hosts, group, alone, zero_stage
):
    test_zero_matches_one_rank_without_shared_memory_for_weights(None, group, alone, zero_stage)


def test_zero_sends_the_expected_bytes_between_hosts(two_hosts, group):
    """Stage 2 sends half an exchange of nonzero gradients, and the new weights; stage 1 also the other half."""
    sent = {}
    for zero_stage in (0, 1, 2):
        job = Job("sgd", group, zero_stage)
        job.run(1)
        before = job.sync.channel.bytes_sent
        job.run(1)
        sent[zero_stage] = group.all_reduce(np.array([job.sync.channel.bytes_sent - before], np.float64))[0]
    # Each host sends half of its sums, and half of the averages (stage 0) or half of the weights (stage 2).
    numel = sum(bucket.layout.numel for bucket in job.sync.buckets)
    assert sent[0] == pytest.approx(2 * 4 * numel, rel=0.05)
    assert sent[1] == pytest.approx(3 * 4 * numel, rel=0.05)
    assert sent[2] == pytest.approx(2 * 4 * numel, rel=0.05)


# Memory of the weights.


def test_zero_shares_the_memory_of_weights_on_a_host(group):
    job = Job("adamw", group, 2)
    job.run(1)
    before = job.weights()
    group.barrier()
    if group.is_main:
        job.parameters[4].asnumpy()[0] = 77.0
    group.barrier()
    is_shared = group.backend == "mpi" and group.world_size > 1
    assert job.updater.partition.shares_memory == is_shared
    assert (job.parameters[4].asnumpy()[0] == 77.0) == (is_shared or group.is_main)
    group.barrier()
    job.parameters[4].asnumpy()[0] = before[4][0]
    group.barrier()
    assert not job.updater.partition.weights.moved()


@pytest.mark.parametrize("zero_stage", [0, 2])
def test_zero_keeps_values_assigned_to_parameters_between_updates(group, alone, zero_stage):
    jobs = [Job("adamw", alone, 0), Job("adamw", group, zero_stage)]
    for job in jobs:
        job.run(3)
        job.parameters[0].assign_value(mindspore.Tensor(np.full((300, 77), 0.5, np.float32)))
        job.parameters[1].assign_value(mindspore.Tensor(np.float32(2.0)))
        assert job.updater.partition.weights.moved() == [0, 1]
        job.run(1)
        assert job.updater.partition.weights.moved() == []
        job.run(2)
    assert_same(jobs[1].weights(), jobs[0].weights())


def test_a_parameter_assigned_on_one_rank_only_is_refused(group):
    if group.world_size == 1:
        pytest.skip("one rank agrees with itself")
    job = Job("adamw", group, "auto")
    job.run(1)
    if group.rank == 1:
        job.parameters[4].assign_value(mindspore.ops.zeros((20_011,)))
    with pytest.raises(ReplicaMismatchError, match="'4' was assigned to between two updates, and ranks 0 and 1 do not"):
        job.run(1)


def test_a_parameter_assigned_another_shape_is_refused_by_the_update(group):
    job = Job("adamw", group, "auto")
    job.run(1)
    job.parameters[2].assign_value(mindspore.ops.zeros((6,)))
    with pytest.raises(ReplicaMismatchError, match=r"'2' has shape \(6,\), and had \(5,\); make a new optimizer"):
        job.updater._num_moved = 1
        job.updater.update(np.ones(len(SHAPES), bool))


# The optimizer's state.


@pytest.mark.core
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("saved_with", "resumed_with"), [(0, 2), (2, 0), (1, 2), (2, 2)])
def test_a_saved_optimizer_state_resumes_with_any_zero_stage(group, alone, optimizer, saved_with, resumed_with):
    first = Job(optimizer, group, saved_with)
    first.run(4)
    saved = pack_state(first.updater.optimizer_state())
    saved.arrays = {name: array.copy() for name, array in saved.arrays.items()}
    weights = first.weights()
    first.run(4)

    for number, where in enumerate((group, alone)):
        second = Job(optimizer, where, resumed_with if number == 0 else 0)
        for parameter, weight in zip(second.parameters, weights):
            if weight.size:
                parameter.assign_value(mindspore.Tensor(weight))
        again = PackedState(saved.outline, {name: array.copy() for name, array in saved.arrays.items()})
        second.updater.load_optimizer_state(unpack_state(again))
        second.done = 4
        second.run(4)
        assert_same(second.weights(), first.weights())


def test_the_sharded_optimizer_state_is_loaded_by_mindnlps_optimizer(group):
    job = Job("adamw", group, 2)
    job.run(3)
    state = job.updater.optimizer_state()
    stock = OPTIMIZERS["adamw"](make_parameters())
    stock.load_state_dict(state)
    again = stock.state_dict()
    assert again["state"].keys() == state["state"].keys()
    for number, entry in state["state"].items():
        assert entry["step"] == 3
        np.testing.assert_array_equal(again["state"][number]["exp_avg"].asnumpy(), entry["exp_avg"].asnumpy())
    assert all(not list(entry)[1:] for entry in job.updater.optimizer_state(keep=False)["state"].values())


@pytest.mark.core
def test_zero_shards_the_optimizer_state_over_ranks(group):
    whole, mine = Job("adamw", group, 0), Job("adamw", group, 2)
    numel = sum(map(math.prod, SHAPES))
    assert len(whole.updater._state.arrays["exp_avg"]) >= numel
    share = len(mine.updater._state.arrays["exp_avg"])
    total = float(np.asarray(group.all_reduce(np.array([share], np.float64)))[0])
    assert numel <= total <= numel + 64 * len(SHAPES)
    dealt = Job("own", group, 1)
    dealt.run(2)
    counts = group.all_gather_object(len(dealt.optimizer.state))
    assert sum(counts) == sum(1 for shape in SHAPES if math.prod(shape))


def test_an_optimizer_keeps_its_state_in_a_new_train_step(group, alone):
    jobs = [Job("adamw", alone, 0), Job("adamw", group, 2)]
    for job in jobs:
        job.run(3)
        job.sync = dp.GradientSynchronizer(job.parameters, job.group, overlap=False, bucket_cap_mb=0.1)
        stage = 0 if job.group is alone else 1
        job.updater = make_updater(job.optimizer, job.sync, stage)
        job.step = TrainStep(job.sync, job.updater, LossMeter(job.group), max_grad_norm=1.0)
        job.run(3)
    assert_same(jobs[1].weights(), jobs[0].weights())


def test_tuples_in_an_optimizer_state_are_saved(group, alone):
    jobs = [Job("own", alone, 0), Job("own", group, 2)]
    for job in jobs:
        job.run(1)
        for state in job.optimizer.state.values():
            state["range"] = (0.5, 2.0)
    saved, expected = (job.updater.optimizer_state()["state"] for job in jobs[::-1])
    assert saved.keys() == expected.keys()
    assert all(materialize(state)["range"] == (0.5, 2.0) for state in saved.values())


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("zero_stage", [0, 2])
def test_two_train_steps_share_the_state_of_one_optimizer(group, alone, optimizer, zero_stage):
    jobs = [Job(optimizer, alone, 0), Job(optimizer, group, zero_stage)]
    for job in jobs:
        job.run(2)
        first = job.step
        sync = dp.GradientSynchronizer(job.parameters, job.group, overlap=False, bucket_cap_mb=0.1)
        updater = make_updater(job.optimizer, sync, zero_stage if job is jobs[1] else 0)
        second = TrainStep(sync, updater, LossMeter(job.group), max_grad_norm=1.0)
        for step in (second, first, second):
            job.step = step
            job.run(2)
    assert_same(jobs[1].weights(), jobs[0].weights())
    assert jobs[0].optimizer.state[jobs[0].parameters[0]]["step"] == 8


@pytest.mark.parametrize("zero_stage", [0, 2])
def test_two_train_steps_of_one_optimizer_may_have_different_parameters(group, alone, zero_stage):
    """The two sets have the same shapes, so the state of one would fit the other."""

    def weights(group, zero_stage, *, share_optimizer):
        both = [make_parameters(0), make_parameters(1)]
        shared = optim.AdamW([{"params": parameters} for parameters in both], lr=1e-2)
        steps = []
        for parameters in both:
            sync = dp.GradientSynchronizer(parameters, group, overlap=False)
            optimizer = shared if share_optimizer else optim.AdamW(parameters, lr=1e-2)
            updater = make_updater(optimizer, sync, zero_stage)
            steps.append(TrainStep(sync, updater, LossMeter(group), max_grad_norm=1.0))
        for number in range(6):
            steps[number % 2](
                [MicroStep(1.0, gradients_of(number), 1.0)] if group.rank == 0 else [], number, as_computed
            )
        return [p.asnumpy() for p in (*both[0], *both[1])]

    apart = weights(alone, 0, share_optimizer=False) if group.rank == 0 else None
    together = weights(group, zero_stage, share_optimizer=True)
    assert_each_same(together, group.broadcast_object(apart))


def test_an_optimizer_state_without_some_parameters_is_loaded(group, alone):
    jobs = [Job("adamw", alone, 0), Job("adamw", group, 2)]
    for job in jobs:
        job.run(3)
        saved = job.updater.optimizer_state()
        del saved["state"][0]
        job.updater.load_optimizer_state(saved)
        job.run(3)
    assert_same(jobs[1].weights(), jobs[0].weights())
    assert [jobs[0].updater.optimizer_state()["state"][index]["step"] for index in (0, 1)] == [3, 6]


@pytest.mark.parametrize("zero_stage", [0, 2])
def test_bucket_memory_is_freed_before_buckets_are_repacked(group, monkeypatch, zero_stage):
    job = Job("adamw", group, zero_stage)
    job.run(2)
    memory = [weakref.ref(owner_of(array)) for bucket in job.sync.buckets for _, array in bucket.sums()]
    in_use = []

    def make_buckets(*given):
        in_use.append(sum(array() is not None for array in memory))
        return bucket_factory.make_buckets(*given)

    monkeypatch.setattr(synchronizer, "make_buckets", make_buckets)
    job.sync.pack_in_order(range(len(SHAPES)))
    assert in_use == [0]
    job.run(2)


def owner_of(array):
    """Return the array that owns the memory."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_repacked_buckets_do_not_change_a_bit_of_the_weights(group, alone, optimizer):
    jobs = [Job(optimizer, alone, 0), Job(optimizer, group, 2)]
    for number, job in enumerate(jobs):
        job.run(3)
        if number:
            job.sync.pack_in_order([3, 0, 5, 1, 2, 4, 6, 7])
        job.run(3)
    assert_same(jobs[1].weights(), jobs[0].weights())


def trained(group, **options):
    """Return the weights after six updates with a backward pass, and the final state of overlap."""
    parameters = [p for p in make_parameters() if p.size]
    step = dp.make_train_step(
        lambda x: sum(((p - x.mean()) ** 2).sum() for p in parameters) / 1000, optim.AdamW(parameters, lr=1e-2),
        parameters, max_grad_norm=1.0, group=group, bucket_cap_mb=0.02, **options,
    )  # fmt: skip
    rng = np.random.default_rng(group.rank)
    for _ in range(6):
        step(mindspore.Tensor(rng.standard_normal((3 + group.rank, 2), np.float32)))
    return [p.asnumpy() for p in parameters], step.synchronizer.overlap.state


@pytest.mark.skipif(is_0_5, reason="MindNLP 0.5 exchanges gradients after the backward pass")
@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_overlap_does_not_change_a_bit_with_any_zero_stage(group, zero_stage):
    expected, _ = trained(group, zero_stage=0, overlap=False)
    weights, state = trained(group, zero_stage=zero_stage, overlap=True)
    assert state is (OverlapState.ON if group.world_size > 1 else OverlapState.OFF)
    assert_each_same(weights, expected)


def own_step(job, optimizer):
    """Give the job a train step with another optimizer for the same parameters."""
    job.optimizer = optimizer
    job.updater = make_updater(optimizer, job.sync, 0)
    job.step = TrainStep(job.sync, job.updater, LossMeter(job.group), max_grad_norm=1.0)


def test_optimizers_without_shards_run_after_one_that_shared_weights(group, alone):
    jobs = [Job("adamw", alone, 0), Job("adamw", group, 2)]
    for job in jobs:
        job.run(2)
        # This optimizer writes in place into the memory of the weights.
        own_step(job, optim.AdamW(job.parameters, lr=1e-2, maximize=True))
        job.run(2)
        own_step(job, OwnOptimizer(job.parameters, {"lr": 1e-3}))
        job.run(2)
    assert_same(jobs[1].weights(), jobs[0].weights())


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_optimizer_state_moves_between_flat_arrays_and_the_stock_step(group, alone, optimizer):
    """The state moves to the optimizer's own code and back, with all of it on every rank."""
    jobs = [Job(optimizer, alone, 0), Job(optimizer, group, 0)]
    for job in jobs:
        job.run(2)
        job.updater = MindNLPUpdater(job.optimizer, job.sync.parameters)
        job.step = TrainStep(job.sync, job.updater, LossMeter(job.group), max_grad_norm=1.0)
        job.run(2)
        own_step(job, job.optimizer)
        job.run(2)
        assert job.updater.optimizer_state()["state"][0]["step"] == 6
    for mine, other in zip(jobs[1].weights(), jobs[0].weights()):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("zero_stage", [0, 2])
def test_parameters_that_swapped_memory_keep_their_values(group, zero_stage):
    """Assigning does not copy: one parameter is then in the other's memory."""
    one, other = (nn.Parameter(mindspore.Tensor(np.full((40, 3), value, np.float32))) for value in (1.0, 2.0))
    sync = dp.GradientSynchronizer([one, other], group, overlap=False)
    # With lr=0 the optimizer itself does not change the values.
    updater = make_updater(optim.AdamW([one, other], lr=0.0, weight_decay=0.0), sync, zero_stage)
    step = TrainStep(sync, updater, LossMeter(group), max_grad_norm=1.0)
    gradients = [mindspore.ops.ones_like(one), mindspore.ops.ones_like(other)]
    for number in range(5):
        first, second = (one, other) if number % 2 else (other, one)
        kept = first.copy()
        first.assign_value(second)
        second.assign_value(kept)
        group.barrier()
        step([MicroStep(1.0, gradients, 1.0)], number, as_computed)
        expected = (1.0, 2.0) if number % 2 else (2.0, 1.0)
        assert [np.unique(p.asnumpy()).tolist() for p in (one, other)] == [[value] for value in expected]


@pytest.mark.parametrize("zero_stage", [0, 2])
def test_a_loaded_state_without_moments_is_refused_if_sharded(group, zero_stage):
    job = Job("adamw", group, zero_stage)
    job.run(2)
    job.optimizer.load_state_dict({"state": {}, "param_groups": job.optimizer.state_dict()["param_groups"]})
    if zero_stage:
        with pytest.raises(ValueError, match="given a state without moments, which are sharded over the ranks"):
            job.run(1)
    else:
        job.run(1)
        assert job.updater.optimizer_state()["state"][0]["step"] == 1


def test_a_loaded_sgd_state_without_moments_is_accepted(group):
    job = Job("sgd", group, 2)
    job.run(1)
    job.optimizer.load_state_dict(job.optimizer.state_dict())
    before = job.weights()
    job.run(1)
    assert (job.weights()[0] != before[0]).any()


def test_a_parameter_resized_after_the_train_step_is_made_is_refused(group):
    """This is what resize_token_embeddings does, which keeps the parameter object."""
    job = Job("adamw", group, "auto")
    job.run(1)
    job.parameters[0].assign_value(mindspore.ops.zeros((310, 77)))
    with pytest.raises(ValueError, match=r"has shape \(310, 77\) now, and had \(300, 77\) .*; change a model before"):
        job.sync.accumulate([mindspore.Tensor(np.ones(p.shape, np.float32)) for p in job.parameters], 1.0)
    if is_0_5:
        # MindNLP 0.5 has no exchange during the backward pass that could begin.
        return
    with (
        pytest.raises(ValueError, match=r"has shape \(310, 77\) now, and had \(300, 77\)"),
        job.sync.backward(1.0),
    ):
        pass


def test_momentum_set_after_the_train_step_is_made_is_refused(group):
    job = Job("sgd", group, "auto")
    job.run(1)
    job.optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(ValueError, match="SGD was given momentum 0.9, and had none when its train step was made"):
        job.run(1)


# The choice of zero_stage.


def test_zero_stage_auto_is_2_with_shared_memory_and_0_without(group):
    job = Job("adamw", group, "auto")
    shares = group.backend == "mpi" and group.world_size > 1
    assert job.updater.zero_stage == (2 if shares else 0)


def test_zero_with_powersgd_and_invalid_zero_stages_are_refused(group):
    parameters = make_parameters()
    sync = dp.GradientSynchronizer(parameters, group, overlap=False, compression="powersgd")
    optimizer = optim.AdamW(parameters)
    with pytest.raises(ValueError, match="zero_stage=2 is not supported: PowerSGD gives full gradients to every rank"):
        make_updater(optimizer, sync, 2)
    assert type(make_updater(optimizer, sync, "auto")).__name__ == "MindNLPUpdater"
    for wrong in (4, -1, True, "on", None):
        with pytest.raises(ValueError, match="zero_stage must be 0 "):
            make_updater(optimizer, sync, wrong)


@pytest.mark.parametrize("what", ["zero_stage", "lr", "optimizer", "hook"])
def test_different_optimizer_settings_on_ranks_are_refused(group, what):
    if group.world_size == 1:
        pytest.skip("one rank agrees with itself")
    differs = group.rank == group.world_size - 1
    parameters = make_parameters()
    kind = optim.Adam if differs and what == "optimizer" else optim.AdamW
    optimizer = kind(parameters, lr=1e-3 if differs and what == "lr" else 1e-2, weight_decay=0.0)
    if differs and what == "hook":
        optimizer.step = lambda grads=None: None
    sync = dp.GradientSynchronizer(parameters, group, overlap=False)
    with pytest.raises(
        ValueError, match=rf"ranks must have the same optimizer settings: .* on rank {group.world_size - 1}; make"
    ):
        make_updater(optimizer, sync, 2 if differs and what == "zero_stage" else "auto")


class Coupled(optim.Optimizer):
    """A user's optimizer that divides all gradients by their global norm."""

    def step(self, grads=None):
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = sum(float((p.grad**2).sum()) for p in parameters) ** 0.5
        for parameter in parameters:
            parameter.assign_value(parameter - 0.1 * parameter.grad / norm)


def test_zero_warns_if_it_shards_an_unknown_optimizer(group):
    parameters = make_parameters()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for stage in (0, "auto", 1):
            make_updater(Coupled(parameters, {"lr": 0.1}), dp.GradientSynchronizer(parameters, group), stage)
    said = [str(warning.message) for warning in caught if "zero_stage" in str(warning.message)]
    assert len(said) == group.is_main  # for stage 1 only
    assert all("runs Coupled's own step on some of the parameters" in message for message in said)


@pytest.mark.parametrize("change", ["step", "maximize"])
def test_an_optimizer_changed_on_one_rank_is_an_error_on_all_ranks(group, change):
    parameters = make_parameters()
    optimizer = optim.SGD(parameters[:-1], lr=0.1)
    accumulation = dp.GradientSynchronizer(parameters, group, overlap=False)
    step = TrainStep(accumulation, make_updater(optimizer, accumulation, "auto"), LossMeter(group))
    step([MicroStep(1.0, gradients_of(0), 1.0)], 0, as_computed)
    before = [p.asnumpy().copy() for p in parameters]
    if group.rank == group.world_size - 1:
        if change == "step":
            optimizer.step = lambda: None
        else:
            optimizer.add_param_group({"params": parameters[-1:], "maximize": True})
    with pytest.raises(RuntimeError, match=f"SGD was changed on 1 of {group.world_size} ranks"):
        step([MicroStep(1.0, gradients_of(1), 1.0)], 1, as_computed)
    for parameter, value in zip(parameters, before):
        np.testing.assert_array_equal(parameter.asnumpy(), value)


@pytest.mark.parametrize("zero_stage", [0, 2])
def test_two_synchronizers_of_which_one_has_float16_update_like_each_alone(group, zero_stage):
    """One of the updaters reads the buckets, and the other one, which has no rule for float16, gets gradients."""
    halves = [make_parameters(), [nn.Parameter(p.astype(mindspore.float16)) for p in make_parameters(seed=1)[:3]]]
    alone = [[nn.Parameter(p.copy()) for p in half] for half in halves]

    def job(parameters, synchronizer):
        optimizer = optim.SGD(parameters, lr=0.01)
        return TrainStep(synchronizer, make_updater(optimizer, synchronizer, zero_stage), LossMeter(group))

    combined = MultiGroupSynchronizer(
        [dp.GradientSynchronizer(half, group, overlap=False) for half in halves],
        [range(len(halves[0])), range(len(halves[0]), len(halves[0]) + 3)],
        [lambda loss_weight: loss_weight] * 2,
    )
    steps = [job([*halves[0], *halves[1]], combined)]
    steps += [job(half, dp.GradientSynchronizer(half, group, overlap=False)) for half in alone]
    assert steps[0].updater.reads_buckets == [True, False]
    for number in range(3):
        gradients = [*gradients_of(number), *(g.astype(mindspore.float16) for g in gradients_of(number)[:3])]
        for step, mine in zip(steps, (gradients, gradients[: len(SHAPES)], gradients[len(SHAPES) :])):
            step([MicroStep(1.0, mine, 1.0)] if group.is_main else [], number, as_computed)
    for one, other in zip([*halves[0], *halves[1]], [*alone[0], *alone[1]]):
        np.testing.assert_array_equal(one.asnumpy(), other.asnumpy())
