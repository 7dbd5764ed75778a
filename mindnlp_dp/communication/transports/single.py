"""This module implements the transport of a single process, and NumPy's reductions for libraries that lack a type."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Optional

import numpy as np

from mindnlp_dp.communication.transports.channel import HostChannel
from mindnlp_dp.communication.transports.polling_wait import PollingWait
from mindnlp_dp.communication.transports.transport import HostTransport, Transport


class SingleProcessChannel(HostChannel):
    """The gradient channel of one rank: every sum is its own input."""

    world_size, slice_index = 1, 0
    cannot_overlap = "there is one rank"

    def all_reduce_in_place(self, buffer: np.ndarray, waiter: Optional[PollingWait] = None) -> None:
        pass


class SingleProcessTransport(HostTransport):
    """The transport at world size 1: every collective returns a copy of its input."""

    name = "single"
    rank = local_rank = 0
    world_size = local_world_size = 1

    def __init__(self) -> None:
        self.channel = SingleProcessChannel()

    def all_reduce(self, x: np.ndarray, op: str) -> np.ndarray:
        return x.copy()

    def broadcast(self, x: np.ndarray, src: int) -> np.ndarray:
        return x.copy()

    def all_gather(self, x: np.ndarray) -> list[np.ndarray]:
        return [x.copy()]

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]

    def broadcast_bytes(self, data: bytes, src: int) -> bytes:
        return data

    def all_to_all(self, x: np.ndarray, send_counts: Sequence[int], recv_counts: Sequence[int]) -> np.ndarray:
        return x.copy()

    def send(self, x: np.ndarray, dst: int) -> None:
        raise AssertionError("the group refuses to send to this rank itself")

    def begin_send(self, x: np.ndarray, dst: int, tag: int) -> Any:
        raise AssertionError("the group refuses to send to this rank itself")

    def recv(self, like: np.ndarray, src: int, tag: int = 0) -> np.ndarray:
        raise AssertionError("the group refuses to receive from this rank itself")

    def split(self, ranks: Sequence[int]) -> Transport:
        return SingleProcessTransport()

    def barrier(self) -> None:
        pass

    def _new_channel(self) -> SingleProcessChannel:
        return SingleProcessChannel()

    def close(self) -> None:
        pass


REDUCTIONS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "sum": np.add,
    "max": np.maximum,
    "min": np.minimum,
}


def reduce_arrays(arrays: Sequence[np.ndarray], op: str) -> np.ndarray:
    """Reduce ``arrays`` in rank order, so that every rank computes the same bits."""
    return functools.reduce(REDUCTIONS[op], arrays)
