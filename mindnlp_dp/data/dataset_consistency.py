"""This module checks that all ranks hold the same samples in the same order; :func:`~mindnlp_dp.make_loader` calls it.

An error, the same on every rank, shows the first difference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import numpy as np

from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.runtime.arrays import fingerprint, to_host

# The number of samples that are compared among the ranks.
NUM_PROBES = 8

# How many characters of a difference are shown; arrays of more values are compared and shown by their hash.
LENGTH_SHOWN, NUM_VALUES_SHOWN = 48, 1000


def check_same_samples(source: Any, group: ProcessGroup, columns: Optional[Sequence[str]] = None) -> None:
    """Raise on every rank if ranks hold different samples, or the same samples in another order. A collective.

    Ranks are sharded by index, so every rank must find the same sample at an index. A few samples are compared, column
    by column (``columns``; None: all). A column is skipped if its value changes with every read (random augmentation)
    or is an object that cannot be compared across processes.

    Raises:
        ValueError: the numbers of samples, or the samples at an index, differ.
    """
    if group.world_size == 1:
        return
    size = group.run_on(True, lambda: len(source), "counting the samples")
    sizes = group.all_gather_object(size)
    for rank, theirs in enumerate(sizes):
        if theirs != sizes[0]:
            raise ValueError(
                f"rank 0 holds {sizes[0]} samples where rank {rank} holds {theirs}; give every rank the whole data "
                "set, the trainer shards it"
            )
    probes = _probes(sizes[0])
    texts = group.run_on(
        True, lambda: [_texts(source, index, columns) for index in probes], "reading samples to compare"
    )
    mine = texts or []
    differing = _first_difference(group.all_gather_object([_hashes(sample) for sample in mine]))
    if differing is None:
        return
    at, rank, name = differing
    shown = group.all_gather_object(mine[at].get(name) or "nothing")
    others, rank_0s = _around_the_difference(shown[rank], shown[0])
    raise ValueError(
        f"sample {probes[at]} of rank {rank} is not that of rank 0: its column {name!r} holds {others}, rank 0's "
        f"{rank_0s}; the data set was shuffled or built with a seed that differs by rank; give every rank the same "
        "one, the trainer shuffles and shards it"
    )


def sample_digests(source: Any, group: ProcessGroup, columns: Optional[Sequence[str]] = None) -> dict[str, str]:
    """Return a hash of each column over a few samples that rank 0 reads; the same on every rank. A collective.

    A resumed run compares these hashes with those in the checkpoint. Columns that :func:`check_same_samples` skips are
    not included.
    """

    def read() -> dict[str, str]:
        samples = [_texts(source, index, columns) for index in _probes(len(source))]
        texts = {name: [sample.get(name) for sample in samples] for name in {n: None for s in samples for n in s}}
        return {
            name: hashlib.blake2b("\n".join(map(str, column)).encode(), digest_size=8).hexdigest()
            for name, column in texts.items()
            if None not in column
        }

    digests: dict[str, str] = group.run_on_rank0(read, "reading samples to know the data again")
    return digests


def _probes(num_samples: Optional[int]) -> list[int]:
    """Return the indices of the samples to compare: evenly spread, with the first and the last of the data set."""
    return np.unique(np.linspace(0, num_samples - 1, NUM_PROBES).astype(int)).tolist() if num_samples else []


def _first_difference(everyone: list[list[dict[str, Optional[str]]]]) -> Optional[tuple[int, int, str]]:
    """Return the first ``(probe, rank, column)`` whose hash differs from rank 0's; None if all are equal."""
    # A column that one rank cannot compare in one sample is skipped in all samples.
    skipped = {name for hashes in everyone for row in hashes for name, value in row.items() if value is None}
    for at, rank_0s in enumerate(everyone[0]):
        for rank, hashes in enumerate(everyone):
            for name in {**rank_0s, **hashes[at]}:
                if name not in skipped and hashes[at].get(name) != rank_0s.get(name):
                    return at, rank, name
    return None


def _around_the_difference(one: str, other: str) -> tuple[str, str]:
    """Return the part of both texts around the place where they begin to differ."""
    same = next((at for at, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
    start = max(0, same - LENGTH_SHOWN // 2)
    end = start + LENGTH_SHOWN
    first, second = (f"{'...' * (start > 0)}{x[start:end]}{'...' * (len(x) > end)}" for x in (one, other))
    return first, second


def _hashes(texts: dict[str, Optional[str]]) -> dict[str, Optional[str]]:
    return {
        name: None if text is None else hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        for name, text in texts.items()
    }


def _texts(source: Any, index: int, columns: Optional[Sequence[str]]) -> dict[str, Optional[str]]:
    """Return a sample's columns as texts; None for a column that changes with every read or cannot be compared."""

    def read() -> dict[str, Optional[str]]:
        return {name: _text_of_column(value) for name, value in _items(source[index], columns).items()}

    first, second = read(), read()
    return {name: first.get(name) if first.get(name) == second.get(name) else None for name in {**first, **second}}


def _items(sample: Any, columns: Optional[Sequence[str]]) -> Mapping[str, Any]:
    """Return what is compared of a sample by name: the used columns, items, attributes, or the sample itself."""
    if isinstance(sample, Mapping):
        return {name: value for name, value in sample.items() if columns is None or name in columns}
    if isinstance(sample, (tuple, list)):
        return {f"item {number}": item for number, item in enumerate(sample)}
    is_object = hasattr(sample, "__dict__") and not hasattr(sample, "dtype")
    return vars(sample) if is_object else {"the sample": sample}


class _UnknownKindError(TypeError):
    """The value is of a type that cannot be compared across processes."""


def _text_of_column(value: Any) -> Optional[str]:
    try:
        return _text(value)
    except _UnknownKindError:
        return None


def _text(value: Any) -> str:
    """Return a text for ``value`` that is the same for equal values in any process."""
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return ascii(value)
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{_text(key)}: {_text(item)}' for key, item in value.items()))}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
    elif hasattr(value, "asnumpy"):
        array = to_host(value)
    else:
        raise _UnknownKindError(type(value).__name__)
    if array.dtype.names is not None:
        return _text({name: array[name] for name in array.dtype.names})
    if array.dtype.hasobject or array.size <= NUM_VALUES_SHOWN:
        values = _text(array.tolist()) if array.dtype.hasobject else ascii(array.tolist())
    else:
        values = f"of hash {hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=8).hexdigest()}"
    return f"{array.dtype} {array.shape} {values}"


def digest_of_lengths(lengths: Optional[np.ndarray]) -> Optional[str]:
    """Return a digest of the sample lengths by which batches are grouped; None if they are not grouped by length."""
    return None if lengths is None else fingerprint(np.asarray(lengths, np.int64)).hex()


def check_same_lengths(lengths: Optional[np.ndarray], group: ProcessGroup) -> None:
    """Raise ValueError on every rank if sample lengths, and so batches, would differ among ranks. A collective."""
    digests = group.all_gather_object(digest_of_lengths(lengths))
    if len(set(digests)) > 1:
        raise ValueError(f"ranks have different lengths for the same samples: their digests, by rank, are {digests}")
