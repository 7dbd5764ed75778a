"""This module reads a data set as this rank's micro-batches; the Trainers and custom training loops call it.

It accepts every kind of data set that MindNLP does. For every update a loader yields a window: the list of this rank's
micro-batches, each a dict of NumPy arrays (:class:`~mindnlp_dp.data.batches.Batch`), or None if the rank has no rows.
Every rank gets the same number of windows, and the same number of micro-batches in each.

There are two ways to shard data:

* **By index.** ``datasets.Dataset``, MindSpore's generator data sets over a source
  with an index, and any object with ``__len__`` and ``__getitem__``: each rank reads the
  indices of its shard (sampler.py).
* **By rows.** Batched, shuffled, mapped or streaming MindSpore pipelines, and plain
  iterables, have a fixed order: rank 0 reads them, and the rows of every batch
  are split among the ranks. A batch of such a pipeline is a *global* micro-batch.

A pipeline that the user has sharded with ``num_shards`` is refused: it would be sharded twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Callable, Optional, Union

import numpy as np

from mindnlp_dp.communication.default_group import get_data_group, get_process_group
from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.data.batch_sizes import accumulation_steps_to_keep, largest_divisor
from mindnlp_dp.data.batches import Batch, Collator, as_arrays, default_collate, num_rows_of
from mindnlp_dp.data.dataset_adapter import (
    check_row,
    indexed_source,
    is_batched_pipeline,
    is_mindspore_dataset,
    reusable,
    samples_in,
    seeded_iterator,
)
from mindnlp_dp.data.dataset_consistency import (
    check_same_lengths,
    check_same_samples,
    digest_of_lengths,
    sample_digests,
)
from mindnlp_dp.data.sampler import GlobalBatchSampler
from mindnlp_dp.runtime.partition import split_evenly


class IndexedLoader:
    """Reads this rank's shard of a source with an index; made by :func:`make_loader`."""

    def __init__(
        self,
        dataset: Any,
        sampler: GlobalBatchSampler,
        group: ProcessGroup,
        collate: Optional[Collator] = None,
        columns: Optional[Sequence[str]] = None,
        *,
        readers: Optional[ProcessGroup] = None,
    ) -> None:
        self.dataset = dataset
        self.sampler = sampler
        self._group = group
        self._readers = readers or group
        self._sample_digests: Optional[dict[str, str]] = None
        self._collate = collate or default_collate
        self._columns = columns

    @property
    def num_samples(self) -> int:
        return self.sampler.num_samples

    @property
    def order(self) -> dict[str, Any]:
        """Values that identify the samples and their order; a resumed run must have the same ones. A collective."""
        own = {name: getattr(self.sampler, name) for name in ("num_samples", "seed", "shuffle", "uneven")}
        return {**own, "lengths": self.digest_of_lengths, "samples": self.sample_digests}

    @property
    def sample_digests(self) -> dict[str, str]:
        """A hash of each column over a few samples. The first access is a collective."""
        if self._sample_digests is None:
            self._sample_digests = sample_digests(self.dataset, self._readers, self._columns)
        return self._sample_digests

    @property
    def digest_of_lengths(self) -> Optional[str]:
        """A digest of the sample lengths by which batches are grouped; None if they are not grouped by length."""
        return digest_of_lengths(self.sampler.lengths)

    @property
    def global_batch_size(self) -> int:
        """Number of samples in an update, over all ranks."""
        return self.sampler.global_batch_size

    @property
    def micro_steps(self) -> int:
        """Number of micro-batches per rank in a full update."""
        sampler = self.sampler
        return accumulation_steps_to_keep(self.global_batch_size, sampler.micro_batch_size * sampler.world_size)

    def __len__(self) -> int:
        """Return the number of windows in an epoch."""
        return self.sampler.num_updates

    def windows(self, epoch: int = 0, start: int = 0, offset: int = 0) -> Iterator[list[Optional[Batch]]]:
        """Yield this rank's windows of ``epoch`` from update ``start`` on, each shifted by ``offset`` samples."""
        for window in self.sampler.shard_indices(self._group.rank, epoch, start, offset):
            yield [self._read(indices) if len(indices) else None for indices in window]

    def _read(self, indices: np.ndarray) -> Batch:
        # PyTorch's protocol for reading many rows at once, which datasets.Dataset implements.
        if hasattr(self.dataset, "__getitems__"):
            rows = self.dataset.__getitems__(indices.tolist())
        else:
            rows = [self.dataset[int(index)] for index in indices]
        if rows:
            check_row(rows[0], int(indices[0]), self._group.rank)
        if self._columns is not None:
            rows = [{name: value for name, value in row.items() if name in self._columns} for row in rows]
        return Batch(as_arrays(self._collate(rows)), indices)


class PipelineLoader:
    """Reads a pipeline on rank 0, in the pipeline's order, and splits the rows of every batch among the ranks.

    Args:
        open_batches: starts an epoch and returns its batches; called as ``open_batches(epoch)``, only on rank 0 of
            ``readers``.
        group: the ranks among which the rows are split.
        readers: the ranks that rank 0 sends the batches to; by default ``group``, more when the model is sharded and
            several groups train on the same rows.
    """

    def __init__(
        self,
        open_batches: Callable[[int], Iterator[Batch]],
        num_batches: Optional[int],
        group: ProcessGroup,
        accumulation_steps: int = 1,
        *,
        batch_size: int,
        seed: int = 0,
        uneven: str = "keep",
        readers: Optional[ProcessGroup] = None,
        num_samples: Optional[int] = None,
    ) -> None:
        self._num_samples = num_samples
        self._open_batches = open_batches
        self._group = group
        self._readers = readers or group
        self._accumulation_steps = accumulation_steps
        self._seed = seed
        self._uneven = uneven
        self._num_batches = num_batches
        self._batch_size = batch_size
        # The columns found so far that do not have a row per sample.
        self._whole: set[str] = set()

    @property
    def global_batch_size(self) -> int:
        """Number of samples in an update, over all ranks."""
        return self._batch_size * self._accumulation_steps

    @property
    def micro_steps(self) -> int:
        """Number of micro-batches per rank in a full update."""
        return self._accumulation_steps

    @property
    def num_samples(self) -> Optional[int]:
        """Number of samples, or an upper bound if the pipeline's batches may be short; None for a stream."""
        if self._num_samples is not None or self._num_batches is None:
            return self._num_samples
        return self._num_batches * self._batch_size

    @property
    def order(self) -> dict[str, Any]:
        """The settings that determine the order of this loader's rows; a resumed run must have the same ones."""
        return {"num_samples": self.num_samples, "seed": self._seed, "uneven": self._uneven}

    # The samples of a pipeline cannot be read by index.
    digest_of_lengths = sample_digests = None

    def __len__(self) -> int:
        """Return the number of windows in an epoch; raise TypeError for a stream of unknown length."""
        if self._num_batches is None:
            raise TypeError("this stream has no known length")
        if self._uneven == "drop" and self._num_samples is not None:
            return self._num_samples // self.global_batch_size
        full, rest = divmod(self._num_batches, self._accumulation_steps)
        return full + (rest > 0 and self._uneven == "keep")

    def windows(self, epoch: int = 0, start: int = 0, offset: int = 0) -> Iterator[list[Optional[Batch]]]:
        """Return this rank's windows of ``epoch``; the first ``start`` windows are read at once and discarded."""
        assert offset == 0, "a pipeline has its batches"
        windows = self._windows(epoch)
        for _ in itertools.islice(windows, start):
            pass
        return windows

    def _windows(self, epoch: int) -> Iterator[list[Optional[Batch]]]:
        batches: Iterator[Batch] = iter(())
        if self._readers.is_main:
            batches = self._open_batches(epoch)

        def read() -> list[Batch]:
            nonlocal batches
            window = list(itertools.islice(batches, self._accumulation_steps))
            if self._uneven == "drop" and sum(map(num_rows_of, window)) < self.global_batch_size:
                # A pipeline may have short batches before its end, too: only the last window is dropped.
                following = list(itertools.islice(batches, 1))
                batches = itertools.chain(following, batches)
                return window if following else []
            return window

        rows_read = 0
        while window := self._readers.run_on_rank0(read, "reading the data pipeline"):
            mine = []
            for batch in window:
                mine.append(self._my_rows(batch, rows_read))
                rows_read += num_rows_of(batch)
            yield mine

    def _my_rows(self, batch: Batch, rows_before: int) -> Optional[Batch]:
        num_rows = num_rows_of(batch)
        # A column without a row per sample may by chance have as many rows as a short last batch: remember it.
        self._whole |= {name for name, x in batch.items() if x.shape[:1] != (num_rows,)}
        first, last = split_evenly(num_rows, self._group.world_size, self._group.rank)
        if first == last:
            return None
        rows = {name: x if name in self._whole else x[first:last] for name, x in batch.items()}
        return Batch(rows, np.arange(rows_before + first, rows_before + last))


Loader = Union[IndexedLoader, PipelineLoader]


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

    ``micro_batch_size`` is a rank's, and ``accumulation_steps`` micro-batches make the window of an update. With
    ``global_batch_size``, an update has that many samples over all ranks, and the number of accumulation steps follows
    from it; micro-batches may then be smaller than ``micro_batch_size``, never larger. ``columns`` names the columns to
    keep (None: all). ``shuffle``, ``seed``, ``collate`` and ``lengths`` (the samples' lengths, to group batches by) are
    for sources with an index; a pipeline has its own order and batches.

    Raises:
        ValueError: the pipeline is already sharded with ``num_shards``, the data set is empty, or
            ``global_batch_size`` is not a multiple of the pipeline's batch size.
        TypeError: the data set can be neither indexed nor iterated, or its samples are not dicts.
    """
    readers = group or get_process_group()  # With a sharded model several ranks read the same samples.
    group = group or get_data_group()
    source = indexed_source(dataset)
    if source is not None:
        check_same_samples(source, readers, columns)
        check_same_lengths(lengths, readers)
        sampler = GlobalBatchSampler(
            len(source), micro_batch_size, group.world_size, accumulation_steps, seed, shuffle, uneven,
            global_batch_size, lengths,
        )  # fmt: skip
        return IndexedLoader(source, sampler, group, collate, columns, readers=readers)
    if lengths is not None:
        raise ValueError(f"a {type(dataset).__name__} has no index, so its batches cannot be grouped by length")
    global_micro_batch_size = micro_batch_size * group.world_size
    if global_batch_size is not None:
        global_micro_batch_size = largest_divisor(global_batch_size, global_micro_batch_size)
        accumulation_steps = global_batch_size // global_micro_batch_size
    if is_mindspore_dataset(dataset):
        if dataset.is_sharded():
            raise ValueError(
                "this pipeline is already sharded by num_shards, and would be sharded twice: its rows would be split "
                f"among {group.world_size} ranks again. Build it without num_shards and shard_id; the trainer shards it"
            )
        # The batches of a pipeline that the user has batched are the global micro-batches.
        if is_batched_pipeline(dataset):
            pipeline = dataset
            num_samples = readers.run_on_rank0(lambda: samples_in(pipeline), "counting the data pipeline's samples")
        else:
            num_samples = readers.run_on_rank0(dataset.get_dataset_size, "counting the data pipeline's samples")
            pipeline = reusable(dataset).batch(global_micro_batch_size)

        size = pipeline.get_batch_size()
        if global_batch_size is not None:
            if global_batch_size % size:
                raise ValueError(
                    f"a global batch of {global_batch_size} samples cannot be made of this pipeline's batches of "
                    f"{size}; build it without .batch(), or with one that divides"
                )
            accumulation_steps = global_batch_size // size

        def open_pipeline(epoch: int) -> Iterator[Batch]:
            for batch in seeded_iterator(pipeline, seed, epoch):
                yield Batch({name: array for name, array in batch.items() if columns is None or name in columns})

        num_batches = readers.run_on_rank0(pipeline.get_dataset_size, "counting the data pipeline's batches")
        return PipelineLoader(
            open_pipeline,
            num_batches if num_batches > 0 else None,
            group,
            accumulation_steps,
            batch_size=size,
            seed=seed,
            uneven=uneven,
            readers=readers,
            num_samples=num_samples if num_samples and num_batches > 0 else None,
        )
    if not hasattr(dataset, "__iter__"):
        raise TypeError(
            f"a {type(dataset).__name__} is not a data set: expected datasets.Dataset, a MindSpore data set, "
            "an object with __len__ and __getitem__, or an iterable of dicts"
        )

    def open_iterable(epoch: int) -> Iterator[Batch]:
        if hasattr(dataset, "set_epoch"):  # Hugging Face's streaming data sets shuffle by it.
            dataset.set_epoch(epoch)
        rows = iter(dataset)
        while chunk := list(itertools.islice(rows, global_micro_batch_size)):
            if columns is not None:
                chunk = [{name: value for name, value in row.items() if name in columns} for row in chunk]
            yield Batch(as_arrays((collate or default_collate)(chunk)), np.arange(len(chunk)))

    return PipelineLoader(
        open_iterable, None, group, accumulation_steps,
        batch_size=global_micro_batch_size, seed=seed, uneven=uneven, readers=readers,
    )  # fmt: skip
