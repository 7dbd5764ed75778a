"""This module creates MindSpore's groups of some of a job's ranks, and adds the collectives that MCCL lacks in them.

On CPU, MCCL can only sum float32 in such a group. The all-gather and broadcast of bytes, which training also needs,
are done by sums, exactly, at twice the bytes. Messages between two ranks and all-to-all are not available (MindSpore
2.7 to 2.10).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mindnlp_dp.runtime.arrays import to_host

from .mindspore_calls import MintCalls


def create_group(ranks: Sequence[int]) -> str:
    """Create a MindSpore group of these ranks of the job, and return its name; each of these ranks calls it."""
    from mindspore import communication

    name = "mindnlp_dp_" + "_".join(map(str, ranks))
    communication.create_group(name, list(ranks))
    return name


class SumsOnly(MintCalls):
    """Builds all-gather and broadcast from the float32 sum, which is all that MCCL can do among some ranks."""

    def __init__(self, group: str, ranks: Sequence[int], rank: int) -> None:
        super().__init__(group, ranks)
        self._rank = rank

    def all_gather(self, x: Any, world_size: int) -> list[Any]:
        """Gather by a sum: float32 holds pairs of bytes exactly, and every other rank adds zero."""
        array = to_host(x)
        rows = np.zeros((world_size, -(-array.nbytes // 2)), np.float32)
        rows[self._rank] = _halves(array)
        return [_tensor(row, array) for row in self._sum(rows)]

    def broadcast(self, x: Any, src: int) -> Any:
        array = to_host(x)
        return _tensor(self._sum(_halves(array if self._rank == src else np.zeros_like(array))), array)

    def _sum(self, halves: np.ndarray) -> np.ndarray:
        import mindspore

        return to_host(self.all_reduce(mindspore.Tensor(halves), "sum"))


def _halves(array: np.ndarray) -> np.ndarray:
    """Return an array's bytes, two by two, as float32 numbers below 65536."""
    padded = np.zeros(array.nbytes + array.nbytes % 2, np.uint8)
    padded[: array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return padded.view(np.uint16).astype(np.float32)


def _tensor(halves: np.ndarray, like: np.ndarray) -> Any:
    import mindspore

    data = halves.astype(np.uint16).view(np.uint8)[: like.nbytes]
    return mindspore.Tensor(data.copy().view(like.dtype).reshape(like.shape))
