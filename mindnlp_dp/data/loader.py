"""This module reads data as this rank's micro-batches; dataset_adapter.py creates the loader for a data set.

For every update a loader yields an update: the list of this rank's micro-batches, each a dict of NumPy arrays
(:class:`~mindnlp_dp.data.batches.Batch`), or None if the rank has no rows. Every rank gets the same number of updates,
and the same number of micro-batches in each.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Callable, Optional, Union

import numpy as np

from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.data.batches import Batch, Collator, collated, num_rows_of
from mindnlp_dp.data.dataset_consistency import digest_of_lengths, sample_digests
from mindnlp_dp.data.sampler import GlobalBatchSampler, accumulation_steps_to_keep
from mindnlp_dp.runtime.random_state import reading
from mindnlp_dp.runtime.shard_bounds import split_evenly


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
        self._collate = collate
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
    def micro_batch_size(self) -> int:
        """Number of samples in the largest micro-batch of a rank."""
        return len(self.sampler.shard_positions(self.global_batch_size, 0)[0])

    @property
    def micro_steps(self) -> int:
        """Number of micro-batches per rank in a full update."""
        sampler = self.sampler
        return accumulation_steps_to_keep(self.global_batch_size, sampler.micro_batch_size * sampler.world_size)

    def __len__(self) -> int:
        """Return the number of updates in an epoch."""
        return self.sampler.num_updates

    def updates(self, epoch: int = 0, start: int = 0, offset: int = 0) -> Iterator[list[Optional[Batch]]]:
        """Yield this rank's updates of ``epoch`` from update ``start`` on, each shifted by ``offset`` samples."""
        for number, batch in enumerate(self.sampler.global_batches(epoch, start, offset), start):
            shards = self.sampler.shard_positions(len(batch), self._group.rank)
            fewest = self.sampler.shard_positions(len(batch), self._group.world_size - 1)
            with reading(self.sampler.seed, self._group.rank, epoch, number):
                micro_batches = [
                    self._read(batch[positions], positions, bool(len(least))) if len(positions) else None
                    for positions, least in zip(shards, fewest)
                ]
            yield micro_batches

    def _read(self, indices: np.ndarray, positions: np.ndarray, is_on_all_ranks: bool) -> Batch:
        # PyTorch's protocol for reading many rows at once, which datasets.Dataset implements.
        if hasattr(self.dataset, "__getitems__"):
            rows = self.dataset.__getitems__(indices.tolist())
        else:
            rows = [self.dataset[int(index)] for index in indices]
        columns = collated(rows, indices.tolist(), self._group.rank, self._collate, self._columns)
        return Batch(columns, indices, positions, is_on_all_ranks=is_on_all_ranks)


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
        self._without_rows: set[str] = set()

    @property
    def global_batch_size(self) -> int:
        """Number of samples in an update, over all ranks."""
        return self._batch_size * self._accumulation_steps

    @property
    def micro_batch_size(self) -> int:
        """Number of samples in the largest micro-batch of a rank."""
        return -(-self._batch_size // self._group.world_size)

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
        """Return the number of updates in an epoch; raise TypeError for a stream of unknown length."""
        if self._num_batches is None:
            raise TypeError("this stream has no known length")
        if self._uneven == "drop" and self._num_samples is not None:
            return self._num_samples // self.global_batch_size
        full, rest = divmod(self._num_batches, self._accumulation_steps)
        return full + (rest > 0 and self._uneven == "keep")

    def updates(self, epoch: int = 0, start: int = 0, offset: int = 0) -> Iterator[list[Optional[Batch]]]:
        """Return this rank's updates of ``epoch``; the first ``start`` updates are read at once and discarded."""
        assert offset == 0, "a pipeline has its batches"
        updates = self._updates(epoch)
        for _ in itertools.islice(updates, start):
            pass
        return updates

    def _updates(self, epoch: int) -> Iterator[list[Optional[Batch]]]:
        batches: Iterator[Batch] = iter(())
        if self._readers.is_main:
            batches = self._open_batches(epoch)

        numbers = itertools.count()

        def read() -> list[Batch]:
            with reading(self._seed, self._readers.rank, epoch, next(numbers)):
                return read_update()

        def read_update() -> list[Batch]:
            nonlocal batches
            micro_batches = list(itertools.islice(batches, self._accumulation_steps))
            if self._uneven == "drop" and sum(map(num_rows_of, micro_batches)) < self.global_batch_size:
                # A pipeline may have short batches before its end, too: only the last update is dropped.
                following = list(itertools.islice(batches, 1))
                batches = itertools.chain(following, batches)
                return micro_batches if following else []
            return micro_batches

        rows_read = 0
        while micro_batches := self._readers.run_on_rank0(read, "reading the data pipeline"):
            mine, first = [], rows_read
            for batch in micro_batches:
                mine.append(self._my_rows(batch, rows_read, rows_read - first))
                rows_read += num_rows_of(batch)
            yield mine

    def _my_rows(self, batch: Batch, rows_before: int, position: int) -> Optional[Batch]:
        """Return this rank's rows of a batch that begins at ``position`` of its global batch."""
        num_rows = num_rows_of(batch)
        # A column without a row per sample may by chance have as many rows as a short last batch: remember it.
        self._without_rows |= {name for name, x in batch.items() if x.shape[:1] != (num_rows,)}
        if batch and self._group.world_size > 1 and set(batch) <= self._without_rows:
            sizes = ", ".join(f"{name}: {len(x) if x.ndim else 'one number'}" for name, x in batch.items())
            raise ValueError(
                f"no column of a batch has a row for each of its {num_rows} samples ({sizes}), so it cannot be split "
                f"among {self._group.world_size} ranks (rank {self._group.label()}); let the data set, and not the "
                "collator, pack or select samples"
            )
        first, last = split_evenly(num_rows, self._group.world_size, self._group.rank)
        if first == last:
            return None
        rows = {name: x if name in self._without_rows else x[first:last] for name, x in batch.items()}
        mine = np.arange(first, last)
        is_on_all_ranks = num_rows >= self._group.world_size
        return Batch(rows, rows_before + mine, position + mine, is_on_all_ranks=is_on_all_ranks)


Loader = Union[IndexedLoader, PipelineLoader]
