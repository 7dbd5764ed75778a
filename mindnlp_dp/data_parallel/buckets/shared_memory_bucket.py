"""This module sums gradients in memory that the ranks of a host share; bucket_factory.py creates it for MPI.

The diagram shows all copies, for two ranks on a host. Ranks write on the left of the rows, and read on the right::

    gradient      ① put               ② sum, and ring                      ③ get
    of rank 0 ── x weight ──▶ row 0 │ slice 0 ◀── rank 0 sums it over rows │ ──▶ private memory
                                    │ slice 1                              │     of every rank,
    of rank 1 ── x weight ──▶ row 1 │ slice 0                              │     where the last
                                    │ slice 1 ◀── rank 1 sums it over rows │     result was

① is the only copy in: in the parameter's hook if the exchange overlaps the backward pass, otherwise after that pass. ②
sums in place, in blocks that stay in the cache. With several hosts, each slice then goes round a ring of the ranks that
own it on each host (ring.py). There it is packed if blocks are zero (ring.py) and encoded if it is
compressed (ring.py): these are copies of the bytes that are sent. ③ is the only copy out: the memory of
``param.grad`` is private. Between ② and ③ there are barriers of the host. If the exchange overlaps and an update has
several micro-batches, the sum of the first ones is also copied from the row to the memory of the result, in case the
last one must be undone (:meth:`.HostBucket.snapshot`).

So a rank's gradients need one row of shared memory and as much private memory, and no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import numpy as np

from mindnlp_dp.communication.transports.mpi.mpi_transport import MPIChannel
from mindnlp_dp.communication.transports.mpi.ring import wire_for
from mindnlp_dp.communication.transports.polling_wait import PollingWait
from mindnlp_dp.data_parallel.buckets.bucket_layout import BucketLayout, Slot
from mindnlp_dp.data_parallel.buckets.host_bucket import HostBucket


class SharedBucket(HostBucket):
    """A bucket in shared memory, which the ranks of a host sum together; nothing is sent within the host.

    ``rows`` has one row for each rank of the host: shape (ranks of the host, numel).
    """

    def __init__(
        self, layout: BucketLayout, channel: MPIChannel, rows: np.ndarray, compression: Optional[str] = None
    ) -> None:
        self._exchange = channel.exchange
        super().__init__(layout, channel, rows[self._exchange.local_rank])
        self._rows = rows
        self._wire = wire_for(compression, rows.dtype)
        self._parts = layout.slice_bounds(channel.world_size)
        # The slices of the host's ranks; each slice has one part for each host.
        self._bounds = self._parts[:: channel.world_size // len(rows)]

    def start(self, scale: float, waiter: Optional[PollingWait] = None) -> None:
        self._fill_gaps()
        self._exchange.sum_rows(self._rows, self._parts, scale, self._wire, waiter, scatter=self.scatter)
        self._has_sum()

    def sums(self) -> list[tuple[int, np.ndarray]]:
        return [(first, row[first:last]) for row, first, last in zip(self._rows, self._bounds, self._bounds[1:])]

    def _copy_result(self, slot: Slot, out: np.ndarray) -> None:
        copy_range(self._rows, self._bounds, slot.offset, out)

    def release(self) -> None:
        self._exchange.wait_for_host()


def copy_range(rows: np.ndarray, bounds: Sequence[int], start: int, out: np.ndarray) -> None:
    """Copy elements ``[start, start + len(out))`` of the sum, each from the row of the rank that computed it."""
    stop = start + len(out)
    for row, first, last in zip(rows, bounds, bounds[1:]):
        begin, end = max(first, start), min(last, stop)
        if begin < end:
            out[begin - start : end - start] = row[begin:end]
