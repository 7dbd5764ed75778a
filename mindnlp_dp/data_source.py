"""What a data set can do: whether it has an index, whether it is batched, and whether all ranks hold the same one.

Goes in: a data set of any kind that MindNLP's users have. Comes out: a source with
``__len__`` and ``__getitem__`` where there is one, or an iterator over batches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, Optional

import numpy as np

from .process_group import ProcessGroup

# How many samples are compared among the ranks before they are trusted to hold the same data.
NUM_PROBES = 8


def is_mindspore_dataset(dataset: Any) -> bool:
    import mindspore.dataset

    return isinstance(dataset, mindspore.dataset.Dataset)


def mapped(dataset: Any, map_fn: Any) -> Any:
    """A MindSpore data set through the Trainer's ``map_fn``; any other data set, and without one, as it is."""
    if map_fn is None or not is_mindspore_dataset(dataset):
        return dataset
    return dataset.map(map_fn, getattr(map_fn, "input_columns", None), getattr(map_fn, "output_columns", None))


def is_batched(dataset: Any) -> bool:
    from mindspore.dataset import BatchDataset, PaddedBatchDataset

    return isinstance(dataset, (BatchDataset, PaddedBatchDataset)) or any(map(is_batched, dataset.children))


def seeded_iterator(pipeline: Any, seed: int, epoch: int) -> Iterator[dict[str, np.ndarray]]:
    """An iterator whose shuffles are a function of (seed, epoch).

    MindSpore's shuffles take the global seed when an iterator is made, and so repeat one order
    every epoch when a new iterator is made for each, as MindNLP's Trainer does.
    """
    from mindspore.dataset import config

    users_own = config.get_seed()
    config.set_seed(int(np.random.SeedSequence([seed, epoch]).generate_state(1)[0]))
    try:
        return pipeline.create_dict_iterator(num_epochs=1, output_numpy=True)
    finally:
        config.set_seed(users_own)


class _GeneratorRows:
    """The rows of a MindSpore generator data set, by index."""

    def __init__(self, dataset: Any) -> None:
        self._source, self._columns = dataset.source, dataset.column_names

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self._source[index]
        return dict(zip(self._columns, row if isinstance(row, (tuple, list)) else (row,)))


def indexed_source(dataset: Any) -> Optional[Any]:
    """An object with ``__len__`` and ``__getitem__`` that gives ``dataset``'s samples as dicts, if there is one."""
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


def check_same_samples(source: Any, group: ProcessGroup) -> None:
    """Raise on every rank when ranks hold other samples, or the same ones in another order.

    The order of a shard is one of indices: behind them, every rank must find the same samples. A few
    are compared; a source that gives another sample each time it is asked (random augmentation) is not.

    Raises:
        ValueError: the numbers of samples, or the samples at an index, differ.
    """
    if group.world_size == 1:
        return
    sizes = group.all_gather_object(len(source))
    for rank, size in enumerate(sizes):
        if size != sizes[0]:
            raise ValueError(
                f"rank 0 holds {sizes[0]} samples where rank {rank} holds {size}; give every rank the whole data set, "
                "the trainer shards it"
            )
    probes = np.unique(np.linspace(0, sizes[0] - 1, NUM_PROBES).astype(int)).tolist() if sizes[0] else []
    mine = [_fingerprint(source, index) for index in probes]
    everyone = group.all_gather_object(mine)
    for at, index in enumerate(probes):
        prints = [theirs[at] for theirs in everyone]
        other = next((rank for rank, theirs in enumerate(prints) if theirs != prints[0]), None)
        if other is not None and None not in prints:
            raise ValueError(
                f"sample {index} of rank {other} is not that of rank 0: the data set was shuffled or built with a "
                "seed that differs by rank; give every rank the same one, the trainer shuffles and shards it"
            )


def _fingerprint(source: Any, index: int) -> Optional[str]:
    """A hash of a sample; None when it is another one each time."""
    first, second = (hashlib.blake2b(_flatten(source[index]), digest_size=8).hexdigest() for _ in range(2))
    return first if first == second else None


def _flatten(sample: Any) -> bytes:
    if isinstance(sample, Mapping):
        return b"".join(name.encode() + _flatten(sample[name]) for name in sorted(sample))
    array = np.asarray(sample)
    return repr(sample).encode() if array.dtype == object else str(array.shape).encode() + array.tobytes()
