"""This module allocates memory that the processes of one host share, and sums arrays in it, for the MPI transport.

The memory is an array with one row per process, which all of them see. It is a file without a name
(memfd_create), which the other ranks open through /proc of the rank that created it. It is freed when the last
process releases it or is killed, and no limit on /dev/shm applies. (An MPI window would have to be
freed by all ranks together, and could not be left to the garbage collector.)

:mod:`mindnlp_dp.data_parallel.buckets.shared_memory_bucket` has a diagram of gradients in such rows.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any, Optional

import numpy as np

from mindnlp_dp.communication.transports.mpi.ring import (
    HalfPrecisionCodec,
    gather_round_ring,
    reduce_round_ring,
    sum_over_hosts,
)
from mindnlp_dp.communication.transports.polling_wait import PollingWait, barrier

# Arrays are reduced in pieces of this size: large enough to hide the barriers, small enough for the cache.
STAGE_BYTES = 1 << 20

# Slices begin at whole cache lines, so that no two ranks write to the same line.
CACHE_LINE_BYTES = 64

_NONCE_BYTES = 16


def allocate_shared_rows(host: Any, row_bytes: int) -> Optional[np.ndarray]:
    """Return a zeroed byte array that all ranks of ``host`` (an mpi4py communicator) see; None if any rank cannot.

    Its shape is ``(ranks of the host, row_bytes)``, with rows rounded up to cache lines.

    A collective of the host.
    """
    row = round_up(max(row_bytes, 1), CACHE_LINE_BYTES)
    num_bytes = row * host.size
    mine, memory = -1, None
    # Written after the rows: it shows the other ranks that they have opened the right file.
    nonce = os.urandom(_NONCE_BYTES)
    if host.rank == 0:
        with contextlib.suppress(OSError):
            mine = os.memfd_create("mindnlp-dp")
            os.ftruncate(mine, num_bytes)
            os.pwrite(mine, nonce, num_bytes)
    process, descriptor, nonce = host.bcast((os.getpid(), mine, nonce), root=0)
    with contextlib.suppress(OSError, ValueError):
        if host.rank != 0:
            # If the ranks have different process ids, as in separate containers, this is another file, or none.
            mine = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_NONBLOCK)
        if os.pread(mine, _NONCE_BYTES + 1, num_bytes) == nonce:
            # Allocate now, to get an error here instead of a signal later. Each rank allocates its own row, so that the
            # row lies in memory near that rank's core.
            os.posix_fallocate(mine, host.rank * row, row)
            memory = mmap.mmap(mine, num_bytes)
            # Where /sys/kernel/mm/transparent_hugepage/shmem_enabled is "advise", the kernel then uses huge pages.
            with contextlib.suppress(OSError):
                memory.madvise(mmap.MADV_HUGEPAGE)
    everybody_has_it = all(host.allgather(memory is not None))
    if mine >= 0:
        os.close(mine)
    if not everybody_has_it or memory is None:
        return None
    return np.frombuffer(memory, np.uint8).reshape(host.size, -1)


def why_not_shared(ranks_by_host: Sequence[int]) -> str:
    """Return why memory is not shared; empty if all hosts have equally many ranks, so that rings have equal length.

    >>> why_not_shared([2, 2])
    ''
    """
    if len(set(ranks_by_host)) <= 1:
        return ""
    return (
        f"hosts have {min(ranks_by_host)} to {max(ranks_by_host)} ranks; start the same number on every host, so that "
        "gradients are exchanged in shared memory, several times faster"
    )


class HostMemory:
    """Allocates memory that the ranks of each host share.

    Attributes:
        is_available: whether all hosts can share memory; the same on every rank.
    """

    def __init__(self, comm: Any, host: Any, *, is_available: bool) -> None:
        self._comm = comm
        self._host = host
        self.is_available = is_available

    def rows(self, row_bytes: int) -> Optional[np.ndarray]:
        """Return rows of :func:`allocate_shared_rows`, or None on all ranks, which rank 0 reports once.

        A collective.
        """
        if not self.is_available:
            return None
        rows = allocate_shared_rows(self._host, row_bytes)
        if not all(self._comm.allgather(rows is not None)):
            self.is_available = False
            if self._comm.rank == 0:
                print(f"MPI itself moves gradients: the ranks of a host cannot share {row_bytes} bytes each")
            return None
        return rows

    def flat(self, num_bytes: int) -> Optional[np.ndarray]:
        """Return one byte array that all ranks of a host see, instead of one row per rank. A collective."""
        rows = self.rows(-(-num_bytes // self._host.size))
        return None if rows is None else rows.reshape(-1)[:num_bytes]


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``number``."""
    return -(-number // multiple) * multiple


@functools.lru_cache(maxsize=1024)
def slice_bounds(numel: int, num_slices: int, item_bytes: int) -> tuple[int, ...]:
    """Return where ``num_slices`` slices of ``numel`` items begin, and the last one ends, as even as cache lines allow.

    >>> slice_bounds(100, 2, 4), slice_bounds(10, 3, 4)
    ((0, 64, 100), (0, 10, 10, 10))
    """
    width = round_up(round_up(numel, num_slices) // num_slices, CACHE_LINE_BYTES // item_bytes)
    return (*(min(index * width, numel) for index in range(num_slices)), numel)


class HostExchange:
    """Sums arrays over the ranks of a host in shared memory, and over hosts in a ring.

    ``host`` (the ranks of this host) and ``peers`` (the ranks with this local rank on every host) are mpi4py
    communicators, which no other code uses during an exchange; every host has the same number of ranks.

    Attributes:
        bytes_sent: number of bytes that this rank has sent to other hosts so far.
        skip_zeros: whether blocks that are zero on all hosts are not sent.
    """

    def __init__(self, host: Any, peers: Any) -> None:
        self._host = host
        self._peers = peers
        self.bytes_sent = 0
        self.skip_zeros = True
        self._stages: list[np.ndarray] = []
        self._typed_stages: dict[np.dtype, list[list[np.ndarray]]] = {}
        self._turn = 0

    @property
    def local_rank(self) -> int:
        return self._host.rank

    def wait_for_host(self) -> None:
        self._host.Barrier()

    def sum_rows(
        self,
        rows: np.ndarray,
        bounds: Sequence[int],
        scale: float,
        wire: Optional[HalfPrecisionCodec] = None,
        waiter: Optional[PollingWait] = None,
        *,
        scatter: bool = False,
    ) -> None:
        """Scale every row and sum the rows over all ranks; each rank sums its slice, and slice ``r`` is in row ``r``.

        Slice ``r`` belongs to local rank ``r`` on every host, and has one part per host: ``bounds`` say where all
        parts of all slices begin, and where the last one ends, at multiples of 64 elements if blocks of zeros are
        skipped. With ``scatter``, a host gets only the sum of the part of each slice that belongs to it.

        Every element is multiplied by ``scale`` before it is added, as in an exchange without shared memory, and the
        rows of a host are added in rank order, so that the bits of the sum do not depend on where slices begin.
        """
        rank, edges = self._host.rank, self._of_hosts(bounds)
        first, last = edges[0], edges[-1]
        factor = rows.dtype.type(scale)
        barrier(self._host, waiter)
        _sum_scaled(rows, rank, first, last, factor)
        if self._peers.size > 1:
            within = [edge - first for edge in edges]
            self.bytes_sent += sum_over_hosts(
                self._peers, rows[rank, first:last], wire, waiter, self.skip_zeros, edges=within, scatter=scatter
            )
        barrier(self._host, waiter)

    def _of_hosts(self, bounds: Sequence[int]) -> Sequence[int]:
        """Return where the hosts' parts of this local rank's slice begin, and where the last one ends."""
        rank, hosts = self._host.rank, self._peers.size
        return bounds[rank * hosts : (rank + 1) * hosts + 1]

    def gather_from_hosts(self, array: np.ndarray, bounds: Sequence[int]) -> None:
        """Gather, in place, the parts of this local rank's slice from its peers on the other hosts."""
        if self._peers.size > 1:
            self.bytes_sent += gather_round_ring(self._peers, array, self._of_hosts(bounds))

    @property
    def has_stage(self) -> bool:
        return bool(self._stages)

    def set_stage(self, rows: np.ndarray) -> None:
        """Set the memory of :meth:`all_reduce`: bytes of shape ``(ranks of the host, 2 * STAGE_BYTES)``."""
        self._stages = [rows[:, :STAGE_BYTES], rows[:, STAGE_BYTES:]]
        self._typed_stages.clear()

    def all_reduce(self, x: np.ndarray, out: np.ndarray, reduce: Callable[..., Any]) -> None:
        """Reduce a flat array over all ranks into ``out``, in pieces that fit the cache, through staging memory.

        Two stages alternate: a rank that begins to write to one has passed a barrier with all ranks on the other, so
        no rank still reads the one that it writes to.
        """
        rank, size, barrier = self._host.rank, self._host.size, self._host.Barrier
        step = STAGE_BYTES // x.itemsize
        stages = self._typed_stages.get(x.dtype)
        if stages is None:
            # Split into rows, because a view of a row is several times cheaper than one of a matrix, which matters for
            # small arrays.
            stages = self._typed_stages[x.dtype] = [list(stage.view(x.dtype)) for stage in self._stages]
        for begin in range(0, len(x), step):
            part = x[begin : begin + step]
            rows = stages[self._turn]
            self._turn = 1 - self._turn
            bounds = slice_bounds(len(part), size, x.itemsize)
            first, last = bounds[rank], bounds[rank + 1]
            rows[rank][: len(part)] = part
            barrier()
            mine = rows[rank][first:last]
            for other in range(1, size):
                reduce(mine, rows[(rank + other) % size][first:last], mine)
            if self._peers.size > 1:
                self.bytes_sent += reduce_round_ring(self._peers, mine, reduce)
            barrier()
            for row, start, stop in zip(rows, bounds, bounds[1:]):
                out[begin + start : begin + stop] = row[start:stop]


# Elements of a scratch array that fits a core's own cache.
_BLOCK = 1 << 17


def _sum_scaled(rows: np.ndarray, rank: int, first: int, last: int, factor: Any) -> None:
    """Set ``rows[rank, first:last]`` to the sum of all rows there, each times ``factor``, added in the order of rows.

    It works in blocks that fit the cache. Rows before the rank's own are summed in a scratch array, because its own
    row must be read before it is overwritten.
    """
    mine = rows[rank]
    total, scaled = np.empty((2, min(_BLOCK, max(last - first, 1))), rows.dtype)
    for begin in range(first, last, _BLOCK):
        end = min(begin + _BLOCK, last)
        own, before, term = mine[begin:end], total[: end - begin], scaled[: end - begin]
        np.multiply(own, factor, out=own)
        for number, row in enumerate(rows):
            if number == 0 and rank > 0:
                np.multiply(row[begin:end], factor, out=before)
            elif number == rank and rank > 0:
                np.add(before, own, out=own)
            elif number != rank:
                np.multiply(row[begin:end], factor, out=term)
                sum_so_far = before if number < rank else own
                np.add(sum_so_far, term, out=sum_so_far)
