"""Arrays that rank 0 has, and of which the others may want a part, one at a time.

Goes in: an array on rank 0. Comes out: the same array on every rank, when all ask for it, and nothing before that. What
no rank could hold as a whole, such as the optimizer state of a large model, goes round in this way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

import numpy as np

from mindnlp_dp.arrays.conversion import from_host

from .collectives import ProcessGroup


@dataclass(frozen=True)
class ArrayToCome:
    """An array of rank 0's, ``here`` there, and None on the other ranks."""

    group: ProcessGroup
    here: Optional[np.ndarray]
    shape: tuple[int, ...]
    dtype: np.dtype

    def fetch(self) -> np.ndarray:
        """A collective, which all ranks call for the same arrays in the same order."""
        mine = np.zeros(self.shape, self.dtype) if self.here is None else self.here
        return self.group.broadcast(mine)


@dataclass(frozen=True)
class TensorToCome:
    """A tensor, of the type that ``dtype`` names, whose values are such an array."""

    array: ArrayToCome
    dtype: str

    def fetch(self) -> Any:
        return from_host(self.array.fetch(), self.dtype)


def fetch_all(tree: Any) -> Any:
    """Nested dicts, lists and tuples, with all such arrays and tensors in their places. A collective."""
    if isinstance(tree, dict):
        return {key: fetch_all(item) for key, item in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(fetch_all(item) for item in tree)
    return tree.fetch() if isinstance(tree, (ArrayToCome, TensorToCome)) else tree
