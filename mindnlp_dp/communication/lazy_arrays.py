"""This module defines arrays on rank 0 that the other ranks fetch one at a time, when all ranks ask for one.

Checkpoint loading uses it for the optimizer state, which may be too large for every rank to hold in full.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

import numpy as np

from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.runtime.arrays import from_host


@dataclass(frozen=True)
class LazyArray:
    """An array that every rank can fetch from rank 0.

    ``here`` is the array on rank 0, or an object that NumPy reads it from; None on the other ranks.
    """

    group: ProcessGroup
    here: Optional[Any]
    shape: tuple[int, ...]
    dtype: np.dtype

    def fetch(self) -> np.ndarray:
        """Return the array on every rank. A collective: all ranks call it for the same arrays in the same order."""
        mine = np.zeros(self.shape, self.dtype) if self.here is None else np.asarray(self.here)
        return self.group.broadcast(mine)


@dataclass(frozen=True)
class LazyTensor:
    """A tensor of type ``dtype`` whose values are an :class:`LazyArray`."""

    array: LazyArray
    dtype: str

    def fetch(self) -> Any:
        return from_host(self.array.fetch(), self.dtype)


def materialize(tree: Any) -> Any:
    """Return nested dicts, lists and tuples with all such arrays and tensors fetched. A collective."""
    if isinstance(tree, dict):
        return {key: materialize(item) for key, item in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(materialize(item) for item in tree)
    return tree.fetch() if isinstance(tree, (LazyArray, LazyTensor)) else tree
