"""Test which samples each rank reads in each update, as tables and as properties for any sizes."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindnlp_dp.data.sampler import (
    GlobalBatchSampler,
    check_every_rank_has_a_sample,
    epoch_order,
    grouped_by_length,
    plan_updates,
)
from mindnlp_dp.runtime.shard_bounds import split_evenly

SIZES = {
    "num_samples": st.integers(1, 200),
    "micro_batch_size": st.integers(1, 7),
    "world_size": st.integers(1, 9),
    "accumulation_steps": st.integers(1, 4),
}


def read(sampler, epoch=0, start=0):
    """Return lists of indices by rank, update and micro-step."""
    return [
        [[micro.tolist() for micro in mine] for mine in sampler.shard_indices(rank, epoch, start)]
        for rank in range(sampler.world_size)
    ]


def joined(per_rank):
    """Return the samples of an update in the order of the data, from the micro-batches of each rank."""
    return [int(i) for micro_step in zip(*per_rank) for micro in micro_step for i in micro]


def test_ten_samples_are_sharded_over_two_ranks_and_two_micro_steps():
    """Split ten samples over two ranks, in two micro-steps of two samples: a full global batch and a short one."""
    sampler = GlobalBatchSampler(10, 2, world_size=2, accumulation_steps=2, shuffle=False)
    assert (sampler.global_batch_size, sampler.num_updates) == (8, 2)
    assert read(sampler) == [
        [[[0, 1], [4, 5]], [[8]]],
        [[[2, 3], [6, 7]], [[9]]],
    ]


def test_a_short_batch_leaves_some_ranks_without_samples():
    sampler = GlobalBatchSampler(6, 1, world_size=4, shuffle=False)
    assert read(sampler) == [[[[0]], [[4]]], [[[1]], [[5]]], [[[2]], [[]]], [[[3]], [[]]]]


def test_uneven_drop_leaves_out_the_short_batch():
    sampler = GlobalBatchSampler(10, 2, world_size=2, uneven="drop", shuffle=False)
    assert read(sampler) == [[[[0, 1]], [[4, 5]]], [[[2, 3]], [[6, 7]]]]


@given(epoch=st.integers(0, 3), seed=st.integers(0, 5), **SIZES)
def test_the_union_of_all_ranks_is_the_data_set_at_every_world_size(epoch, seed, **sizes):
    sampler = GlobalBatchSampler(seed=seed, **sizes)
    shards = read(sampler, epoch)
    assert sorted(i for rank in shards for mine in rank for micro in mine for i in micro) == list(
        range(sizes["num_samples"])
    )


@given(**SIZES)
def test_every_rank_takes_the_same_number_of_steps(**sizes):
    sampler = GlobalBatchSampler(**sizes)
    shapes = {tuple(len(mine) for mine in rank) for rank in read(sampler)}
    assert len(shapes) == 1
    (per_rank,) = shapes
    assert len(per_rank) == sampler.num_updates
    assert all(1 <= steps <= sizes["accumulation_steps"] for steps in per_rank)


@given(**SIZES)
def test_micro_batches_fit_and_a_short_batch_is_split_evenly(**sizes):
    sampler = GlobalBatchSampler(**sizes)
    for update in zip(*read(sampler)):
        totals = [sum(len(micro) for micro in mine) for mine in update]
        assert max(totals) - min(totals) <= 1
        assert max(len(micro) for mine in update for micro in mine) <= sizes["micro_batch_size"]


@given(num_samples=st.integers(1, 100), seed=st.integers(0, 5), epoch=st.integers(0, 3))
def test_the_global_batches_do_not_depend_on_the_number_of_ranks(num_samples, seed, epoch):
    """Compare 1 x 12, 2 x 6, 2 x 3 x 2 micro-steps and 12 x 1: the sequence is the same."""
    layouts = [(12, 1, 1), (6, 2, 1), (3, 2, 2), (1, 12, 1), (2, 3, 2)]
    sequences = []
    for micro, world, accumulation in layouts:
        sampler = GlobalBatchSampler(num_samples, micro, world, accumulation, seed=seed)
        sequences.append([joined(per_rank) for per_rank in zip(*read(sampler, epoch))])
    assert all(sequence == sequences[0] for sequence in sequences)


@given(num_samples=st.integers(30, 100), start=st.integers(0, 3))
def test_a_resumed_sampler_reads_the_rest_of_the_same_sequence(num_samples, start):
    sampler = GlobalBatchSampler(num_samples, 3, world_size=2)
    for rank, resumed in zip(read(sampler, 1), read(sampler, 1, start)):
        assert resumed == rank[start:]


@given(
    num_samples=st.integers(20, 100), sizes=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    updates=st.integers(0, 3), uneven=st.sampled_from(["keep", "drop"]),
)  # fmt: skip
def test_a_changed_batch_size_reads_the_rest_of_the_same_sequence(num_samples, sizes, updates, uneven):
    """Read some updates of each size, then all remaining samples in batches of the last size."""
    order, read = epoch_order(num_samples, 0, 1), []
    for size in sizes:
        sampler = GlobalBatchSampler(num_samples, 3, 2, samples_per_update=size, uneven=uneven)
        update, offset = sampler.place_of(len(read))
        assert (offset == 0) == (len(read) == update * size)
        ranks = [list(sampler.shard_indices(rank, 1, update, offset)) for rank in range(2)]
        # It ends like an epoch that had this size from the beginning.
        assert len(ranks[0]) == sampler.num_updates - update
        per_rank = [joined(parts) for parts in zip(*ranks)]
        last = size == sizes[-1]
        for mine in per_rank if last else per_rank[:updates]:
            assert len(mine) == size or (uneven == "keep" and len(read) + len(mine) == num_samples)
            read += mine
    assert read == order[: len(read)].tolist()
    assert num_samples - len(read) < (1 if uneven == "keep" else sizes[-1])


def test_the_epoch_order_depends_only_on_seed_and_epoch():
    orders = {(seed, epoch): tuple(epoch_order(50, seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}
    assert len(set(orders.values())) == 4
    assert orders[1, 1] == tuple(epoch_order(50, 1, 1))
    # The order must never change: a checkpoint's position has no meaning in another order.
    assert epoch_order(8, 42, 0).tolist() == [3, 4, 2, 7, 6, 1, 5, 0]
    np.testing.assert_array_equal(epoch_order(4, 42, 0, shuffle=False), np.arange(4))


@given(num_items=st.integers(0, 50), num_parts=st.integers(1, 9))
def test_split_evenly_covers_all_items_in_order(num_items, num_parts):
    parts = [range(*split_evenly(num_items, num_parts, part)) for part in range(num_parts)]
    assert [i for part in parts for i in part] == list(range(num_items))
    assert [len(part) for part in parts] == sorted((len(part) for part in parts), reverse=True)


def test_invalid_sampler_arguments_are_refused():
    with pytest.raises(ValueError, match="world_size must be at least 1, got 0"):
        GlobalBatchSampler(10, 2, world_size=0)
    with pytest.raises(ValueError, match="the data set is empty"):
        GlobalBatchSampler(0, 2)
    with pytest.raises(ValueError, match="uneven must be 'keep' or 'drop', got 'wrap'"):
        GlobalBatchSampler(10, 2, uneven="wrap")
    with pytest.raises(ValueError, match="7 samples are less than one global batch of 8, .*uneven='keep'"):
        GlobalBatchSampler(7, 4, world_size=2, uneven="drop")
    with pytest.raises(ValueError, match="3 training samples for 4 ranks"):
        check_every_rank_has_a_sample(3, 4)
    check_every_rank_has_a_sample(4, 4)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 7, 24, 31])
@pytest.mark.parametrize("micro", [1, 3, 16])
def test_samples_per_update_gives_the_same_batches_on_any_number_of_ranks(world_size, micro):
    fixed = GlobalBatchSampler(100, micro, world_size, accumulation_steps=9, samples_per_update=24)
    plain = GlobalBatchSampler(100, 24)
    assert fixed.global_batch_size == 24
    assert fixed.num_updates == plain.num_updates == 5
    whole = plain.shard_indices(0, epoch=3)
    parts = [list(fixed.shard_indices(rank, epoch=3)) for rank in range(world_size)]
    for update, [expected] in enumerate(whole):
        per_rank = [part[update] for part in parts]
        assert len({len(mine) for mine in per_rank}) == 1
        assert max(len(batch) for mine in per_rank for batch in mine) <= micro
        np.testing.assert_array_equal(joined(per_rank), expected)


@pytest.mark.parametrize(
    ("plan", "expected"),
    [((10, 2.5), (25, 3)), ((10, 0.01), (1, 1)), ((10, 3, 7), (7, 1)), ((None, 3, 7), (7, sys.maxsize))],
)
def test_plan_updates_follows_epochs_and_max_steps(plan, expected):
    assert plan_updates(*plan) == expected


def test_a_stream_without_max_steps_is_refused():
    with pytest.raises(ValueError, match="has no length, so set max_steps"):
        plan_updates(None, 3)
    with pytest.raises(ValueError, match="no full global batch, and a batch that is not full is dropped: keep it"):
        plan_updates(0, 3, 7)


@given(lengths=st.lists(st.integers(0, 30), min_size=1, max_size=300), batch_size=st.integers(1, 40))
def test_grouping_by_length_permutes_samples_with_the_longest_first(lengths, batch_size):
    lengths, order = np.array(lengths), epoch_order(len(lengths), 3, 1)
    grouped = grouped_by_length(order, lengths, batch_size)
    assert sorted(grouped) == list(range(len(lengths)))
    assert lengths[grouped[0]] == lengths.max()
    # Lengths decrease within every stretch, except at the two samples that were exchanged.
    stretch = batch_size * max(1, min(50, len(lengths) // (4 * batch_size)))
    rises = [i for i in range(1, len(grouped)) if lengths[grouped[i]] > lengths[grouped[i - 1]] and i % stretch]
    assert len(rises) <= 2


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_grouping_by_length_is_the_same_on_any_number_of_ranks(world_size):
    lengths = np.random.default_rng(0).integers(1, 40, 64)
    sampler = GlobalBatchSampler(64, 3, world_size, samples_per_update=15, seed=1, lengths=lengths)
    alone = GlobalBatchSampler(64, 15, seed=1, lengths=lengths)
    together = [joined(sampler_of(sampler, update)) for update in range(5)]
    for update, batch in enumerate(together):
        np.testing.assert_array_equal(batch, list(alone.shard_indices(0, 0))[update][0])
    assert not np.array_equal(together[0], next(GlobalBatchSampler(64, 15, seed=1).shard_indices(0, 0))[0])


def sampler_of(sampler, update):
    return [list(sampler.shard_indices(rank, 0))[update] for rank in range(sampler.world_size)]


def test_a_wrong_number_of_lengths_is_refused():
    with pytest.raises(ValueError, match="expected a length for each of 4 samples, got 3"):
        GlobalBatchSampler(4, 1, lengths=np.ones(3))
