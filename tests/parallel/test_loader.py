"""Test data loaders: sharding among ranks, sample order, samplers, pipelines and data that differs between ranks."""

from __future__ import annotations

import contextlib
import inspect

import mindspore
import numpy as np
import pytest
from mindspore.dataset import GeneratorDataset, NumpySlicesDataset, RandomSampler, SequentialSampler, SubsetSampler

from mindnlp_dp.data.batches import as_tensors, num_rows_of
from mindnlp_dp.data.dataset_adapter import make_loader
from mindnlp_dp.data.loader import IndexedLoader, PipelineLoader
from models import Rows

pytestmark = pytest.mark.core


def rows_read(loader, epoch=0, start=0):
    """Return the values of column x that this rank read, as one list per update."""
    return [
        [value for batch in micro_batches if batch is not None for value in batch["x"].tolist()]
        for micro_batches in loader.updates(epoch, start)
    ]


def union(group, mine):
    """Return the updates of all ranks, each concatenated in rank order."""
    return [sum(parts, []) for parts in zip(*group.all_gather_object(mine))]


class Numbers:
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return {"x": np.int64(index)}


class NumberTuples(Numbers):
    def __getitem__(self, index):
        return (np.int64(index),)


def count_up(n):
    for i in range(n):
        yield (np.int64(i),)


def huggingface(n):
    from datasets import Dataset

    return Dataset.from_dict({"x": list(range(n))})


INDEXED = {
    "object": Numbers,
    "datasets.Dataset": huggingface,
    "GeneratorDataset": lambda n: GeneratorDataset(NumberTuples(n), ["x"], shuffle=False),
    "NumpySlicesDataset": lambda n: NumpySlicesDataset({"x": np.arange(n)}, shuffle=False),
}


@pytest.mark.parametrize("kind", INDEXED)
@pytest.mark.parametrize("n", [24, 25, 3])
def test_ranks_together_read_each_sample_once_per_epoch(group, kind, n):
    loader = make_loader(INDEXED[kind](n), micro_batch_size=2, accumulation_steps=2, seed=1, shuffle=True)
    assert isinstance(loader, IndexedLoader)
    epochs = [union(group, rows_read(loader, epoch)) for epoch in (0, 1)]
    for updates in epochs:
        assert sorted(sum(updates, [])) == list(range(n))
        assert len(updates) == len(loader)
    if n > 3:
        assert epochs[0] != epochs[1]


def test_global_sample_order_is_the_same_on_any_number_of_ranks(group):
    global_batch = 12
    loader = make_loader(Numbers(50), global_batch // group.world_size, seed=7, shuffle=True)
    order = np.random.default_rng([7, 3]).permutation(50).tolist()
    updates = [order[i : i + global_batch] for i in range(0, 50, global_batch)]
    assert union(group, rows_read(loader, epoch=3)) == updates
    assert union(group, rows_read(loader, epoch=3, start=2)) == updates[2:]


def test_uneven_drop_of_an_indexed_data_set_drops_the_last_samples(group):
    loader = make_loader(Numbers(4 * group.world_size + 1), 2, uneven="drop")
    assert union(group, rows_read(loader)) == np.arange(4 * group.world_size).reshape(2, -1).tolist()


def of_child(sampler, child):
    sampler.add_child(child)
    return sampler


def sampled_by(sampler):
    return lambda n: GeneratorDataset(NumberTuples(n), ["x"], sampler=sampler)


def with_sampler_set_later(n):
    numbers = GeneratorDataset(NumberTuples(n), ["x"], shuffle=False)
    numbers.use_sampler(SequentialSampler(start_index=2, num_samples=4))
    return numbers


# Selections of a generator data set, and how many of n numbers each takes.
SELECTIONS = {
    "start and number": (sampled_by(SequentialSampler(start_index=3, num_samples=5)), lambda n: 5),
    "start": (sampled_by(SequentialSampler(start_index=3)), lambda n: n - 3),
    "number": (sampled_by(SequentialSampler(num_samples=5)), lambda n: 5),
    "random number": (sampled_by(RandomSampler(num_samples=5)), lambda n: 5),
    "with replacement": (sampled_by(RandomSampler(replacement=True)), lambda n: n),
    "child sampler": (sampled_by(of_child(SequentialSampler(), SubsetSampler([7, 1, 4]))), lambda n: 3),
    "indices": (sampled_by([7, 1, 4]), lambda n: 3),
    "set later": (with_sampler_set_later, lambda n: 4),
    "skip": (lambda n: GeneratorDataset(NumberTuples(n), ["x"], shuffle=False).skip(4), lambda n: n - 4),
    "take": (lambda n: GeneratorDataset(NumberTuples(n), ["x"], shuffle=False).take(4), lambda n: 4),
    "repeat": (lambda n: GeneratorDataset(NumberTuples(n), ["x"], shuffle=False).repeat(2), lambda n: 2 * n),
    "filter": (lambda n: GeneratorDataset(NumberTuples(n), ["x"], shuffle=False).filter(lambda x: x > 7, ["x"]),
               lambda n: n - 8),
    "all, in order": (sampled_by(SequentialSampler()), lambda n: n),
    "all, shuffled": (sampled_by(RandomSampler()), lambda n: n),
}  # fmt: skip


@pytest.mark.core
@pytest.mark.parametrize("kind", SELECTIONS)
def test_mindspore_samplers_skip_take_and_filter_are_respected(group, kind):
    make, count = SELECTIONS[kind]
    loader = make_loader(make(24), micro_batch_size=2, seed=1)
    assert isinstance(loader, IndexedLoader) == kind.startswith("all")
    read = sum(union(group, rows_read(loader)), [])
    assert len(read) == count(24)
    if "random" not in kind and kind != "with replacement":
        assert sorted(read) == sorted(int(row[0]) for row in make(24).create_tuple_iterator(output_numpy=True))


PIPELINES = {
    "batched": lambda n, batch: GeneratorDataset(NumberTuples(n), ["x"], shuffle=False).batch(batch),
    "mapped": lambda n, batch: GeneratorDataset(NumberTuples(n), ["x"], shuffle=False).map(lambda x: x, ["x"]),
    "streaming": lambda n, batch: GeneratorDataset(lambda: count_up(n), ["x"]),
    "iterable": lambda n, batch: [{"x": i} for i in range(n)].__iter__(),
}


@pytest.mark.parametrize("kind", PIPELINES)
def test_pipelines_are_scattered_to_all_ranks_in_order(group, kind):
    batch = 3 * group.world_size
    n = 2 * batch + 1
    loader = make_loader(PIPELINES[kind](n, batch), micro_batch_size=3)
    assert isinstance(loader, PipelineLoader)
    updates = union(group, rows_read(loader))
    assert sum(updates, []) == list(range(n))
    assert [len(micro_batches) for micro_batches in updates] == [batch, batch, 1]


def test_a_shuffled_pipeline_gives_another_order_every_epoch(group):
    pipeline = GeneratorDataset(NumberTuples(40), ["x"], shuffle=True).map(lambda x: x, ["x"])
    loader = make_loader(pipeline, micro_batch_size=5, seed=3)
    first, second, again = (sum(union(group, rows_read(loader, epoch)), []) for epoch in (0, 1, 0))
    assert first != second
    assert first == again  # the order depends on (seed, epoch) only, so a resumed run can continue it
    assert sorted(first) == sorted(second) == list(range(40))


def test_a_pipeline_sharded_by_num_shards_is_refused(group):
    cut = GeneratorDataset(NumberTuples(8), ["x"], num_shards=2, shard_id=0)
    for pipeline in (cut, cut.batch(2)):
        with pytest.raises(ValueError, match="already sharded by num_shards, and would be sharded twice"):
            make_loader(pipeline, 2)


def test_pipeline_errors_of_rank_0_are_raised_on_all_ranks(group):
    def broken():
        yield {"x": 1}
        raise OSError("the disk is gone")

    loader = make_loader(broken(), micro_batch_size=1)
    with pytest.raises(OSError, match="the disk is gone"):
        rows_read(loader)


def test_unused_columns_are_removed_and_label_is_renamed_to_labels(group):
    loader = make_loader(Rows(4), 4, columns=["input_ids", "label"])
    (batch,) = next(loader.updates())
    if batch is not None:
        assert sorted(batch) == ["input_ids", "labels"]


def test_samples_of_different_lengths_without_a_collator_are_refused(group):
    class Ragged(Numbers):
        def __getitem__(self, index):
            return {"x": np.zeros(index)}

    loader = make_loader(Ragged(4 * group.world_size), 4)
    with pytest.raises(ValueError, match="'x' have different shapes, .* pass a data_collator"):
        rows_read(loader)


def test_invalid_and_empty_data_sets_are_refused(group):
    with pytest.raises(TypeError, match="a int is not a data set"):
        make_loader(3, 2)
    with pytest.raises(ValueError, match="the data set is empty"):
        make_loader(Numbers(0), 2)


class Rowwise:
    """Four samples that ``row`` makes from their index."""

    def __init__(self, row):
        self.row = row

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.row(index)


class Opaque:
    """An object whose repr shows its memory address, like that of most objects."""


THE_SAME_EVERYWHERE = {
    "lists of several lengths": lambda: [[1, 2], [3], []],
    "dicts": lambda: {"b": ["x"], "a": None},
    "arrays of lists": lambda: np.array([[1], [2, 3]], dtype=object),
    "not a number": lambda: float("nan"),
    "objects": Opaque,
    "objects in a list": lambda: [Opaque()],
    "random values": lambda: np.random.default_rng().random(3),
    "records": lambda: np.zeros(2, [("a", "i4"), ("b", "f8", 2)]),
}


@pytest.mark.parametrize("kind", THE_SAME_EVERYWHERE)
def test_samples_of_many_types_pass_the_comparison_between_ranks(group, kind):
    source = Rowwise(lambda index: {"x": np.int64(index), "other": THE_SAME_EVERYWHERE[kind]()})
    for columns in (None, ["x"]):
        assert len(make_loader(source, 2, columns=columns)) == -(-4 // (2 * group.world_size))


DIFFERENCES = {
    # name: (value on rank 0, value on the last rank, the texts that the message shows for the two)
    "numbers": (3, 4, ("3", "4")),
    "texts": ("the same beginning, " * 5 + "b", "the same beginning, " * 5 + "c", ("beginning, b'", "beginning, c'")),
    "nested": ([[1], [2, {"a": 5}]], [[1], [2, {"a": 6}]], ("5}]]", "6}]]")),
    "types": (1, "1", ("1", "'1'")),
    "arrays": (np.arange(3), np.arange(1, 4), ("int64 (3,) [0, 1, 2]", "int64 (3,) [1, 2, 3]")),
    "large arrays": (np.zeros(2000), np.eye(1, 2000)[0], ("float64 (2000,) of hash", "float64 (2000,) of hash")),
    "arrays of another type": (np.zeros(1, "i4"), np.zeros(1, "i8"), ("int32 (1,) [0]", "int64 (1,) [0]")),
    "None": (None, 0, ("None", "0")),
}


@pytest.mark.parametrize("kind", DIFFERENCES)
def test_a_column_that_differs_between_ranks_is_named_with_both_values(group, kind):
    if group.world_size == 1:
        pytest.skip("one rank agrees with itself")
    *values, shown = DIFFERENCES[kind]
    last = group.world_size - 1
    value = values[group.rank == last]
    source = Rowwise(lambda index: {"image": Opaque(), "noise": np.random.rand(), "x": value if index == 2 else 0})
    with pytest.raises(ValueError, match=rf"sample 2 of rank {last} is not that of rank 0: its column 'x'") as caught:
        make_loader(source, 2)
    others, _, rank_0s = str(caught.value).partition("rank 0's")
    assert shown[1] in others
    assert shown[0] in rank_0s
    assert len(str(caught.value)) < 400
    make_loader(source, 2, columns=["image", "noise"])


def test_tensor_columns_are_compared_between_ranks(group):
    if group.world_size == 1:
        pytest.skip("one rank agrees with itself")
    for dtype in (mindspore.float32, mindspore.bfloat16):
        for value, differs in ((1.5, False), (float(group.rank), True)):
            tensor = mindspore.Tensor([value], dtype)
            source = Rowwise(lambda index, tensor=tensor: {"x": tensor})
            expected = pytest.raises(ValueError, match="column 'x' holds") if differs else contextlib.nullcontext()
            with expected:
                make_loader(source, 2)


def test_a_column_missing_on_one_rank_is_named(group):
    if group.world_size == 1:
        pytest.skip("one rank agrees with itself")
    source = Rowwise(lambda index: {"x": index, **({"y": 7} if group.rank == 0 else {})})
    with pytest.raises(ValueError, match=r"sample 0 of rank 1 .* its column 'y' holds nothing, rank 0's 7;"):
        make_loader(source, 2)
    make_loader(source, 2, columns=["x"])


def test_columns_with_random_values_in_some_samples_are_not_compared(group):
    """A randomly flipped image may be the same twice on one rank by chance, and differ on another rank."""
    source = Rowwise(lambda index: {"x": index, "image": np.random.default_rng().random() if index else group.rank})
    assert sorted(sum(union(group, rows_read(make_loader(source, 2))), [])) == list(range(len(source)))
    if group.world_size > 1:
        # Without the random values the image would be compared.
        with pytest.raises(ValueError, match="sample 0 of rank 1 .* its column 'image' holds 1, rank 0's 0;"):
            make_loader(Rowwise(lambda index: {"x": index, "image": 0 if index else group.rank}), 2)


@pytest.mark.parametrize("sample", [(1, [2, 3]), [1], "text", Opaque()])
def test_samples_that_are_not_dicts_are_refused_on_all_ranks(group, sample):
    with pytest.raises(TypeError, match=rf"sample \d is a {type(sample).__name__}, expected a dict of column names"):
        rows_read(make_loader(Rowwise(lambda index: sample), 2))


def test_data_set_errors_of_one_rank_are_raised_on_all_ranks(group):
    if group.world_size == 1:
        pytest.skip("one rank has no rank to wait for it")
    last = group.world_size - 1

    def row(index):
        if group.rank == last:
            raise OSError("the disk is gone")
        return {"x": index}

    with pytest.raises(OSError, match="the disk is gone"):
        make_loader(Rowwise(row), 2)
    assert group.all_gather_object(group.rank) == list(range(group.world_size))


def counted(n):
    return GeneratorDataset(lambda: count_up(n), ["x"], shuffle=False)


def streamed(n):
    class Stream:
        def __iter__(self):
            return ({"x": np.int64(i)} for i in range(n))

    return Stream()


@pytest.mark.parametrize("size", [2, 3])
def test_a_pipeline_can_be_read_by_several_loaders(group, size):
    """Loaders must not add operations to the pipeline itself: MindSpore refuses one with two added operations."""
    pipeline = counted(10).map(lambda x: x + 1, ["x"])
    first, second = make_loader(pipeline, 2), make_loader(pipeline, size)
    for loader in (first, second, first, make_loader(pipeline, 2)):
        assert sorted(sum(union(group, rows_read(loader)), [])) == list(range(1, 11))


@pytest.mark.parametrize("accumulation_steps", [1, 2])
@pytest.mark.parametrize("kind", ["stream", "pipeline", "batches"])
def test_uneven_drop_of_streams_and_pipelines_drops_the_last_global_batch(group, kind, accumulation_steps):
    micro, each = 2, 2 * group.world_size
    size = each * accumulation_steps
    n = 3 * size - 1
    data = {"stream": streamed, "pipeline": counted, "batches": lambda n: counted(n).batch(each)}[kind](n)
    loader = make_loader(data, micro, accumulation_steps, uneven="drop")
    updates = union(group, rows_read(loader))
    assert [len(micro_batches) for micro_batches in updates] == [size, size]
    assert sorted(sum(updates, [])) == list(range(2 * size))
    if kind != "stream":
        assert len(loader) == 2


def test_batches_without_a_fixed_size_and_packed_streams_are_refused(group):
    pipelines = [
        counted(10).batch(lambda info: 2),
        counted(10).bucket_batch_by_length(["x"], [4], [2, 2], element_length_function=lambda x: 1),
    ]
    # MindSpore has it since 2.10.
    if "batch_sampler" in inspect.signature(GeneratorDataset.__init__).parameters:
        pipelines.append(GeneratorDataset(NumberTuples(10), ["x"], batch_sampler=[[0, 1], [2, 3]]))
    for pipeline in pipelines:
        with pytest.raises(ValueError, match="the batches of this pipeline have no fixed size"):
            make_loader(pipeline, 2)
    packed = make_loader(streamed(12), 4, collate=lambda samples: {"x": np.zeros((len(samples) // 2, 3))})
    if group.world_size > 1:
        with pytest.raises(ValueError, match="no column of a batch has a row for each of its .* samples"):
            list(packed.updates())
    else:
        assert [len(batch["x"]) for [batch] in packed.updates()] == [2, 2, 2]


def test_uneven_drop_counts_the_updates_of_a_pipeline_that_is_mapped_after_batch(group):
    size = 2 * group.world_size
    pipeline = counted(3 * size - 1).batch(size).map(lambda x: x + 1, ["x"])
    loader = make_loader(pipeline, 2, uneven="drop")
    assert len(loader) == len(rows_read(loader)) == 2


def test_samples_with_different_columns_are_refused(group):
    class Ragged(Numbers):
        def __getitem__(self, index):
            return {"x": np.int64(index), **({"weight": 1.0} if index % 2 else {})}

    with pytest.raises(ValueError, match="do not have the same columns: one does not have 'weight'"):
        list(make_loader(Ragged(4 * group.world_size), 4).updates())


def test_an_iterator_that_is_read_twice_gives_a_warning(group):
    loader = make_loader(({"x": np.int64(i)} for i in range(4)), 4)
    assert union(group, rows_read(loader)) == [[0, 1, 2, 3]]
    if group.is_main:
        with pytest.warns(RuntimeWarning, match="an iterator, which can be read once"):
            assert not list(loader.updates())
    else:
        assert not list(loader.updates())


def test_columns_without_a_row_per_sample_are_given_to_all_ranks(group):
    """Class weights and scalars are such columns; they may come before or after the ordinary ones."""
    n = 4 * group.world_size + 3

    def collate(samples):
        x = np.stack([sample["x"] for sample in samples])
        return {"weights": np.arange(3.0), "scalar": np.float32(1), "x": x, "more": np.arange(7)}

    for data in (streamed(n), Numbers(n)):
        loader = make_loader(data, 2, collate=collate)
        batches = [batch for micro_batches in loader.updates() for batch in micro_batches if batch is not None]
        for batch in batches:
            np.testing.assert_array_equal(batch["weights"], np.arange(3.0))
            np.testing.assert_array_equal(batch["more"], np.arange(7))
            assert batch["scalar"] == 1
            assert num_rows_of(batch) == len(batch["x"]) == len(batch.indices) == num_rows_of(as_tensors(batch))
        assert sorted(sum(union(group, rows_read(loader)), [])) == list(range(n))
