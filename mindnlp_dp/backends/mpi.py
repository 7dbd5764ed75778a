"""MPI through mpi4py: the fast backend on CPU. Arrays are NumPy arrays.

MPI has no half precision: float16 is summed in float32 and rounded once.
"""

from __future__ import annotations

import sys
import types
from typing import Optional

import numpy as np

from .base import HostBackend

_OPS = {"sum": "SUM", "max": "MAX", "min": "MIN"}


class MPIBackend(HostBackend):
    name = "mpi"

    def __init__(self) -> None:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise ImportError(
                f'started by mpirun, but MPI cannot be used: {error}; pip install "mindnlp-dp[mpi]"'
            ) from error
        self._mpi = MPI
        self._comm = MPI.COMM_WORLD.Dup()
        self.rank, self.world_size = self._comm.Get_rank(), self._comm.Get_size()
        host = self._comm.Split_type(MPI.COMM_TYPE_SHARED)
        self.local_rank, self.local_world_size = host.Get_rank(), host.Get_size()
        host.Free()
        self._abort_all_on_exception()

    def _abort_all_on_exception(self) -> None:
        """An uncaught exception on one rank ends the job; without this the others wait in MPI for ever."""
        previous = sys.excepthook

        def excepthook(kind: type[BaseException], error: BaseException, trace: Optional[types.TracebackType]) -> None:
            previous(kind, error, trace)
            sys.stdout.flush()
            sys.stderr.flush()
            if self.world_size > 1:
                self._comm.Abort(1)

        sys.excepthook = excepthook

    def all_reduce(self, x: np.ndarray, op: str) -> np.ndarray:
        wide = x.astype(np.float32) if x.dtype == np.float16 else x
        if wide.dtype == np.bool_:
            wide = wide.view(np.uint8)
            op = "max" if op == "sum" else op
        out = np.empty_like(wide)
        self._comm.Allreduce(wide, out, op=getattr(self._mpi, _OPS[op]))
        return out.view(np.bool_) if x.dtype == np.bool_ else out.astype(x.dtype, copy=False)

    def broadcast(self, x: np.ndarray, src: int) -> np.ndarray:
        out = x.copy()
        self._comm.Bcast([out, self._mpi.BYTE], root=src)
        return out

    def all_gather(self, x: np.ndarray) -> list[np.ndarray]:
        out = np.empty((self.world_size, x.size), x.dtype)
        self._comm.Allgather([x, self._mpi.BYTE], [out, self._mpi.BYTE])
        return [part.reshape(x.shape) for part in out]

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return self._comm.allgather(data)

    def broadcast_bytes(self, data: bytes, src: int) -> bytes:
        return self._comm.bcast(data, root=src)

    def send(self, x: np.ndarray, dst: int) -> None:
        self._comm.Send([x, self._mpi.BYTE], dest=dst)

    def recv(self, like: np.ndarray, src: int) -> np.ndarray:
        out = np.empty_like(like)
        self._comm.Recv([out, self._mpi.BYTE], source=src)
        return out

    def barrier(self) -> None:
        self._comm.Barrier()

    def all_reduce_in_place(self, buffer: np.ndarray) -> None:
        self._comm.Allreduce(self._mpi.IN_PLACE, buffer, op=self._mpi.SUM)

    def close(self) -> None:
        self._comm.Free()
