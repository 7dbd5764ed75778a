"""This module implements the transport of MPI by mpi4py: the fast one on CPU. It exchanges NumPy arrays.

MPI has no half precision: float16 is summed in float32 and rounded once. Where OpenMPI reduces differently from NumPy,
arrays are gathered, and NumPy reduces them in rank order. In OpenMPI, sums of small integers saturate in the vector
code and wrap around in the elements after it, and whether NaN is the largest number depends on its position.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Optional

import numpy as np

from mindnlp_dp.communication.transports.channel import HostChannel
from mindnlp_dp.communication.transports.mpi.faults import abort_job_on_failure
from mindnlp_dp.communication.transports.mpi.host_memory import (
    STAGE_BYTES,
    HostExchange,
    HostMemory,
    why_not_shared,
)
from mindnlp_dp.communication.transports.polling_wait import PollingWait, all_reduce_in_place
from mindnlp_dp.communication.transports.single import REDUCTIONS, SingleProcessTransport, reduce_arrays
from mindnlp_dp.communication.transports.transport import HostTransport, T, Transport

# From this size on, shared memory is faster than MPI's own all-reduce (benchmarks/bench_all_reduce.py).
SHARED_FROM_BYTES = 1 << 16

_OPS = {"sum": "SUM", "max": "MAX", "min": "MIN"}

# MPI counts in 32 bits, so longer messages are split into pieces.
PIECE_BYTES = 1 << 30


def mpi_library() -> Any:
    """Return ``mpi4py.MPI``, whose import starts MPI; raise ImportError, with the fix, if it cannot be used."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ImportError(
            f'started by mpirun, but MPI cannot be used: {error}; pip install "mindnlp-dp[mpi]"'
        ) from error
    return MPI


class MPIChannel(HostChannel):
    """Exchanges gradients over MPI, in memory that the ranks of a host share where possible.

    It duplicates the communicators, because another thread may exchange on it while collectives are called.

    Attributes:
        exchange: object that sums rows of shared memory.
        memory: allocator of these rows.
    """

    def __init__(self, mpi: Any, comms: Sequence[Any], memory: HostMemory, cannot_overlap: str) -> None:
        self._mpi = mpi
        # Of all ranks, of this host's ranks, and of the ranks with this local rank on every host.
        self._comms = [comm.Dup() for comm in comms]
        self.world_size = self._comms[0].Get_size()
        self.exchange = HostExchange(*self._comms[1:])
        self.memory = memory
        self.cannot_overlap = cannot_overlap
        # The slices of one local rank on all hosts are consecutive, because one ring reduces them. The order stays the
        # same if memory can no longer be shared later.
        everybody, host, peers = self._comms
        self.slice_index = host.rank * peers.size + peers.rank if memory.is_available else everybody.rank

    def all_reduce_in_place(self, buffer: np.ndarray, waiter: Optional[PollingWait] = None) -> None:
        all_reduce_in_place(self._comms[0], buffer, self._mpi.SUM, waiter)

    @property
    def shares_memory(self) -> bool:  # type: ignore[override]
        return self.memory.is_available

    @property
    def num_hosts(self) -> int:  # type: ignore[override]
        return self._comms[2].Get_size()

    @property
    def is_first_of_host(self) -> bool:  # type: ignore[override]
        return self.exchange.local_rank == 0

    def share(self, num_bytes: int) -> Optional[np.ndarray]:
        return self.memory.flat(num_bytes)

    def wait_for_host(self) -> None:
        self.exchange.wait_for_host()

    def gather_from_hosts(self, array: np.ndarray, bounds: Sequence[int]) -> None:
        self.exchange.gather_from_hosts(array, bounds)

    @property
    def bytes_sent(self) -> int:  # type: ignore[override]
        return self.exchange.bytes_sent

    def close(self) -> None:
        for comm in self._comms:
            comm.Free()


class MPITransport(HostTransport):
    """Moves NumPy arrays over MPI."""

    name = "mpi"
    channel: MPIChannel

    def __init__(self, comm: Optional[Any] = None) -> None:
        """Create a transport of all ranks, or of the ranks of ``comm``, which it then owns."""
        self._mpi = mpi_library()
        self._comm = self._mpi.COMM_WORLD.Dup() if comm is None else comm
        self.rank, self.world_size = self._comm.Get_rank(), self._comm.Get_size()
        self._host = self._comm.Split_type(self._mpi.COMM_TYPE_SHARED)
        self.local_rank, self.local_world_size = self._host.Get_rank(), self._host.Get_size()
        self._peers = self._comm.Split(self.local_rank, self.rank)
        self._exchange = HostExchange(self._host, self._peers)
        why_not = why_not_shared(self._comm.allgather(self.local_world_size))
        self._memory = HostMemory(self._comm, self._host, is_available=self.world_size > 1 and not why_not)
        self.channel = self._new_channel()
        self._pair, self._largest = np.zeros(2, np.int64), np.zeros(2, np.int64)
        if comm is None:
            if why_not and self.rank == 0:
                print(f"MPI itself moves gradients: {why_not}", flush=True)
            abort_job_on_failure(self._mpi)

    def split(self, ranks: Sequence[int]) -> Transport:
        comm = self._comm.Split(min(ranks), list(ranks).index(self.rank))
        if len(ranks) == 1:
            comm.Free()
            return SingleProcessTransport()
        return MPITransport(comm)

    def _new_channel(self) -> MPIChannel:
        # The communicators of an old channel are not freed, because operations may be pending on them.
        cannot_overlap = ""
        if self.world_size == 1:
            cannot_overlap = "there is one rank"
        elif self._mpi.Query_thread() < self._mpi.THREAD_MULTIPLE:
            cannot_overlap = "this MPI was started without MPI_THREAD_MULTIPLE"
        return MPIChannel(self._mpi, (self._comm, self._host, self._peers), self._memory, cannot_overlap)

    def all_reduce(self, x: np.ndarray, op: str) -> np.ndarray:
        wide = x.astype(np.float32) if x.dtype == np.float16 else x
        if wide.dtype == np.bool_:
            wide = wide.view(np.uint8)
            op = "max" if op == "sum" else op
        out = np.empty_like(wide)
        if wide.nbytes < SHARED_FROM_BYTES or not self._stage():
            self._all_reduce_by_mpi(wide.reshape(-1), out.reshape(-1), op)
        else:
            self._exchange.all_reduce(wide.reshape(-1), out.reshape(-1), REDUCTIONS[op])
        return out.view(np.bool_) if x.dtype == np.bool_ else out.astype(x.dtype, copy=False)

    def _all_reduce_by_mpi(self, x: np.ndarray, out: np.ndarray, op: str) -> None:
        is_exact = x.itemsize >= 4 and (op == "sum" or x.dtype.kind in "iu")
        for begin in range(0, len(x), PIECE_BYTES // x.itemsize):
            piece = slice(begin, begin + PIECE_BYTES // x.itemsize)
            if is_exact:
                self._comm.Allreduce(x[piece], out[piece], op=getattr(self._mpi, _OPS[op]))
            else:
                out[piece] = reduce_arrays(self.all_gather(x[piece]), op)

    def all_equal(self, number: int) -> bool:
        """Compare in preallocated memory, because this is called before every collective."""
        self._pair[:] = number, -number
        self._comm.Allreduce(self._pair, self._largest, op=self._mpi.MAX)
        largest, minus_smallest = self._largest.tolist()
        return largest == -minus_smallest

    def broadcast(self, x: np.ndarray, src: int) -> np.ndarray:
        out = x.copy()
        self._broadcast_bytes_of(out, src)
        return out

    def _broadcast_bytes_of(self, array: np.ndarray, src: int) -> None:
        for piece in _pieces(array):
            self._comm.Bcast([piece, self._mpi.BYTE], root=src)

    def all_gather(self, x: np.ndarray) -> list[np.ndarray]:
        out = np.empty((self.world_size, x.size), x.dtype)
        if out.nbytes <= PIECE_BYTES:
            self._comm.Allgather([x, self._mpi.BYTE], [out, self._mpi.BYTE])
        else:
            out[self.rank] = x.reshape(-1)
            for rank, row in enumerate(out):
                self._broadcast_bytes_of(row, rank)
        return [part.reshape(x.shape) for part in out]

    def gather_on_host(self, obj: T) -> list[T]:
        return self._host.allgather(obj)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        lengths = np.empty(self.world_size, np.int64)
        self._comm.Allgather(np.array([len(data)], np.int64), lengths)
        ends = np.cumsum(lengths)
        everything = np.empty(int(ends[-1]), np.uint8)
        if len(everything) <= PIECE_BYTES:
            self._comm.Allgatherv([data, self._mpi.BYTE], [everything, lengths, ends - lengths, self._mpi.BYTE])
        else:
            everything[ends[self.rank] - len(data) : ends[self.rank]] = np.frombuffer(data, np.uint8)
            for rank, (end, length) in enumerate(zip(ends, lengths)):
                self._broadcast_bytes_of(everything[end - length : end], rank)
        return [everything[end - length : end].tobytes() for end, length in zip(ends, lengths)]

    def broadcast_bytes(self, data: bytes, src: int) -> bytes:
        length = np.array([len(data)], np.int64)
        self._comm.Bcast(length, root=src)
        out = np.frombuffer(bytearray(data), np.uint8) if self.rank == src else np.empty(int(length[0]), np.uint8)
        self._broadcast_bytes_of(out, src)
        return data if self.rank == src else out.tobytes()

    def all_to_all(self, x: np.ndarray, send_counts: Sequence[int], recv_counts: Sequence[int]) -> np.ndarray:
        out = np.empty((sum(recv_counts), *x.shape[1:]), x.dtype)
        # Count rows, because their bytes may be more than MPI can count.
        row = self._mpi.BYTE.Create_contiguous(x.dtype.itemsize * math.prod(x.shape[1:])).Commit()
        try:
            self._comm.Alltoallv([x, list(send_counts), row], [out, list(recv_counts), row])
        finally:
            row.Free()
        return out

    def send(self, x: np.ndarray, dst: int) -> None:
        for piece in _pieces(x):
            self._comm.Send([piece, self._mpi.BYTE], dest=dst)

    def begin_send(self, x: np.ndarray, dst: int, tag: int) -> Any:
        requests = [self._comm.Isend([piece, self._mpi.BYTE], dest=dst, tag=tag) for piece in _pieces(x)]
        return _Requests(requests)

    def recv(self, like: np.ndarray, src: int, tag: int = 0) -> np.ndarray:
        out = np.empty(like.shape, like.dtype)
        for piece in _pieces(out):
            self._comm.Recv([piece, self._mpi.BYTE], source=src, tag=tag)
        return out

    def barrier(self) -> None:
        self._comm.Barrier()

    def _stage(self) -> bool:
        """Return whether arrays can be staged in shared memory; the first call allocates it. A collective."""
        if not self._exchange.has_stage:
            rows = self._memory.rows(2 * STAGE_BYTES)
            if rows is None:
                return False
            self._exchange.set_stage(rows)
        return True

    def close(self) -> None:
        self.channel.close()
        for comm in (self._peers, self._host, self._comm):
            comm.Free()


class _Requests:
    """The pending sends of one array's pieces."""

    def __init__(self, requests: list[Any]) -> None:
        self._requests = requests

    def wait(self) -> None:
        for request in self._requests:
            request.Wait()


def _pieces(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yield a contiguous array as bytes, in pieces that MPI can count."""
    flat = array.reshape(-1).view(np.uint8)
    for begin in range(0, len(flat), PIECE_BYTES):
        yield flat[begin : begin + PIECE_BYTES]
