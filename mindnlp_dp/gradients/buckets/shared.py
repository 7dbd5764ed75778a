"""A bucket in memory that the ranks of a host share.

What is copied where, with two ranks on a host. On the left of each row a rank writes, on the right every rank reads::

    gradient      ① put               ② sum, and ring                      ③ get
    of rank 0 ── x weight ──▶ row 0 │ slice 0 ◀── rank 0 sums it over rows │ ──▶ private memory
                                    │ slice 1                              │     of every rank,
    of rank 1 ── x weight ──▶ row 1 │ slice 0                              │     where the last
                                    │ slice 1 ◀── rank 1 sums it over rows │     result was

① is the one copy in: in the parameter's hook where exchange overlaps the backward pass, else behind it. ② sums in
place, in blocks that stay in the cache; on several hosts each slice then goes round a ring of the ranks that own it on
every host (host_ring.py), where it is packed if blocks are zero (zero_blocks.py), and encoded if it is compressed
(half_wire.py): these are copies of what is sent. ③ is the one copy out: what ``param.grad`` points to is nobody
else's. Between ② and ③ there are barriers of the host. Where exchange overlaps and a window has several micro steps,
what the first ones left in the row is copied once more, into the memory of the result, in case the last one must be
taken back (:meth:`.HostBucket.keep`).

So a rank's gradients take a row of shared memory, and as much of private memory, and no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import numpy as np

from mindnlp_dp.communication.transports.half_wire import wire_for
from mindnlp_dp.communication.transports.mpi import MPIChannel
from mindnlp_dp.communication.transports.patience import Patience

from .host import HostBucket
from .layout import BucketLayout, Slot


class SharedBucket(HostBucket):
    """A bucket whose memory the ranks of a host share: they sum it together, and nothing is sent within the host.

    ``rows`` are the host's ranks', of shape (ranks of the host, numel).
    """

    def __init__(
        self, layout: BucketLayout, channel: MPIChannel, rows: np.ndarray, compression: Optional[str] = None
    ) -> None:
        self._exchange = channel.exchange
        super().__init__(layout, channel, rows[self._exchange.local_rank])
        self._rows = rows
        self._wire = wire_for(compression, rows.dtype)
        self._parts = layout.slice_bounds(channel.world_size)
        # Slices of the host's ranks, each of as many parts as there are hosts.
        self._bounds = self._parts[:: channel.world_size // len(rows)]

    def start(self, scale: float, patience: Optional[Patience] = None) -> None:
        self._fill_gaps()
        self._exchange.sum_rows(self._rows, self._parts, scale, self._wire, patience, scatter=self.scatter)
        self._has_sum()

    def sums(self) -> list[tuple[int, np.ndarray]]:
        return [(first, row[first:last]) for row, first, last in zip(self._rows, self._bounds, self._bounds[1:])]

    def _copy_result(self, slot: Slot, out: np.ndarray) -> None:
        copy_range(self._rows, self._bounds, slot.offset, out)

    def release(self) -> None:
        self._exchange.wait_for_host()


def copy_range(rows: np.ndarray, bounds: Sequence[int], start: int, out: np.ndarray) -> None:
    """Copy elements ``[start, start + len(out))`` of the sum, each from the row of the rank that made it."""
    stop = start + len(out)
    for row, first, last in zip(rows, bounds, bounds[1:]):
        begin, end = max(first, start), min(last, stop)
        if begin < end:
            out[begin - start : end - start] = row[begin:end]
