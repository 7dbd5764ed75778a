"""This module tells whether a data set has an index or is batched, and how to read it; loaders and Trainers call it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, Optional

import numpy as np

_ROWS_AT_A_TIME = 1000


def is_mindspore_dataset(dataset: Any) -> bool:
    """Return whether this is a pipeline of ``mindspore.dataset``."""
    import mindspore.dataset

    return isinstance(dataset, mindspore.dataset.Dataset)


def reusable(pipeline: Any) -> Any:
    """Return a copy of a MindSpore pipeline, so that an operation can be added to the same pipeline several times.

    MindSpore records each operation that was added to a pipeline, and refuses a pipeline with two of them ("The data
    pipeline is not a tree"), even if the first is no longer used. Here the record is kept on the copy.
    """
    again = copy.copy(pipeline)
    again.parent = []
    return again


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
    return reusable(dataset).map(map_fn, *names)


def is_batched_pipeline(dataset: Any) -> bool:
    """Tell whether this is a MindSpore pipeline that the user has batched; its batches are the global micro-batches."""
    return is_mindspore_dataset(dataset) and (dataset.get_batch_size() > 1 or is_batched(dataset))


def samples_in(pipeline: Any) -> Optional[int]:
    """Return a pipeline's number of samples; None unless it ends with fixed-size batches that keep the remainder."""
    from mindspore.dataset import BatchDataset

    if not isinstance(pipeline, BatchDataset) or pipeline.drop_remainder:
        return None
    return int(pipeline.children[0].get_dataset_size()) if isinstance(pipeline.batch_size, int) else None


def is_batched(dataset: Any) -> bool:
    """Return whether a pipeline of ``mindspore.dataset`` yields batches."""
    from mindspore.dataset import BatchDataset, PaddedBatchDataset

    return isinstance(dataset, (BatchDataset, PaddedBatchDataset)) or any(map(is_batched, dataset.children))


def seeded_iterator(pipeline: Any, seed: int, epoch: int) -> Iterator[dict[str, np.ndarray]]:
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


class _GeneratorRows:
    """Gives the rows of a MindSpore generator data set by index."""

    def __init__(self, dataset: Any) -> None:
        self._source, self._columns = dataset.source, dataset.column_names

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self._source[index]
        return dict(zip(self._columns, row if isinstance(row, (tuple, list)) else (row,)))


def indexed_source(dataset: Any) -> Optional[Any]:
    """Return an object with ``__len__`` and ``__getitem__`` over the samples as dicts; None if it lacks an index."""
    if not is_mindspore_dataset(dataset):
        return dataset if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") else None
    from mindspore.dataset import GeneratorDataset, RandomSampler, SequentialSampler

    indexed = (
        isinstance(dataset, GeneratorDataset)
        and hasattr(dataset.source, "__getitem__")
        and hasattr(dataset.source, "__len__")
        and not dataset.num_samples
        and not dataset.is_sharded()
        and (dataset.sampler is None or type(dataset.sampler) in (RandomSampler, SequentialSampler))
    )
    return _GeneratorRows(dataset) if indexed else None


def check_row(sample: Any, index: int, rank: int) -> Mapping[str, Any]:
    """Return the sample unchanged if it is a dict; raise TypeError otherwise."""
    if not isinstance(sample, Mapping):
        raise TypeError(
            f"sample {index} is a {type(sample).__name__}, expected a dict of column names and values (rank {rank})"
        )
    return sample


def sample_lengths(source: Any, column: str, main_input: str) -> np.ndarray:
    """Return the length of each sample as int64: the value of ``column``, else the number of items in ``main_input``.

    Raises:
        ValueError: the samples have neither column.
    """
    columns = getattr(source, "column_names", None)
    if columns and column in columns:
        return np.asarray(source[column], np.int64)
    if columns and main_input in columns:
        # A full column of tokens may not fit into memory.
        parts = (
            source[begin : begin + _ROWS_AT_A_TIME][main_input] for begin in range(0, len(source), _ROWS_AT_A_TIME)
        )
        return np.array([len(tokens) for part in parts for tokens in part], np.int64)
    lengths = []
    for index in range(len(source)):
        sample = check_row(source[index], index, 0)
        if column not in sample and main_input not in sample:
            raise ValueError(
                f"group_by_length needs a column {column!r} or {main_input!r}, and samples have {', '.join(sample)}; "
                "set length_column_name"
            )
        lengths.append(int(sample[column]) if column in sample else len(sample[main_input]))
    return np.array(lengths, np.int64)
