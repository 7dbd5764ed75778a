"""A batch: how it is made of samples, how many rows it has, and how a function is called with it.

Goes in: samples, dicts of values. Comes out: columns, arrays with a row a sample; and for the function that computes
with them, tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Callable, Optional

import numpy as np

Columns = dict[str, np.ndarray]
Collator = Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Any]]


class Batch(dict[str, Any]):
    """Columns of a batch by their names, and which samples of the data set its rows are.

    A column that has another length than ``indices``, such as weights of classes, belongs to the batch as a whole.

    Attributes:
        indices: int64 of shape ``(rows,)``; in a pipeline, which has no index, the rows' numbers in its order. By
            default the rows of the first column are counted.
    """

    def __init__(self, columns: Mapping[str, Any], indices: Optional[np.ndarray] = None) -> None:
        super().__init__(columns)
        self.indices = np.arange(_rows_of_first_column(columns)) if indices is None else indices


def default_collate(rows: Sequence[Mapping[str, Any]]) -> Columns:
    """Stack the samples' columns: values of shape ``s`` become arrays of shape ``(rows, *s)``.

    A column ``label`` becomes ``labels``, as models call it. Raises ValueError when shapes differ.
    """
    batch: Columns = {}
    for name in rows[0]:
        values = [np.asarray(row[name]) for row in rows]
        if len({value.shape for value in values}) > 1:
            raise ValueError(
                f"the samples' {name!r} have different shapes, {values[0].shape} and "
                f"{next(v.shape for v in values if v.shape != values[0].shape)} among them; "
                "pad them to one length, or pass a data_collator that does"
            )
        batch["labels" if name == "label" and "labels" not in rows[0] else name] = np.stack(values)
    return batch


def as_arrays(batch: Mapping[str, Any]) -> Columns:
    """NumPy arrays for a collator's result; float64, which is Python's own, becomes float32."""
    arrays = {name: np.asarray(x.asnumpy() if hasattr(x, "asnumpy") else x) for name, x in batch.items()}
    return {name: a.astype(np.float32) if a.dtype == np.float64 else a for name, a in arrays.items()}


def num_rows_of(batch: Any) -> int:
    """Return the number of rows of a batch of any form: columns by name, a tuple or list of arrays, or one array.

    A loader's batch knows it; elsewhere it is the first dimension of the first column that has one.
    """
    if isinstance(batch, Batch):
        return len(batch.indices)
    if not isinstance(batch, Mapping):
        batch = dict(enumerate(batch if isinstance(batch, (tuple, list)) else [batch]))
    return _rows_of_first_column(batch)


def _rows_of_first_column(columns: Mapping[Any, Any]) -> int:
    return next((int(x.shape[0]) for x in columns.values() if getattr(x, "ndim", 0)), 1)


def rows_of(batch: Any, begin: int, end: int) -> Any:
    """Some rows of a batch of any form, in the same form; what has no row for each sample stays as it is."""
    size = num_rows_of(batch)

    def part(x: Any) -> Any:
        return x[begin:end] if getattr(x, "ndim", 0) and x.shape[0] == size else x

    if isinstance(batch, Batch):
        return Batch({name: part(x) for name, x in batch.items()}, batch.indices[begin:end])
    if isinstance(batch, Mapping):
        return {name: part(x) for name, x in batch.items()}
    if isinstance(batch, (tuple, list)):
        parts = list(map(part, batch))
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return part(batch)


def as_tensors(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch with MindSpore tensors in place of its arrays; a loader's batch keeps its indices."""
    import mindspore

    tensors = {name: mindspore.Tensor(x) if isinstance(x, np.ndarray) else x for name, x in batch.items()}
    return Batch(tensors, batch.indices) if isinstance(batch, Batch) else tensors


def call_with(function: Callable[..., Any], batch: Any) -> Any:
    """Call it with a batch: columns as keywords, a tuple or list as arguments, anything else as the one argument."""
    if isinstance(batch, Mapping):
        return function(**as_tensors(batch))
    return function(*batch) if isinstance(batch, (tuple, list)) else function(batch)
