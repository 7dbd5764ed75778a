"""MindSpore's collectives among some of a job's ranks: a group's name in every call.

On CPU, MCCL can do one thing in such a group: sum float32. What else a group must be able to do to train (everyone's
bytes to everyone, one rank's bytes to all) is done by sums, exactly, at twice the bytes; messages between two ranks
and all-to-all are not to be had (MindSpore 2.7 to 2.10).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mindnlp_dp.arrays.conversion import to_host

from .mindspore_calls import MintCalls


def create_group(ranks: Sequence[int]) -> str:
    """Make a group of MindSpore's, of ranks of the whole job, and return its name; called by these ranks."""
    from mindspore import communication

    name = "mindnlp_dp_" + "_".join(map(str, ranks))
    communication.create_group(name, list(ranks))
    return name


class SumsOnly(MintCalls):
    """What MCCL can do among some ranks, and what follows from it."""

    def __init__(self, group: str, ranks: Sequence[int], rank: int) -> None:
        super().__init__(group, ranks)
        self._rank = rank

    def all_gather(self, x: Any, world_size: int) -> list[Any]:
        """Of uint8: pairs of bytes are numbers that float32 holds exactly, and every other rank adds zero."""
        data = to_host(x)
        rows = np.zeros((world_size, -(-data.size // 2)), np.float32)
        rows[self._rank] = _halves(data)
        return [self._tensor(row, data.size) for row in to_host(self.all_reduce(self._mint_tensor(rows), "sum"))]

    def broadcast(self, x: Any, src: int) -> Any:
        data = to_host(x)
        halves = _halves(data if self._rank == src else np.zeros_like(data))
        return self._tensor(to_host(self.all_reduce(self._mint_tensor(halves), "sum")), data.size)

    @staticmethod
    def _mint_tensor(array: np.ndarray) -> Any:
        import mindspore

        return mindspore.Tensor(array)

    @classmethod
    def _tensor(cls, halves: np.ndarray, num_bytes: int) -> Any:
        return cls._mint_tensor(halves.astype(np.uint16).view(np.uint8)[:num_bytes].copy())


def _halves(data: np.ndarray) -> np.ndarray:
    """Bytes, two by two, as numbers below 65536."""
    padded = np.zeros(data.size + data.size % 2, np.uint8)
    padded[: data.size] = data
    return padded.view(np.uint16).astype(np.float32)
