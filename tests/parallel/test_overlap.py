"""Exchange during the backward pass: the same bits as after it, whatever goes wrong meanwhile."""

from __future__ import annotations

import gc
import threading
import time
import warnings
import weakref
from types import SimpleNamespace

import mindspore
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mindnlp.core import nn
from mindnlp.core.autograd import value_and_grad

import mindnlp_dp as dp
import models
from mindnlp_dp.gradients.overlap import TRIAL_PAIRS, pays

SHAPES = [(40, 30), (7,), (3, 5, 2), (1,), (64, 64)]


class Micro:
    """Parameters, and backward passes over them whose gradients are known."""

    def __init__(self, shapes=SHAPES, dtype="float32", frozen=()):
        self.parameters = [
            nn.Parameter(mindspore.Tensor(np.zeros(shape, dtype)), requires_grad=index not in frozen)
            for index, shape in enumerate(shapes)
        ]
        self.trainable = [p for p in self.parameters if p.requires_grad]
        self.dtype = dtype
        # The backward pass finishes gradients in the other order, then.
        self.is_reversed = False
        self.run = value_and_grad(self.loss, tuple(self.trainable), attach_grads=True)

    def loss(self, coefficients):
        total = 0
        pairs = list(zip(self.parameters, coefficients))
        for parameter, coefficient in reversed(pairs) if self.is_reversed else pairs:
            total = total + (parameter * coefficient).sum()
        return total

    def coefficients(self, *seed):
        rng = np.random.default_rng(seed)
        return [mindspore.Tensor(rng.standard_normal(p.shape).astype(self.dtype)) for p in self.parameters]

    def backward(self, *seed):
        for parameter in self.trainable:
            parameter.grad = None
        self.run(self.coefficients(*seed))
        return [p.grad for p in self.trainable]


def window(sync, micro, rank, number, weights=(1.0,)):
    """One window with a micro step for each weight; None is a rank without a last micro batch."""
    for step, weight in enumerate(weights):
        if weight is None:
            continue
        if step + 1 == len(weights):
            with sync.backward(weight):
                gradients = micro.backward(rank, number, step)
        else:
            gradients = micro.backward(rank, number, step)
        sync.accumulate(gradients, weight)
    return [None if g is None else g.asnumpy().copy() for g in sync.reduce()]


def num_exchange_threads():
    return sum(thread.name == "gradient-exchange" for thread in threading.enumerate())


@pytest.fixture
def several(group):
    if group.world_size == 1:
        pytest.skip("one rank exchanges nothing")


@pytest.fixture
def micro():
    return Micro()


@pytest.fixture
def sync(several, group, micro):
    """One that has learnt."""
    sync = dp.GradientSynchronizer(micro.trainable, group, overlap=True, bucket_cap_mb=1e-3)
    window(sync, micro, group.rank, 0)
    assert sync.overlap.state == "on"
    return sync


@pytest.fixture
def plain(group, micro):
    return dp.GradientSynchronizer(micro.trainable, group, overlap=False)


def test_the_order_is_learnt_in_the_first_window(several, group, micro):
    sync = dp.GradientSynchronizer(micro.trainable, group, overlap=True)
    assert sync.overlap.is_learning
    window(sync, micro, group.rank, 0)
    assert sync.overlap.state == "on"
    order = [slot.index for bucket in sync.buckets for slot in bucket.layout.slots]
    assert sorted(order) == list(range(len(SHAPES)))


def test_ranks_whose_gradients_come_in_different_orders(several, group, micro, plain):
    """Rank 0's is everybody's: buckets that ranks started in different orders would be summed with each other."""
    micro.is_reversed = group.rank % 2 == 1
    sync = dp.GradientSynchronizer(micro.trainable, group, overlap=True, bucket_cap_mb=1e-3)
    for number in range(3):
        models.assert_same_sums(window(sync, micro, group.rank, number), window(plain, micro, group.rank, number))
    orders = group.all_gather_object([slot.index for bucket in sync.buckets for slot in bucket.layout.slots])
    assert all(order == orders[0] for order in orders)
    seen = []
    with sync.backward(1.0):
        micro.backward(group.rank)
        seen = group.all_gather_object(sync.overlap.seen)
    assert seen[0] != seen[1]
    sync.skip()
    sync.reduce()


def test_buckets_are_under_way_before_the_backward_pass_has_ended(group, micro, sync):
    with sync.backward(1.0):
        gradients = micro.backward(group.rank)
        assert sync.overlap.is_open
        if not sync.buckets[0].is_asynchronous:
            assert num_exchange_threads() == 1
        time.sleep(0.3)
    sync.accumulate(gradients)
    sync.reduce()
    # A device's queue is not this process's to see, and MCCL's calls block.
    assert (sync.last_window.hidden_seconds > 0) == (not sync.buckets[0].is_asynchronous)
    assert not sync.overlap.is_open
    assert num_exchange_threads() == 0


def test_the_same_bits_with_and_without(group, micro, sync, plain):
    for number, weights in enumerate([(1.0,), (2.0, 3.0), (1.0, 0.5 + group.rank, 7.0)]):
        with_overlap = window(sync, micro, group.rank, number, weights)
        models.assert_same_sums(with_overlap, window(plain, micro, group.rank, number, weights))
    assert sync.overlap.state == "on"


def test_a_rank_without_a_last_micro_batch(group, micro, sync, plain):
    weights = (2.0, None if group.rank == 0 else 1.0)
    models.assert_same_sums(window(sync, micro, group.rank, 1, weights), window(plain, micro, group.rank, 1, weights))
    weights = (None,) if group.rank == 0 else (1.0,)
    models.assert_same_sums(window(sync, micro, group.rank, 2, weights), window(plain, micro, group.rank, 2, weights))


def test_no_rank_with_a_sample(group, sync, micro, plain):
    with pytest.raises(ValueError, match="no rank had a sample in this window"):
        sync.reduce()
    models.assert_same_sums(window(sync, micro, group.rank, 1), window(plain, micro, group.rank, 1))


@pytest.mark.parametrize("before", [(), (2.0,)])
def test_a_last_micro_step_that_is_skipped_on_one_rank(group, micro, sync, plain, before):
    """Its gradients were under way already; the window is exchanged again without them."""
    for number in range(3):
        results = []
        for one in (sync, plain):
            for step, weight in enumerate(before):
                one.accumulate(micro.backward(group.rank, number, step), weight)
            with one.backward(3.0):
                gradients = micro.backward(group.rank, number, 9)
            if group.rank == number % group.world_size:
                one.skip()
            else:
                one.accumulate(gradients, 3.0)
            results.append([None if g is None else g.asnumpy().copy() for g in one.reduce()])
            assert one.num_skipped == 1
        models.assert_same_sums(*results)
    assert sync.overlap.state == "on"


def test_all_ranks_skip(group, micro, sync):
    with sync.backward(1.0):
        micro.backward(group.rank)
    sync.skip()
    assert sync.reduce() == [None] * len(SHAPES)


@pytest.mark.parametrize("how", ["replaced", "missing", "weight", "late", "twice"])
def test_gradients_that_are_not_what_the_hooks_saw(group, micro, sync, plain, how):
    """They are exchanged as they are handed over, and overlap is off from then on, on all ranks, with the reason."""
    results = []
    is_here = group.rank == group.world_size - 1
    for one in (sync, plain):
        with one.backward(1.0):
            gradients = micro.backward(group.rank, 5)
        weight = 1.0
        if is_here and how == "replaced":
            gradients[0] = gradients[0] * 2
        elif is_here and how == "missing":
            gradients[0] = None
        elif is_here and how == "weight":
            weight = 2.0
        elif is_here and how == "twice":
            with one.backward(1.0):
                gradients = micro.backward(group.rank, 6)
        one.accumulate(gradients, weight)
        if is_here and how == "late":
            one.accumulate(micro.backward(group.rank, 7), 3.0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            results.append([g.asnumpy().copy() for g in one.reduce()])
        said = [str(warning.message) for warning in caught if "after the backward pass" in str(warning.message)]
        assert len(said) == (group.is_main and one is sync)
    models.assert_same_sums(*results)
    assert sync.overlap.state.startswith("off: ")
    assert sync.overlap.state.endswith(f"(rank {group.world_size - 1})")
    models.assert_same_sums(window(sync, micro, group.rank, 8), window(plain, micro, group.rank, 8))


@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_gradients_that_the_caller_changes_are_seen_while_learning(several, group, micro, plain, how):
    sync = dp.GradientSynchronizer(micro.trainable, group, overlap=True)
    results = []
    for one in (sync, plain):
        with one.backward(1.0):
            gradients = micro.backward(group.rank, 1)
        if how == "in place":
            for gradient in gradients:
                mindspore.ops.assign(gradient, gradient * 3)
        else:
            gradients = [gradient * 3 for gradient in gradients]
        one.accumulate(gradients)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results.append([g.asnumpy().copy() for g in one.reduce()])
    models.assert_same_sums(*results)
    changed = "changed" if how == "in place" else "replaced"
    assert sync.overlap.state == f"off: a gradient was {changed} after its backward pass (rank 0)"


def one_element(gradients):
    array = gradients[2].asnumpy()
    array[1, 2, 1] = np.nextafter(array[1, 2, 1], np.float32(9))


def one_row(gradients):
    gradients[0].asnumpy()[3] = 0


def all_signs(gradients):
    for gradient in gradients:
        np.negative(gradient.asnumpy(), out=gradient.asnumpy())


def clipped(gradients):
    for gradient in gradients:
        mindspore.ops.assign(gradient, gradient.clamp(-0.1, 0.1))


@pytest.mark.parametrize("change", [one_element, one_row, all_signs, clipped])
@pytest.mark.parametrize("number", [1, 6])
def test_gradients_changed_in_place_in_any_window_are_exchanged_as_they_are(group, micro, sync, change, number):
    """By one rank, and long after the first window: the result is that of an exchange behind the backward pass."""
    plain = dp.GradientSynchronizer(micro.trainable, group, overlap=False)
    for before in range(number):
        models.assert_same_sums(*(window(one, micro, group.rank, before) for one in (sync, plain)))
    assert sync.overlap.state == "on"
    results = []
    for one in (sync, plain):
        with one.backward(1.0):
            gradients = micro.backward(group.rank, number)
        if group.rank == group.world_size - 1:
            change(gradients)
        one.accumulate(gradients, 1.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results.append([g.asnumpy().copy() for g in one.reduce()])
    models.assert_same_sums(*results)
    changed = f"a gradient was changed after its backward pass (rank {group.world_size - 1})"
    assert sync.overlap.state == f"off: {changed}"


def test_a_trainer_that_masks_its_gradients_from_some_update_on(several, group, tmp_path):
    class Masks(dp.DataParallelTrainer):
        def training_step(self, model, inputs):
            loss = super().training_step(model, inputs)
            if self.state.global_step >= 3:
                model.roberta.embeddings.word_embeddings.weight.grad.asnumpy()[10:20] = 0
            return loss

    trained = []
    for overlap in (True, False):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = models.train(
                models.tiny_roberta(), models.Rows(48), tmp_path / str(overlap), Masks,
                per_device_train_batch_size=4, overlap=overlap, max_steps=6,
            )  # fmt: skip
        trained.append(models.weights(trainer.model))
    models.assert_same_sums(trained[0].values(), trained[1].values())


def test_a_hook_that_fails_takes_notes(group, micro, sync, plain, monkeypatch):
    """A hook that raised would spoil the function that it is called from."""
    kind = type(sync.buckets[0])
    put, calls = kind.put, []

    def fail_once(self, *args):
        calls.append(args)
        if len(calls) == 2 and group.is_main:
            raise MemoryError("none left")
        put(self, *args)

    with warnings.catch_warnings(), monkeypatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setattr(kind, "put", fail_once)
        mine = window(sync, micro, group.rank, 4)
    models.assert_same_sums(mine, window(plain, micro, group.rank, 4))
    assert sync.overlap.state == "off: a hook failed: MemoryError: none left (rank 0)"


@pytest.fixture
def mended(group):
    """All ranks leave an exchange half way together, so they can begin again together."""
    yield
    group.gradient_channel()


@pytest.mark.usefixtures("mended")
def test_an_exception_in_the_backward_pass_leaves_no_thread_and_no_half_window(group, micro, sync):
    with pytest.raises(KeyError), sync.backward(1.0):
        micro.backward(group.rank)
        raise KeyError("lost")
    assert num_exchange_threads() == 0
    assert not any(bucket._filled for bucket in sync.buckets if hasattr(bucket, "_filled"))
    for call in (sync.reduce, lambda: sync.accumulate(micro.backward(0)), lambda: sync.backward(1.0).__enter__()):
        with pytest.raises(RuntimeError, match=r"left the exchange .* half way \(KeyError: 'lost'\).*make a new"):
            call()


def test_an_exception_while_nothing_is_under_way_drops_the_window(group, micro, plain):
    with pytest.raises(KeyError), plain.backward(1.0):
        plain.accumulate(micro.backward(group.rank), 5.0)
        raise KeyError
    mine = window(plain, micro, 0, 3)
    models.assert_same_sums(mine, [g.asnumpy() for g in micro.backward(0, 3, 0)])


def test_auto_measures_and_all_ranks_agree(several, group, micro, plain):
    sync = dp.GradientSynchronizer(micro.trainable, group)
    for number in range(2 * TRIAL_PAIRS + 3):
        models.assert_same_sums(window(sync, micro, group.rank, number), window(plain, micro, group.rank, number))
    states = group.all_gather_object(sync.overlap.state)
    assert len(set(states)) == 1
    assert states[0] == "on" or "ms with it and" in states[0]


@pytest.mark.parametrize(
    ("without", "overlapped", "expected"),
    [
        ([1.0, 1.0, 1.0], [0.9, 0.9, 0.9], True),
        ([1.0, 1.0, 1.0], [0.995, 0.995, 0.995], False),
        ([1.0, 1.0, 1.0], [1.1, 1.1, 1.1], False),
        # As much noise as gain.
        ([1.0, 1.5, 1.0], [1.2, 0.9, 0.9], False),
        # A window without a last micro batch on any rank counts on both sides.
        ([0.0, 0.0], [0.0, 0.0], False),
    ],
)
def test_overlap_must_pay_beyond_chance(without, overlapped, expected):
    assert pays(np.array(without), np.array(overlapped)) is expected


@pytest.mark.parametrize("faster", [True, False])
def test_auto_keeps_the_faster_way(several, group, micro, monkeypatch, faster):
    """By a clock of its own: the slower way takes 3 % more, on one rank; the faster stays on all."""
    now = [0.0]
    monkeypatch.setattr("mindnlp_dp.gradients.overlap.time", SimpleNamespace(perf_counter=lambda: now[0]))
    sync = dp.GradientSynchronizer(micro.trainable, group)
    for number in range(2 * TRIAL_PAIRS + 1):
        slow = sync.overlap.is_sending != faster
        with sync.backward(1.0):
            gradients = micro.backward(group.rank, number)
            now[0] += 1.0 + 0.03 * (slow and group.is_main) + 0.001 * (number % 3)
        sync.accumulate(gradients)
        sync.reduce()
    assert (sync.overlap.state == "on") == faster


def test_hooks_go_with_their_synchroniser(several, group, micro, plain):
    """Its memory too: parameters outlive it."""

    def window_of_its_own():
        sync = dp.GradientSynchronizer(micro.trainable, group, overlap=True)
        window(sync, micro, group.rank, 0)
        assert sync.overlap._handles
        return weakref.ref(sync.overlap), removed_by(sync.overlap)

    def removed_by(overlap):
        """What is taken off from here on."""
        removed = []
        for handle in overlap._handles:
            handle.remove = lambda remove=handle.remove: (removed.append(1), remove())
        return removed

    overlap, removed = window_of_its_own()
    gc.collect()
    assert overlap() is None
    assert len(removed) == len(SHAPES)
    window(plain, micro, group.rank, 1)


def test_hooks_hold_on_to_gradients_only_while_they_are_compared(several, group, micro):
    """A gradient kept to the window's end is memory that the next one cannot have."""
    sync = dp.GradientSynchronizer(micro.trainable, group, overlap="auto")
    for number in range(1 + 2):
        with sync.backward(1.0):
            gradients = micro.backward(group.rank, number)
        sync.accumulate(gradients, 1.0)
        assert not sync.overlap._evidence
        assert bool(sync.overlap.seen) == (number in {0, 2}), "learns, does nothing, sends"
        sync.reduce()


def test_an_exchange_that_fails_is_an_error_and_no_later_one_begins(group, micro, sync, mended, monkeypatch):
    kind = type(sync.buckets[0])

    def fail(self, *args):
        raise OSError("the wire broke")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="the wire broke"):
        patch.setattr(kind, "start", fail)
        if sync.buckets[0].is_asynchronous:
            # There the hook notes it, and the window is exchanged again, in vain.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                window(sync, micro, group.rank, 1)
        else:
            window(sync, micro, group.rank, 1)
    assert num_exchange_threads() == 0
    if not sync.buckets[0].is_asynchronous:
        with pytest.raises(RuntimeError, match="half way"):
            sync.reduce()


def test_within_no_sync_nothing_is_sent(group, micro, sync, plain):
    for one in (sync, plain):
        with one.no_sync(), one.backward(2.0):
            gradients = micro.backward(group.rank, 1)
        with one.no_sync():
            one(gradients, 2.0)
    models.assert_same_sums(window(sync, micro, group.rank, 3), window(plain, micro, group.rank, 3))


def test_the_model_of_the_quickstart(several, group):
    """A whole RoBERTa: every hook fires, once, with what the caller gets."""
    model = models.tiny_roberta(group.rank)
    dp.broadcast_parameters(model)
    parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    ids = mindspore.Tensor(np.random.default_rng(group.rank).integers(0, models.VOCAB_SIZE, (4, 8)))
    labels = mindspore.Tensor(np.array([0, 1, 2, 0]))
    run = value_and_grad(lambda: model(ids, labels=labels).loss, tuple(p for _, p in parameters), attach_grads=True)
    results = {}
    for overlap in (True, False):
        sync = dp.GradientSynchronizer(parameters, group, overlap=overlap, bucket_cap_mb=0.01)
        for _ in range(3):
            model.zero_grad()
            with sync.backward(4.0):
                run()
            sync.accumulate([p.grad for _, p in parameters], 4.0)
            results[overlap] = [g.asnumpy().copy() for g in sync.reduce()]
    models.assert_same_sums(results[True], results[False])


# Every rank must draw the same.
@settings(max_examples=25, derandomize=True, database=None, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple), min_size=1, max_size=6),
    dtype=st.sampled_from(["float32", "float32", "float16"]),
    cap_kib=st.sampled_from([0.1, 1, 16, 4096]),
    num_frozen=st.integers(0, 2),
    steps=st.integers(1, 3),
    overlap=st.sampled_from([True, "auto"]),
    seed=st.integers(0, 1000),
)
def test_any_parameters_and_late_ranks(group, shapes, dtype, cap_kib, num_frozen, steps, overlap, seed):  # noqa: PLR0917
    """Against the naive one: to rounding; against exchange after the backward pass: to the bit."""
    micro = Micro(shapes, dtype, frozen=range(min(num_frozen, len(shapes) - 1)))
    kinds = {
        "overlap": dp.GradientSynchronizer(micro.trainable, overlap=overlap, bucket_cap_mb=cap_kib / 1024),
        "plain": dp.GradientSynchronizer(micro.trainable, overlap=False),
        "naive": dp.NaiveGradientSynchronizer(micro.trainable),
    }
    late = np.random.default_rng([seed, group.rank])
    weights = tuple(float(w) for w in np.random.default_rng([seed, group.rank, 1]).integers(1, 9, steps))
    for number in range(4):
        results = {}
        for name, sync in kinds.items():
            if late.random() < 0.3:
                time.sleep(late.random() / 100)
            results[name] = window(sync, micro, group.rank, number, weights)
        models.assert_same_sums(results["overlap"], results["plain"])
        tolerance = 2e-3 if dtype == "float16" else 2e-6
        for mine, naive in zip(results["overlap"], results["naive"]):
            np.testing.assert_allclose(mine, naive, rtol=tolerance, atol=tolerance)
