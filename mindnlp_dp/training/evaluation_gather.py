"""Gathers the ranks' outputs of an evaluation into data set order; evaluate.py and the Trainer's evaluation use it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Optional

import numpy as np

from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.runtime.arrays import read

PADDING = -100
# Steps between two exchanges.
GATHER_EVERY = 16


class OrderedGatherer:
    """Collects the ranks' outputs step by step, and puts them into data set order.

    ``add`` takes this rank's outputs for one global batch: nested tuples, lists or dicts of NumPy arrays with rows as
    the first dimension, or None if the rank had no rows. Outputs are exchanged every ``gather_every`` steps, so that
    messages do not grow with the data set. Where other dimensions differ, arrays are padded with -100, as in MindNLP's
    Trainer; booleans, which cannot hold it, with False.
    """

    def __init__(self, group: ProcessGroup, gather_every: Optional[int] = None) -> None:
        self._group = group
        self._gather_every = gather_every or GATHER_EVERY
        self._steps: list[Any] = []
        self._chunks: list[Any] = []

    def add(self, outputs: Any) -> None:
        """Add this rank's outputs for one global batch. Every ``gather_every``-th call is a collective."""
        self._steps.append(outputs)
        if len(self._steps) == self._gather_every:
            self._gather()

    def finish(self) -> Any:
        """Return all rows in order, on every rank; None if no rank had any. A collective."""
        self._gather()
        return concatenate(self._chunks) if self._chunks else None

    def _gather(self) -> None:
        by_rank = self._group.all_gather_object(self._steps)
        self._steps = []
        parts = [part for step in zip(*by_rank) for part in step if part is not None]
        if parts:
            self._chunks.append(concatenate(parts))


def concatenate(parts: Sequence[Any]) -> Any:
    """Join nested structures of arrays along the rows, padding other dimensions with -100 where they differ."""
    first = parts[0]
    if isinstance(first, Mapping):
        return {key: concatenate([part[key] for part in parts]) for key in first}
    if isinstance(first, (tuple, list)):
        return _like(first, [concatenate(list(items)) for items in zip(*parts)])
    arrays = [np.atleast_1d(part) for part in parts]
    sizes = np.max([array.shape[1:] for array in arrays], axis=0)
    return np.concatenate([_pad(array, sizes) for array in arrays])


def _like(sequence: Any, items: list[Any]) -> Any:
    """Return a tuple, list or named tuple of the type of ``sequence`` with these items."""
    kind = type(sequence)
    return kind(*items) if hasattr(kind, "_fields") else kind(items)


def _pad(array: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """Pad all dimensions but the first to ``sizes``, with -100; booleans with False, and unsigned integers as int64."""
    missing = [most - size for most, size in zip(sizes, array.shape[1:])]
    if not any(missing):
        return array
    if array.dtype.kind == "u":
        array = array.astype(np.int64)
    padding = False if array.dtype.kind == "b" else PADDING
    return np.pad(array, [(0, 0), *((0, number) for number in missing)], constant_values=padding)


def to_numpy(outputs: Any) -> Any:
    """Turn the tensors of a nested structure into NumPy arrays."""
    if outputs is None or isinstance(outputs, np.ndarray):
        return outputs
    if isinstance(outputs, Mapping):
        return {key: to_numpy(value) for key, value in outputs.items()}
    if isinstance(outputs, (tuple, list)):
        return _like(outputs, [to_numpy(value) for value in outputs])
    return read(outputs)
