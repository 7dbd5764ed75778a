"""This module defines batches: it collates samples into columns, slices them and calls functions with them.

A column is an array with one row per sample. Loaders, pipelines and the evaluation use this module.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable, Optional

import numpy as np

from mindnlp_dp.communication.default_group import get_process_group
from mindnlp_dp.runtime.random_state import MaskRecord, SampleStreams

Columns = dict[str, np.ndarray]
Collator = Callable[[Sequence[Any]], Mapping[str, Any]]

# The names of labels in a sample.
_LABELS = ("label", "labels", "label_ids")


@dataclass(frozen=True)
class ColumnCollator:
    """A collator that takes samples with columns only, as the library's default collators do."""

    collate: Collator

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        return self.collate(samples)


class Batch(dict[str, Any]):
    """A dict of columns by name, with the data set indices of its rows; every loader yields these.

    A column whose length is not that of ``indices``, such as class weights, belongs to the batch and not to its rows.

    Attributes:
        indices: the data set index of each row, int64 of shape ``(rows,)``; for a pipeline, which has no index, the
            position of each row in its order. By default 0, 1, ... for the rows of the first column.
        positions: the position of each row in the update's global batch, int64 of shape ``(rows,)``; None if unknown.
        is_on_all_ranks: whether all ranks are known to have rows in this micro-step.

    Raises:
        ValueError: there is not one position for each row, or one is negative.
    """

    def __init__(
        self,
        columns: Mapping[str, Any],
        indices: Optional[np.ndarray] = None,
        positions: Optional[np.ndarray] = None,
        *,
        is_on_all_ranks: bool = False,
    ) -> None:
        super().__init__(columns)
        self.is_on_all_ranks = is_on_all_ranks
        self.positions = None if positions is None else np.asarray(positions, np.int64)
        self.indices = np.arange(_rows_of_first_column(columns)) if indices is None else indices
        if self.positions is not None and (self.positions.shape != (len(self.indices),) or (self.positions < 0).any()):
            raise ValueError(
                f"positions must be {len(self.indices)} numbers that are not negative, one for each row; got "
                f"{self.positions.tolist()}"
            )


def default_collate(rows: Sequence[Mapping[str, Any]]) -> Columns:
    """Stack the samples' columns: values of shape ``s`` become arrays of shape ``(rows, *s)``.

    A column ``label`` is renamed to ``labels``, the name that models expect.

    Raises:
        ValueError: the samples' shapes or columns differ.
        TypeError: a column has numbers in some samples, and texts or None in others.
    """
    check_same_columns(rows)
    batch: Columns = {}
    for name in rows[0]:
        values = [np.asarray(row[name]) for row in rows]
        if len({value.shape for value in values}) > 1:
            raise ValueError(
                f"the samples' {name!r} have different shapes, {values[0].shape} and "
                f"{next(v.shape for v in values if v.shape != values[0].shape)} among them; "
                "pad them to one length, or pass a data_collator that does"
            )
        if len({_holds_numbers(value) for value in values}) > 1:
            raise TypeError(f"the samples' {name!r} are numbers in some samples, and texts or None in others")
        batch["labels" if name == "label" and "labels" not in rows[0] else name] = np.stack(values)
    return batch


def check_same_columns(rows: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if a sample of a batch has a column that another one lacks."""
    for number, row in enumerate(rows):
        if row.keys() != rows[0].keys():
            names = ", ".join(sorted(map(repr, row.keys() ^ rows[0].keys())))
            raise ValueError(
                f"samples 0 and {number} of a batch do not have the same columns: one does not have {names}"
            )


def as_arrays(batch: Mapping[str, Any]) -> Columns:
    """Convert a collator's result to NumPy arrays; float64, the type of Python's floats, becomes float32.

    Labels and ids become int64 (:func:`widened`).

    Raises:
        TypeError: the result is not a dict.
    """
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"the data_collator returned a {type(batch).__name__}, expected a dict of column names and arrays"
        )
    arrays = {name: np.asarray(x.asnumpy() if hasattr(x, "asnumpy") else x) for name, x in batch.items()}
    arrays = {name: a.astype(np.float32) if a.dtype == np.float64 else a for name, a in arrays.items()}
    return {name: widened(name, a) for name, a in arrays.items()}


def widened(name: str, column: Any) -> Any:
    """Return a column of labels or ids that are integers of any width, or one bool for each row, as int64.

    Models of MindNLP take labels of other types for several labels per sample.
    """
    if not isinstance(column, np.ndarray) or not name.endswith(("label", "labels", "_ids", "_positions")):
        return column
    is_class = column.dtype == bool and math.prod(column.shape[1:]) == 1 and column.ndim > 0
    is_narrow = column.dtype.kind in "iu" and column.dtype not in (np.int32, np.int64)
    return column.astype(np.int64) if is_class or is_narrow else column


def streams_of(batch: Any, key: int, record: MaskRecord, num_virtual_tokens: int = 0) -> SampleStreams:
    """Return the random streams of a batch's samples; ``key`` is that of the update, ``record`` is the run's.

    A model with prompt or prefix tuning puts ``num_virtual_tokens`` before each text.
    """
    columns = batch if isinstance(batch, Mapping) else {}
    texts = {name: x for name, x in columns.items() if getattr(x, "ndim", 0) in (2, 3)}
    return SampleStreams(
        key,
        getattr(batch, "positions", None),
        lengths=frozenset(int(x.shape[-1]) + more for x in texts.values() for more in {0, num_virtual_tokens}),
        choices=frozenset(int(x.shape[1]) for x in texts.values() if x.ndim == 3),
        starts=_starts_of(texts, record),
        record=record,
    )


def _starts_of(texts: Mapping[str, Any], record: MaskRecord) -> dict[int, np.ndarray]:
    """Return by length the index of each text's first token, (rows, choices or 1), if one is padded on the left."""
    starts: dict[int, np.ndarray] = {}
    for name, mask in texts.items():
        # A mask of one more dimension, (rows, tokens, tokens), says which token sees which.
        if name.endswith("attention_mask") and mask.shape[1:-1] != mask.shape[-1:]:
            counts = np.asarray(mask.asnumpy() if hasattr(mask, "asnumpy") else mask) != 0
            mine = counts.argmax(-1).reshape(len(counts), -1)
            known = starts.setdefault(int(counts.shape[-1]), mine)
            if not record.doubt and not np.array_equal(known, mine):
                record.doubt = "texts of two columns have the same length and are padded on the left"
    return {length: mine for length, mine in starts.items() if mine.any()}


def num_rows_of(batch: Any) -> int:
    """Return the number of rows of a batch of any form: columns by name, a tuple or list of arrays, or one array.

    A :class:`Batch` knows it; for other forms it is the first dimension of the first array that is not a scalar.
    """
    if isinstance(batch, Batch):
        return len(batch.indices)
    if not isinstance(batch, Mapping):
        batch = dict(enumerate(batch if isinstance(batch, (tuple, list)) else [batch]))
    return _rows_of_first_column(batch)


def _rows_of_first_column(columns: Mapping[Any, Any]) -> int:
    return next((int(x.shape[0]) for x in columns.values() if getattr(x, "ndim", 0)), 1)


def rows_of(batch: Any, begin: int, end: int) -> Any:
    """Return rows ``begin`` to ``end`` of a batch in the same form; arrays without a row per sample are unchanged."""
    size = num_rows_of(batch)

    def part(x: Any) -> Any:
        return x[begin:end] if getattr(x, "ndim", 0) and x.shape[0] == size else x

    if isinstance(batch, Batch):
        positions = None if batch.positions is None else batch.positions[begin:end]
        return Batch({name: part(x) for name, x in batch.items()}, batch.indices[begin:end], positions)
    if isinstance(batch, Mapping):
        return {name: part(x) for name, x in batch.items()}
    if isinstance(batch, (tuple, list)):
        parts = list(map(part, batch))
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return part(batch)


def as_tensors(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the batch with MindSpore tensors instead of NumPy arrays; a :class:`Batch` stays one.

    Raises:
        TypeError: a column has values that are not numbers, such as texts or None.
    """
    import mindspore

    for name, x in batch.items():
        if isinstance(x, np.ndarray) and not _holds_numbers(x):
            _raise_for_column(name, x, getattr(batch, "indices", None))
    tensors = {
        name: mindspore.Tensor(widened(name, x)) if isinstance(x, np.ndarray) else x for name, x in batch.items()
    }
    return Batch(tensors, batch.indices, batch.positions) if isinstance(batch, Batch) else tensors


def _holds_numbers(array: np.ndarray) -> bool:
    return array.dtype.kind not in "OSU"


def _raise_for_column(name: str, column: np.ndarray, indices: Optional[np.ndarray]) -> None:
    """Raise TypeError for the first value of a column that is not a number."""
    rank, values = get_process_group().label(), column.tolist() if column.ndim else [column.tolist()]
    numbers = range(len(values)) if indices is None or len(indices) != len(values) else indices.tolist()
    for index, value in zip(numbers, values):
        if not _holds_numbers(np.asarray(value)):
            raise TypeError(_not_a_number(name, value, index, rank))


def call_with(function: Callable[..., Any], batch: Any) -> Any:
    """Call ``function`` with columns as keyword arguments, a tuple or list as positional ones, else one argument."""
    if isinstance(batch, Mapping):
        return function(**as_tensors(batch))
    return function(*batch) if isinstance(batch, (tuple, list)) else function(batch)


def columns_of(sample: Any, index: int, rank: int) -> Mapping[str, Any]:
    """Return a sample's values by name: a dict unchanged, or an object's attributes; raise TypeError otherwise."""
    if isinstance(sample, Mapping):
        return sample
    if getattr(sample, "__dict__", None) and not hasattr(sample, "dtype"):
        return vars(sample)
    raise TypeError(
        f"sample {index} is a {type(sample).__name__}, expected a dict of column names and values (rank {rank}); pass "
        "a data_collator (collate= of make_loader) that makes a dict of arrays from a list of such samples"
    )


def collated(
    samples: Sequence[Any], indices: Sequence[int], rank: int, collate: Optional[Collator], columns: Any = None
) -> Columns:
    """Return a batch of arrays of these samples, without the columns that are not wanted.

    ``indices`` are the samples' numbers for messages. Only the user's ``collate`` takes samples that are not dicts.

    Raises:
        TypeError: samples or a batch of the wrong kind, or a label that the collator failed on is not a number.
    """
    if collate is None or isinstance(collate, ColumnCollator):
        samples = [columns_of(sample, index, rank) for sample, index in zip(samples, indices)]
    if columns is not None:
        samples = [wanted(sample, columns) for sample in samples]
    try:
        return as_arrays((collate or default_collate)(samples))
    except Exception as error:
        for sample, index in zip(samples, indices):
            labels = sample if isinstance(sample, Mapping) else {}
            for name in _LABELS:
                if name in labels and (labels[name] is None or isinstance(labels[name], str)):
                    raise TypeError(_not_a_number(name, labels[name], index, rank)) from error
        raise


def wanted(sample: Any, columns: Any) -> Any:
    """Return a dict without the columns that are not in ``columns`` (None: all are); other samples are unchanged."""
    if columns is None or not isinstance(sample, Mapping):
        return sample
    return {name: value for name, value in sample.items() if name in columns}


def _not_a_number(name: str, value: Any, index: int, rank: Any) -> str:
    return (
        f"{name!r} of sample {index} is {value!r}, expected a number or an array of numbers (rank {rank}); convert it "
        "in the data set or in the data_collator"
    )
