"""This module creates the loader for a data set of any kind; the Trainers and custom training loops call it.

There are two ways to shard data, and :func:`adapt` tells once which one a data set has:

* **By index** (:class:`IndexedSource`). ``datasets.Dataset``, MindSpore's generator data sets over a source with an
  index, and any object with ``__len__`` and ``__getitem__``: each rank reads the indices of its shard (sampler.py).
* **By rows.** Batched, shuffled, mapped or streaming MindSpore pipelines (:class:`PipelineSource`), and plain iterables
  (:class:`IterableSource`), have a fixed order: rank 0 reads them, and the rows of every batch are split among the
  ranks. A batch of such a pipeline is a *global* micro-batch.

A pipeline that the user has sharded with ``num_shards`` is refused: it would be sharded twice.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional, Union

import numpy as np

from mindnlp_dp.communication.default_group import get_data_group, get_process_group
from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.data.batches import Batch, Collator, as_arrays, collated, wanted
from mindnlp_dp.data.dataset_consistency import check_same_lengths, check_same_samples
from mindnlp_dp.data.loader import IndexedLoader, Loader, PipelineLoader
from mindnlp_dp.data.sampler import GlobalBatchSampler, largest_divisor

_ROWS_AT_A_TIME = 1000

# Iterators that a loader has read, by their ids; an evaluation makes a new loader for each pass.
_iterators_read: dict[int, Any] = {}


@dataclass(frozen=True)
class LoaderOptions:
    """The arguments of :func:`make_loader`, and the ``readers``: all ranks that read the samples of ``group``.

    With a sharded model several ranks read the same samples.
    """

    micro_batch_size: int
    accumulation_steps: int
    group: ProcessGroup
    readers: ProcessGroup
    seed: int
    shuffle: bool
    uneven: str
    collate: Optional[Collator]
    columns: Optional[Sequence[str]]
    global_batch_size: Optional[int]
    lengths: Optional[np.ndarray]

    def global_micro_batch(self) -> tuple[int, int]:
        """Return the size of a micro-batch over all ranks, and how many of them make an update."""
        size = self.micro_batch_size * self.group.world_size
        if self.global_batch_size is None:
            return size, self.accumulation_steps
        size = largest_divisor(self.global_batch_size, size)
        return size, self.global_batch_size // size


def make_loader(
    dataset: Any,
    micro_batch_size: int,
    accumulation_steps: int = 1,
    *,
    group: Optional[ProcessGroup] = None,
    seed: int = 0,
    shuffle: bool = False,
    uneven: str = "keep",
    collate: Optional[Collator] = None,
    columns: Optional[Sequence[str]] = None,
    global_batch_size: Optional[int] = None,
    lengths: Optional[np.ndarray] = None,
) -> Loader:
    """Return the loader for ``dataset``: by index if it has one, else by rows. A collective.

    A pipeline has its own order and batches: ``seed``, ``shuffle``, ``collate`` and ``lengths`` are for sources with an
    index.

    Args:
        dataset: the data set, the same on every rank.
        micro_batch_size: samples of a rank in a micro-batch; with ``global_batch_size``, their maximum.
        accumulation_steps: micro-batches of a rank per update; with ``global_batch_size`` they follow from it.
        group: the ranks that split the samples; by default those of the mesh, or all.
        seed: determines the order of each epoch.
        shuffle: whether each epoch has another order.
        uneven: what happens to a last global batch that is not full: "keep" splits it, "drop" leaves it out.
        collate: makes a batch of samples; by default it stacks their columns.
        columns: names of the columns to keep; None keeps all.
        global_batch_size: samples of all ranks in an update.
        lengths: one length per sample, to group batches by.

    Raises:
        ValueError: the pipeline is already sharded with ``num_shards``, the data set is empty, or
            ``global_batch_size`` is not a multiple of the pipeline's batch size.
        TypeError: the data set can be neither indexed nor iterated, or its samples are not dicts, nor objects whose
            attributes are the columns, and there is no ``collate``, which may take samples of any kind.
    """
    options = LoaderOptions(
        micro_batch_size, accumulation_steps, group or get_data_group(), group or get_process_group(), seed, shuffle,
        uneven, collate, columns, global_batch_size, lengths,
    )  # fmt: skip
    source = adapt(dataset)
    if lengths is not None and not isinstance(source, IndexedSource):
        raise ValueError(f"a {type(dataset).__name__} has no index, so its batches cannot be grouped by length")
    return source.loader(options)


def adapt(dataset: Any) -> Union[IndexedSource, PipelineSource, IterableSource]:
    """Return what reads a data set of this kind; raise TypeError if it can be neither indexed nor iterated."""
    if is_mindspore_dataset(dataset):
        return IndexedSource(_GeneratorRows(dataset)) if _has_index(dataset) else PipelineSource(dataset)
    if is_batch_reader(dataset):
        raise TypeError(
            f"a {type(dataset).__name__} yields batches, and ranks are given samples: pass its data set, and its "
            "collate_fn as data_collator (collate= of make_loader)"
        )
    # PyTorch's IterableDataset inherits a __getitem__ that raises.
    is_stream = any(each.__name__ == "IterableDataset" for each in type(dataset).__mro__)
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and not is_stream:
        return IndexedSource(dataset)
    if hasattr(dataset, "__iter__"):
        return IterableSource(dataset)
    raise TypeError(
        f"a {type(dataset).__name__} is not a data set: expected datasets.Dataset, a MindSpore data set, "
        "an object with __len__ and __getitem__, or an iterable of dicts"
    )


class IndexedSource:
    """A data set with an index; ``rows`` has ``__len__`` and ``__getitem__``."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def loader(self, options: LoaderOptions) -> IndexedLoader:
        check_same_samples(self._rows, options.readers, options.columns)
        check_same_lengths(options.lengths, options.readers)
        sampler = GlobalBatchSampler(
            len(self._rows), options.micro_batch_size, options.group.world_size, options.accumulation_steps,
            options.seed, options.shuffle, options.uneven, options.global_batch_size, options.lengths,
        )  # fmt: skip
        return IndexedLoader(
            self._rows, sampler, options.group, options.collate, options.columns, readers=options.readers
        )

    def lengths(self, column: str, main_input: str) -> np.ndarray:
        """Return each sample's length as int64: the value of ``column``, else the number of items in ``main_input``.

        Raises:
            ValueError: the samples have neither column.
        """
        rows = self._rows
        columns = getattr(rows, "column_names", None)
        if columns and column in columns:
            return np.asarray(rows[column], np.int64)
        if columns and main_input in columns:
            # A full column of tokens may not fit into memory.
            begins = range(0, len(rows), _ROWS_AT_A_TIME)
            parts = (rows[begin : begin + _ROWS_AT_A_TIME][main_input] for begin in begins)
            return np.array([len(tokens) for part in parts for tokens in part], np.int64)
        lengths = []
        for index in range(len(rows)):
            found = rows[index]
            sample = found if isinstance(found, Mapping) else getattr(found, "__dict__", {})
            if column not in sample and main_input not in sample:
                has = ", ".join(sample) or f"none: sample {index} is a {type(found).__name__}"
                raise ValueError(
                    f"group_by_length needs a column {column!r} or {main_input!r}, and samples have {has}; set "
                    "length_column_name"
                )
            lengths.append(int(sample[column]) if column in sample else len(sample[main_input]))
        return np.array(lengths, np.int64)


class PipelineSource:
    """A MindSpore pipeline without an index; the batches of a batched one are the global micro-batches."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline

    def loader(self, options: LoaderOptions) -> PipelineLoader:
        pipeline, readers = self._pipeline, options.readers
        if pipeline.is_sharded():
            raise ValueError(
                "this pipeline is already sharded by num_shards, and would be sharded twice: its rows would be split "
                f"among {options.group.world_size} ranks again. Build it without num_shards and shard_id; the trainer "
                "shards it"
            )
        size, accumulation_steps = options.global_micro_batch()
        if is_batched_pipeline(pipeline) or is_of_any_size(pipeline):
            num_samples = readers.run_on_rank0(lambda: _samples_in(pipeline), "counting the data pipeline's samples")
            batches = pipeline
        else:
            num_samples = readers.run_on_rank0(pipeline.get_dataset_size, "counting the data pipeline's samples")
            batches = _reusable(pipeline).batch(size)
        size = batches.get_batch_size()
        if size < 1 or is_of_any_size(batches):
            raise ValueError(
                "the batches of this pipeline have no fixed size (batch_size is a function, bucket_batch_by_length or "
                "batch_sampler); build it with .batch(NUMBER), or without batches: the trainer makes them"
            )
        if options.global_batch_size is not None:
            if options.global_batch_size % size:
                raise ValueError(
                    f"a global batch of {options.global_batch_size} samples is not a multiple of this "
                    f"pipeline's batches of {size}; build it without .batch(), or with one that divides"
                )
            accumulation_steps = options.global_batch_size // size

        def open_batches(epoch: int) -> Iterator[Batch]:
            for batch in _seeded_iterator(batches, options.seed, epoch):
                yield Batch(as_arrays(wanted(batch, options.columns)))

        num_batches = readers.run_on_rank0(batches.get_dataset_size, "counting the data pipeline's batches")
        is_counted = num_batches > 0
        return PipelineLoader(
            open_batches, num_batches if is_counted else None, options.group, accumulation_steps, batch_size=size,
            seed=options.seed, uneven=options.uneven, readers=readers,
            num_samples=num_samples if num_samples and is_counted else None,
        )  # fmt: skip


class IterableSource:
    """An iterable of samples, such as a stream, of unknown length."""

    def __init__(self, iterable: Any) -> None:
        self._iterable = iterable

    def loader(self, options: LoaderOptions) -> PipelineLoader:
        size, accumulation_steps = options.global_micro_batch()

        def open_batches(epoch: int) -> Iterator[Batch]:
            if isinstance(self._iterable, Iterator) and id(self._iterable) in _iterators_read:
                warnings.warn(
                    "this data set is an iterator, which can be read once, and is read again; pass an object whose "
                    "__iter__ starts from the beginning",
                    RuntimeWarning,
                    stacklevel=2,
                )
            if isinstance(self._iterable, Iterator):
                _iterators_read[id(self._iterable)] = self._iterable
            if hasattr(self._iterable, "set_epoch"):  # Hugging Face's streaming data sets shuffle by it.
                self._iterable.set_epoch(epoch)
            rows, begin, rank = iter(self._iterable), 0, options.readers.rank
            while chunk := list(itertools.islice(rows, size)):
                numbers = range(begin, begin + len(chunk))
                yield Batch(collated(chunk, numbers, rank, options.collate, options.columns), np.arange(len(chunk)))
                begin += len(chunk)

        return PipelineLoader(
            open_batches, None, options.group, accumulation_steps, batch_size=size, seed=options.seed,
            uneven=options.uneven, readers=options.readers,
        )  # fmt: skip


# Operations of MindSpore that leave the number of rows as it is.
_OF_SAME_ROWS = ("MapDataset", "ProjectDataset", "RenameDataset")


class _GeneratorRows:
    """Gives the rows of a MindSpore generator data set by index."""

    def __init__(self, dataset: Any) -> None:
        self._source, self._columns = dataset.source, dataset.column_names

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self._source[index]
        return dict(zip(self._columns, row if isinstance(row, (tuple, list)) else (row,)))


def _has_index(dataset: Any) -> bool:
    """Return whether this MindSpore data set yields each item of a source with an index once."""
    from mindspore.dataset import GeneratorDataset

    return (
        isinstance(dataset, GeneratorDataset)
        and hasattr(dataset.source, "__getitem__")
        and hasattr(dataset.source, "__len__")
        and not dataset.num_samples
        and not dataset.is_sharded()
        and not getattr(dataset, "has_batch_sampler", False)
        and (dataset.sampler is None or _takes_each_item_once(dataset.sampler))
    )


def _takes_each_item_once(sampler: Any) -> bool:
    """Return whether a MindSpore sampler is certain to take each item of a source once, in any order."""
    from mindspore.dataset import RandomSampler, SequentialSampler

    selections = ("num_samples", "start_index", "replacement", "child_sampler")
    return type(sampler) in (RandomSampler, SequentialSampler) and not any(
        getattr(sampler, name, None) for name in selections
    )


def is_batch_reader(dataset: Any) -> bool:
    """Return whether this is a ``DataLoader`` as PyTorch has it, which yields batches of a data set."""
    return hasattr(dataset, "collate_fn") and hasattr(dataset, "batch_size")


def is_mindspore_dataset(dataset: Any) -> bool:
    """Return whether this is a pipeline of ``mindspore.dataset``."""
    import mindspore.dataset

    return isinstance(dataset, mindspore.dataset.Dataset)


def mapped(dataset: Any, map_fn: Any) -> Any:
    """Return a MindSpore data set mapped with the Trainer's ``map_fn``; if that is None, the data set unchanged.

    Raises:
        ValueError: the data set is of another kind (``map_fn`` would not be called) or is batched (``map_fn`` would be
            called with batches).
    """
    if map_fn is None:
        return dataset
    if not is_mindspore_dataset(dataset) or is_batched_pipeline(dataset):
        kind = type(dataset).__name__
        raise ValueError(
            f"map_fn works on the samples of a MindSpore data set, and train_dataset is a {kind}"
            + (" that is batched already" if is_mindspore_dataset(dataset) else "")
            + "; leave map_fn out, and map the data set before it is passed, with its own map"
        )
    names = (getattr(map_fn, "input_columns", None), getattr(map_fn, "output_columns", None))
    return _reusable(dataset).map(map_fn, *names)


def is_batched_pipeline(dataset: Any) -> bool:
    """Tell whether this is a MindSpore pipeline that the user has batched; its batches are the global micro-batches."""
    return is_mindspore_dataset(dataset) and (dataset.get_batch_size() > 1 or is_batched(dataset))


def is_batched(dataset: Any) -> bool:
    """Return whether a pipeline of ``mindspore.dataset`` yields batches."""
    from mindspore.dataset import BatchDataset, PaddedBatchDataset

    return isinstance(dataset, (BatchDataset, PaddedBatchDataset)) or any(map(is_batched, dataset.children))


def is_of_any_size(dataset: Any) -> bool:
    """Return whether a pipeline of ``mindspore.dataset`` yields batches without a fixed size."""
    is_bucketed = type(dataset).__name__ == "BucketBatchByLengthDataset"
    is_sampled = getattr(dataset, "has_batch_sampler", False)
    return is_bucketed or is_sampled or any(map(is_of_any_size, dataset.children))


def _samples_in(pipeline: Any) -> Optional[int]:
    """Return a pipeline's number of samples; None unless it ends with fixed-size batches that keep the remainder."""
    from mindspore.dataset import BatchDataset

    while type(pipeline).__name__ in _OF_SAME_ROWS:
        [pipeline] = pipeline.children
    if not isinstance(pipeline, BatchDataset) or pipeline.drop_remainder:
        return None
    return int(pipeline.children[0].get_dataset_size()) if isinstance(pipeline.batch_size, int) else None


def _reusable(pipeline: Any) -> Any:
    """Return a copy of a MindSpore pipeline, so that an operation can be added to the same pipeline several times.

    MindSpore records each operation that was added to a pipeline, and refuses a pipeline with two of them ("The data
    pipeline is not a tree"), even if the first is no longer used. Here the record is kept on the copy.
    """
    again = copy.copy(pipeline)
    again.parent = []
    return again


def _seeded_iterator(pipeline: Any, seed: int, epoch: int) -> Iterator[dict[str, np.ndarray]]:
    """Return an iterator over the pipeline whose shuffles are a function of (seed, epoch).

    MindSpore's shuffles read the global seed when an iterator is made. A new iterator for each epoch, as MindNLP's
    Trainer makes it, would therefore repeat the same order.
    """
    from mindspore.dataset import config

    users_own = config.get_seed()
    config.set_seed(int(np.random.SeedSequence([seed, epoch]).generate_state(1)[0]))
    try:
        return pipeline.create_dict_iterator(num_epochs=1, output_numpy=True)
    finally:
        config.set_seed(users_own)
