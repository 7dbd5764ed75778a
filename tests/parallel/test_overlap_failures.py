"""Test failures while overlap is on: the result has the same bits as without overlap, or there is an error."""

from __future__ import annotations

import warnings

import mindspore
import numpy as np
import pytest

import mindnlp_dp as dp
import models
from known_gradients import SHAPES, num_exchange_threads, run_update
from mindnlp_dp.communication.gradient_channel import open_gradient_channel
from mindnlp_dp.data_parallel.overlap import OverlapState


@pytest.mark.core
@pytest.mark.parametrize("before", [(), (2.0,)])
def test_overlap_excludes_a_last_micro_step_that_one_rank_skips(group, micro, sync, plain, before):
    """Its gradients were already being sent, so the update is exchanged again without them."""
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
    assert sync.overlap.state is OverlapState.ON


def test_overlap_gives_no_gradients_if_all_ranks_skip(group, micro, sync):
    with sync.backward(1.0):
        micro.backward(group.rank)
    sync.skip()
    assert sync.reduce() == [None] * len(SHAPES)


@pytest.mark.parametrize("how", ["replaced", "missing", "weight", "late", "twice"])
def test_overlap_turns_off_if_gradients_differ_from_those_of_the_hooks(group, micro, sync, plain, how):
    """The gradients that the caller passes are exchanged; then overlap is off on all ranks, with the reason."""
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
    assert sync.overlap.state is OverlapState.OFF
    assert sync.overlap.off_reason.endswith(f"(rank {group.world_size - 1})")
    models.assert_same_sums(run_update(sync, micro, group.rank, 8), run_update(plain, micro, group.rank, 8))


@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_overlap_detects_changed_gradients_in_its_first_update(several, group, micro, plain, how):
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
    assert sync.overlap.off_reason == f"a gradient was {changed} after its backward pass (rank 0)"


def written(gradient, change):
    """Apply ``change`` to the tensor's NumPy view; assign the values if MindSpore 2.7 has overwritten the view."""
    array = gradient.asnumpy()
    change(array)
    wanted = array.copy()
    if not np.array_equal(gradient.asnumpy(), wanted):
        mindspore.ops.assign(gradient, mindspore.Tensor(wanted))


def one_element(gradients):
    def change(array):
        array[1, 2, 1] = np.nextafter(array[1, 2, 1], np.float32(9))

    written(gradients[2], change)


def one_row(gradients):
    def change(array):
        array[3] = 0

    written(gradients[0], change)


def all_signs(gradients):
    for gradient in gradients:
        written(gradient, lambda array: np.negative(array, out=array))


def clipped(gradients):
    for gradient in gradients:
        mindspore.ops.assign(gradient, gradient.clamp(-0.1, 0.1))


@pytest.mark.core
@pytest.mark.parametrize("change", [one_element, one_row, all_signs, clipped])
@pytest.mark.parametrize("number", [1, 6])
def test_overlap_exchanges_gradients_changed_in_place_in_any_update(group, micro, sync, change, number):
    """One rank changes them, even in a late update; the result equals an exchange after the backward pass."""
    plain = dp.GradientSynchronizer(micro.trainable, group, overlap=False)
    for before in range(number):
        models.assert_same_sums(*(run_update(one, micro, group.rank, before) for one in (sync, plain)))
    assert sync.overlap.state is OverlapState.ON
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
    assert sync.overlap.off_reason == f"{changed}"


def test_overlap_trains_the_same_bits_if_a_trainer_masks_gradients_in_place(several, group, tmp_path):
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


def test_a_failed_hook_turns_overlap_off_and_does_not_change_the_gradients(group, micro, sync, plain, monkeypatch):
    """A hook records its error instead of raising it, because raising would break the function that calls it."""
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
        mine = run_update(sync, micro, group.rank, 4)
    models.assert_same_sums(mine, run_update(plain, micro, group.rank, 4))
    assert sync.overlap.off_reason == "a hook failed: MemoryError: none left (rank 0)"


@pytest.fixture
def sound_channel_afterwards(group):
    """Open a new channel after the test, in which all ranks leave an exchange before its end."""
    yield
    open_gradient_channel(group)


@pytest.mark.usefixtures("sound_channel_afterwards")
def test_an_exception_in_the_backward_pass_stops_the_thread_and_refuses_later_calls(group, micro, sync):
    with pytest.raises(KeyError, match="lost"), sync.backward(1.0):
        micro.backward(group.rank)
        raise KeyError("lost")
    assert num_exchange_threads() == 0
    assert not any(bucket._filled for bucket in sync.buckets if hasattr(bucket, "_filled"))
    for call in (sync.reduce, lambda: sync.accumulate(micro.backward(0)), lambda: sync.backward(1.0).__enter__()):
        with pytest.raises(RuntimeError, match=r"left the exchange .* before its end \(KeyError: 'lost'\).*make a new"):
            call()


def test_an_exception_without_overlap_discards_the_accumulated_gradients(group, micro, plain):
    with pytest.raises(KeyError, match="lost"), plain.backward(1.0):
        plain.accumulate(micro.backward(group.rank), 5.0)
        raise KeyError("lost")
    mine = run_update(plain, micro, 0, 3)
    models.assert_same_sums(mine, [g.asnumpy() for g in micro.backward(0, 3, 0)])


@pytest.mark.core
def test_a_failed_exchange_is_raised_and_refuses_later_exchanges(
    group, micro, sync, sound_channel_afterwards, monkeypatch
):
    kind = type(sync.buckets[0])

    def fail(self, *args):
        raise OSError("the wire broke")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="the wire broke"):
        patch.setattr(kind, "start", fail)
        if sync.buckets[0].is_asynchronous:
            # Here the hook records the error, and the update is exchanged again, which fails too.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run_update(sync, micro, group.rank, 1)
        else:
            run_update(sync, micro, group.rank, 1)
    assert num_exchange_threads() == 0
    if not sync.buckets[0].is_asynchronous:
        with pytest.raises(RuntimeError, match="before its end"):
            sync.reduce()


def test_a_new_channel_closes_the_old_one_on_every_rank(group, micro, sync):
    """The channel also closes on ranks that left no exchange, because no rank would receive from it."""
    if group.is_main:
        sync.channel.abandon(KeyError("lost"))
    newer = dp.GradientSynchronizer(micro.trainable, group, overlap=False)
    with pytest.raises(RuntimeError, match="left the exchange of an update before its end"):
        sync.reduce()
    assert all(gradient is not None for gradient in run_update(newer, micro, group.rank, 1))
