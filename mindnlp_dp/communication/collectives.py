"""The group of a job's processes, and the collectives that everything else calls.

Goes in: a transport (transports/). Comes out: functions of arrays and objects that every rank calls.

Collectives are functional, take NumPy arrays and MindSpore tensors, and give back
the kind that they were given. All ranks must call the same ones in the same
order; ranks that do not agree get an error that shows every rank's call, and so do all when one rank's
arguments are wrong.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any, Optional

import numpy as np

from mindnlp_dp.arrays.conversion import from_host, to_host
from mindnlp_dp.arrays.types import HALF_TYPES, dtype_name

from .checks import (
    check_agreement,
    check_op,
    check_peer,
    check_rank,
    checked_array,
    describe,
    described_by,
    message_header,
    numel,
)
from .rank_group import RankGroup, waits


class ProcessGroup(RankGroup):
    """All processes of a job.

    Attributes:
        rank: this process, from 0 to ``world_size - 1``.
        world_size: how many processes there are.
        local_rank, local_world_size: the same, counted on this host.
        backend: the library that moves the bytes: ``"single"``, ``"mpi"``, ``"hccl"``, ``"nccl"`` or ``"mccl"``.
        is_main: whether this is rank 0, the one that writes and logs.
    """

    # Arrays: NumPy arrays or MindSpore tensors of any real type, any shape and any layout in memory. Shapes
    # and types are the same on every rank.

    @waits
    def all_reduce(self, x: Any, op: str = "sum", *, is_hot: bool = False) -> Any:
        """Reduce elementwise over the ranks; every rank gets the result, shaped like ``x``.

        ``op`` is ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``. Half precision is summed in float32 on CPU, and for
        its mean everywhere. Integers that are too small for their sum wrap around, and NaN wins over all numbers, as
        with NumPy. Of booleans, ``sum`` and ``max`` are "any", ``min`` is "all". The ``mean`` of integers or booleans
        raises TypeError: it would be rounded. ``is_hot`` says that every rank makes this call at every update,
        whatever happens: see ``checks`` of :func:`~mindnlp_dp.init_process_group`.
        """
        x = self._agree("all_reduce", lambda: (checked_array(x, self.label()), [check_op(x, op, self.label())]), is_hot)
        total = self._reduced(x, op)
        return x.copy() if total is None else self._transport.from_native(total, x)

    def _reduced(self, x: Any, op: str) -> Optional[Any]:
        """The reduction as the transport's own kind of array; None for an empty ``x``."""
        if numel(x) == 0:
            return None
        native = self._transport.to_native(x)
        if op != "mean":
            return self._transport.all_reduce(native, op)
        # The sum of half types may not fit into them, where their mean does.
        wide = self._transport.widened(native) if dtype_name(x) in HALF_TYPES else native
        return _divide(self._transport.all_reduce(wide, "sum"), self.world_size)

    @waits
    def reduce(self, x: Any, dst: int = 0, op: str = "sum") -> Optional[Any]:
        """Like :meth:`all_reduce`, but the result is rank ``dst``'s; the others get None."""
        self._agree("reduce", lambda: (None, [check_rank("dst", dst, self)]))
        result = self.all_reduce(x, op)
        return result if self.rank == dst else None

    @waits
    def reduce_scatter(self, x: Any, op: str = "sum") -> Any:
        """Reduce ``x`` of shape ``(world_size, ...)`` over the ranks; rank ``r`` gets row ``r``."""

        def check() -> tuple[Any, list[str]]:
            array = checked_array(x, self.label())
            if array.ndim == 0 or array.shape[0] != self.world_size:
                raise ValueError(
                    f"reduce_scatter on rank {self.label()}: expected a first dimension of world_size "
                    f"({self.world_size}), got shape {tuple(array.shape)}"
                )
            return array, [check_op(array, op, self.label())]

        x = self._agree("reduce_scatter", check)
        total = self._reduced(x, op)
        if total is None:
            return x.copy()[self.rank]
        return self._transport.from_native(total[self.rank : self.rank + 1].reshape(x.shape[1:]), x)

    @waits
    def broadcast(self, x: Any, src: int = 0) -> Any:
        """Every rank gets rank ``src``'s ``x``."""
        x = self._agree("broadcast", lambda: (checked_array(x, self.label()), [check_rank("src", src, self)]))
        if numel(x) == 0:
            return x.copy()
        return self._transport.from_native(self._transport.broadcast(self._transport.to_native(x), src), x)

    @waits
    def all_gather(self, x: Any) -> list[Any]:
        """Every rank gets the list of all ranks' ``x``, in rank order."""
        x = self._agree("all_gather", lambda: (checked_array(x, self.label()), []))
        if numel(x) == 0:
            return [x.copy() for _ in range(self.world_size)]
        gathered = self._transport.all_gather(self._transport.to_native(x))
        return [self._transport.from_native(part, x) for part in gathered]

    @waits
    def gather(self, x: Any, dst: int = 0) -> Optional[list[Any]]:
        """Rank ``dst`` gets the list of all ranks' ``x``, in rank order; the others get None."""
        self._agree("gather", lambda: (None, [check_rank("dst", dst, self)]))
        gathered = self.all_gather(x)
        return gathered if self.rank == dst else None

    @waits
    def scatter(self, xs: Optional[Sequence[Any]], src: int = 0) -> Any:
        """Rank ``r`` gets ``xs[r]``; only rank ``src`` passes ``xs``, one array a rank, the others None."""

        def check() -> tuple[None, list[str]]:
            arguments = [check_rank("src", src, self)]
            if self.rank == src and (xs is None or len(xs) != self.world_size):
                got = "None" if xs is None else len(xs)
                raise ValueError(f"scatter from rank {src}: expected {self.world_size} arrays, one a rank, got {got}")
            if self.rank == src and xs is not None:
                mine.extend(checked_array(x, self.label()) for x in xs)
            return None, arguments

        mine: list[Any] = []
        self._agree("scatter", check)
        header = [(tuple(x.shape), dtype_name(x), isinstance(x, np.ndarray)) for x in mine]
        parts: list[Any] = []
        for index, (shape, dtype, is_numpy) in enumerate(self.broadcast_object(header, src)):
            parts.append(self.broadcast(mine[index] if mine else self._zeros(shape, dtype, is_numpy), src))
        return parts[self.rank]

    # Between two ranks. What is sent says what it is, so that rank ``dst`` never takes it for something else.

    @waits
    def send(self, x: Any, dst: int) -> None:
        """Send ``x`` to rank ``dst``, which must call :meth:`recv` with an array like it.

        What cannot be sent is an error on both ranks; only a ``dst`` that is no other rank is one on this rank alone.
        """
        check_peer("dst", dst, self)
        try:
            x = checked_array(x, self.label())
        except TypeError:
            self._transport.send(self._transport.to_native(message_header(None)), dst)
            raise
        self._transport.send(self._transport.to_native(message_header(x)), dst)
        if numel(x):
            self._transport.send(self._transport.to_native(x), dst)

    @waits
    def recv(self, like: Any, src: int) -> Any:
        """Receive an array with the shape and type of ``like`` from rank ``src``.

        Raises:
            ValueError: rank ``src`` sent another shape or type, which is taken and lost, or could not send.
        """
        like = checked_array(like, self.label())
        check_peer("src", src, self)
        header = self._transport.recv(self._transport.to_native(message_header(like)), src)
        shape, dtype = described_by(to_host(header), self.label(src))
        sent = like if (shape, dtype) == (tuple(like.shape), dtype_name(like)) else self._zeros(shape, dtype, True)
        x = (
            self._transport.from_native(self._transport.recv(self._transport.to_native(sent), src), sent)
            if numel(sent)
            else like
        )
        if sent is not like:
            raise ValueError(
                f"recv on rank {self.label()}: expected {describe(like)}, and rank {self.label(src)} sent {dtype} of "
                f"shape {shape}"
            )
        return x.copy() if numel(like) == 0 else x

    @waits
    def all_to_all(self, x: Any, counts: Sequence[int]) -> tuple[Any, list[int]]:
        """Rows of ``x`` to the ranks: the first ``counts[0]`` to rank 0, and so on; counts may differ, and be 0.

        Returns the rows that the ranks sent here, in rank order, and how many each has sent. All ranks' rows are of one
        shape and type.
        """

        def check() -> tuple[None, list[str]]:
            array = checked_array(x, self.label())
            if array.ndim == 0 or len(counts) != self.world_size or sum(counts) != len(array) or min(counts) < 0:
                raise ValueError(
                    f"all_to_all on rank {self.label()}: expected {self.world_size} counts, one a rank, that add up to "
                    f"the rows of an array of shape {tuple(array.shape)}; got {list(counts)}"
                )
            return None, [f"rows of {dtype_name(array)}, shape {tuple(array.shape[1:])}"]

        self._agree("all_to_all", check, is_hot=True)
        everyone = self._transport.all_gather(self._transport.to_native(np.array(counts, np.int64)))
        theirs = [int(to_host(part)[self.rank]) for part in everyone]
        return self.exchange_rows(x, counts, theirs), theirs

    @waits
    def exchange_rows(self, x: Any, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Any:
        """What :meth:`all_to_all` does, where every rank knows how many rows come; nothing is asked or checked."""
        if math.prod(x.shape[1:]) == 0:
            return self._zeros((sum(recv_counts), *x.shape[1:]), dtype_name(x), isinstance(x, np.ndarray))
        rows = self._transport.all_to_all(self._transport.to_native(x), send_counts, recv_counts)
        return self._transport.from_native(rows, x)

    @waits
    def barrier(self) -> None:
        """Return when every rank is here."""
        check_agreement(self._transport, "barrier")
        self._transport.barrier()

    @waits
    def sum_header(self, numbers: np.ndarray, last: Any = 0.0) -> np.ndarray:
        """The sums over the ranks of ``numbers``, a flat float32 array, and of ``last``; made at every update.

        ``last`` may be a tensor of one number, so that a device is waited for once. See ``checks`` of
        :func:`~mindnlp_dp.init_process_group`.
        """
        self._agree("sum_header", lambda: (numbers, []), is_hot=True)
        return self._transport.sum_header(numbers, last)

    def _zeros(self, shape: tuple[int, ...], dtype: str, is_numpy: bool) -> Any:
        zeros = np.zeros(shape, np.float32 if dtype == "bfloat16" else dtype)
        if not is_numpy:
            return from_host(zeros, dtype)
        # NumPy learns bfloat16 from ml_dtypes, and a bfloat16 array cannot have come from elsewhere.
        return zeros.astype(importlib.import_module("ml_dtypes").bfloat16) if dtype == "bfloat16" else zeros


def _divide(x: Any, divisor: int) -> Any:
    mean = (x / divisor).astype(x.dtype)
    # NumPy makes a number of an array without dimensions.
    return np.asarray(mean) if isinstance(x, np.ndarray) else mean
