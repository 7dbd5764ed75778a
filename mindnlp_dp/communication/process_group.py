"""This module implements :class:`ProcessGroup` and its collectives, which the rest of the package calls.

A transport (transports/) moves the data. Collectives take NumPy arrays or MindSpore tensors, return the same
kind, and do not change their arguments. All ranks must call the same collectives in the same order. If the calls
differ, every rank gets an error that shows the calls of all ranks; if one rank's arguments are wrong, every rank
gets that error.
"""

from __future__ import annotations

import functools
import importlib
import math
import pickle
from collections.abc import Sequence
from typing import Any, Callable, Optional, TypeVar, cast

import numpy as np

from mindnlp_dp.communication.consistency_checks import (
    check_agreement,
    check_op,
    check_peer,
    check_rank,
    checked_array,
    describe,
    described_by,
    message_header,
    numel,
    raise_reported,
    report_of,
)
from mindnlp_dp.communication.operations import Operation
from mindnlp_dp.communication.transports.transport import Transport
from mindnlp_dp.runtime import heartbeat
from mindnlp_dp.runtime.arrays import HALF_TYPES, dtype_name, from_host, to_host

T = TypeVar("T")

G = TypeVar("G", bound="ProcessGroup")

F = TypeVar("F", bound=Callable[..., Any])


def reports_blocking(method: F) -> F:
    """Decorate a method that may wait for other ranks: report it as a wait (:mod:`mindnlp_dp.runtime.heartbeat`)."""

    @functools.wraps(method)
    def call(self: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        with heartbeat.waiting(f"{method.__name__} of {self.world_size} ranks"):
            return method(self, *args, **kwargs)

    return cast(F, call)


class ProcessGroup:
    """All ranks of a job, or some of them, and their collectives.

    Attributes:
        rank: number of this process, from 0 to ``world_size - 1``.
        world_size: number of processes.
        local_rank: number of this process among those of this host.
        local_world_size: number of processes on this host.
        backend: library that moves the bytes: ``"single"``, ``"mpi"``, ``"hccl"``, ``"nccl"`` or ``"mccl"``.
        is_main: whether this is rank 0, which writes and logs.
    """

    def __init__(self, transport: Transport, kind: str = "single", *, checks: str = "auto") -> None:
        self._transport = transport
        self._checks = checks
        self.backend_kind = kind
        self._checks_hot_calls = checks == "all" or (checks == "auto" and not transport.waits_for_a_device)

    @property
    def rank(self) -> int:
        return self._transport.rank

    @property
    def world_size(self) -> int:
        return self._transport.world_size

    @property
    def local_rank(self) -> int:
        return self._transport.local_rank

    @property
    def local_world_size(self) -> int:
        return self._transport.local_world_size

    @property
    def backend(self) -> str:
        return self._transport.name

    @reports_blocking
    def split(self: G, ranks: Sequence[int], labels: Sequence[str] = ()) -> G:
        """Return the subgroup of ``ranks``, which include this one. A collective; the subgroups must be disjoint."""
        transport = self._transport.split(ranks)
        transport.labels = labels
        return type(self)(transport, self.backend_kind, checks=self._checks)

    def set_rank_labels(self, labels: Sequence[str]) -> None:
        """Set the names of the ranks in messages, in rank order."""
        self._transport.labels = labels

    def label(self, rank: Optional[int] = None) -> str:
        """Return the name of a rank (this one by default) in messages; in the group of a mesh, its coordinates."""
        return self._transport.label(self.rank if rank is None else rank)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def on_device(self) -> bool:
        """Whether arrays are exchanged on a device, so that reading a result makes the host wait for it."""
        return self._transport.waits_for_a_device

    def library_without(self, operation: Operation) -> str:
        """Return the name of the library that moves the bytes if it does not have an operation; empty if it has."""
        return self._transport.library_without(operation)

    def __repr__(self) -> str:
        return f"ProcessGroup(rank={self.rank}, world_size={self.world_size}, backend={self.backend!r})"

    def _agree(self, call: str, check: Callable[[], tuple[Any, list[str]]], every_step: bool = False) -> Any:
        """Check this rank's arguments and that all ranks make the same call; return the array that ``check`` returns.

        ``check`` returns the array, and the values other than its type and shape that must be equal on every rank, or
        raises an error such as ValueError. A rank with wrong arguments takes part, so that the others learn of it, and
        then raises its own error.
        """
        wrong: Optional[Exception] = None
        try:
            x, arguments = check()
            arguments = [*arguments, *([] if x is None else [describe(x)])]
        except Exception as error:  # noqa: BLE001
            # The others must learn of any error.
            wrong, arguments = error, [str(error)]
        if wrong is not None or not every_step or self._checks_hot_calls:
            check_agreement(self._transport, call, *arguments, wrong=wrong)
        return x

    # Python objects are pickled: only between the processes of one job, never from a file.

    @reports_blocking
    def broadcast_object(self, obj: T, src: int = 0) -> T:
        """Return rank ``src``'s object on every rank."""
        data = b""

        def check() -> tuple[None, list[str]]:
            nonlocal data
            arguments = [check_rank("src", src, self)]
            data = pickle.dumps(obj) if self.rank == src else b""
            return None, arguments

        self._agree("broadcast_object", check)
        received = self._transport.broadcast_bytes(data, src)
        return obj if self.rank == src else pickle.loads(received)

    @reports_blocking
    def all_gather_object(self, obj: T) -> list[T]:
        """Return the list of all ranks' objects, in rank order, on every rank."""
        data = b""

        def check() -> tuple[None, list[str]]:
            nonlocal data
            data = pickle.dumps(obj)
            return None, []

        self._agree("all_gather_object", check)
        return [pickle.loads(part) for part in self._transport.all_gather_bytes(data)]

    # Calls that succeed or fail on all ranks together.

    def run_on(self, here: bool, function: Callable[[], T], doing: str) -> Optional[T]:
        """Call ``function`` on the ranks where ``here`` is true; the others get None. Exceptions reach every rank."""
        result, error = None, None
        if here:
            try:
                result = function()
            except Exception as caught:  # noqa: BLE001
                # Any error must reach every rank.
                error = caught
        self.raise_on_all_ranks(error, doing)
        return result

    def run_on_rank0(self, function: Callable[[], T], doing: str) -> T:
        """Call ``function`` on rank 0, and return its result, or raise its exception, on every rank."""
        return self.broadcast_object(self.run_on(self.is_main, function, doing))  # type: ignore[return-value]

    def raise_on_all_ranks(self, error: Optional[Exception], doing: str) -> None:
        """Raise an error on every rank if any rank passes one; the error of the lowest such rank counts.

        A rank that failed raises its own error. The others raise the same kind, with the rank and ``doing`` in
        front, or RuntimeError where that kind cannot be rebuilt.
        """
        raise_reported(self.all_gather_object(report_of(error)), error, doing, self.label)

    # Collectives. Arrays are NumPy arrays or MindSpore tensors of any real type, shape and memory layout. Shapes and
    # types must be the same on every rank.

    @reports_blocking
    def all_reduce(self, x: Any, op: str = "sum", *, every_step: bool = False) -> Any:
        """Reduce ``x`` elementwise over the ranks; every rank gets the result, shaped like ``x``.

        Half-precision arrays are summed in float32 on CPU, and on every backend for their mean. As in NumPy, integer
        sums that overflow wrap around, and the result of NaN and a number is NaN.

        Args:
            x: an array or tensor, of the same shape and type on every rank.
            op: "sum", "mean", "max" or "min". For booleans, "sum" and "max" mean "any", and "min" means "all".
            every_step: whether every rank makes this call at every update, whatever happens: see ``checks`` of
                :func:`~mindnlp_dp.init_process_group`.

        Raises:
            TypeError: the mean of integers or booleans, which would be rounded.
        """
        x = self._agree(
            "all_reduce", lambda: (checked_array(x, self.label()), [check_op(x, op, self.label())]), every_step
        )
        total = self._reduced(x, op)
        return x.copy() if total is None else self._transport.from_native(total, x)

    def _reduced(self, x: Any, op: str) -> Optional[Any]:
        """Return the reduction as the transport's own kind of array; None for an empty ``x``."""
        if numel(x) == 0:
            return None
        native = self._transport.to_native(x)
        if op != "mean":
            return self._transport.all_reduce(native, op)
        # The sum may overflow a half type although the mean fits.
        wide = self._transport.widened(native) if dtype_name(x) in HALF_TYPES else native
        return _divide(self._transport.all_reduce(wide, "sum"), self.world_size)

    @reports_blocking
    def reduce(self, x: Any, dst: int = 0, op: str = "sum") -> Optional[Any]:
        """Reduce like :meth:`all_reduce`; only rank ``dst`` gets the result, the others get None."""
        self._agree("reduce", lambda: (None, [check_rank("dst", dst, self)]))
        result = self.all_reduce(x, op)
        return result if self.rank == dst else None

    @reports_blocking
    def reduce_scatter(self, x: Any, op: str = "sum") -> Any:
        """Reduce ``x`` of shape ``(world_size, ...)`` over the ranks; rank ``r`` gets row ``r`` of the result."""

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

    @reports_blocking
    def broadcast(self, x: Any, src: int = 0) -> Any:
        """Return rank ``src``'s ``x`` on every rank."""
        x = self._agree("broadcast", lambda: (checked_array(x, self.label()), [check_rank("src", src, self)]))
        if numel(x) == 0:
            return x.copy()
        return self._transport.from_native(self._transport.broadcast(self._transport.to_native(x), src), x)

    @reports_blocking
    def all_gather(self, x: Any, *, every_step: bool = False) -> list[Any]:
        """Return the list of all ranks' ``x``, in rank order, on every rank.

        ``every_step`` is for calls within training steps, as in :meth:`all_reduce`.
        """
        x = self._agree("all_gather", lambda: (checked_array(x, self.label()), []), every_step)
        if numel(x) == 0:
            return [x.copy() for _ in range(self.world_size)]
        gathered = self._transport.all_gather(self._transport.to_native(x))
        return [self._transport.from_native(part, x) for part in gathered]

    @reports_blocking
    def gather(self, x: Any, dst: int = 0) -> Optional[list[Any]]:
        """Return the list of all ranks' ``x``, in rank order, on rank ``dst``; the others get None."""
        self._agree("gather", lambda: (None, [check_rank("dst", dst, self)]))
        gathered = self.all_gather(x)
        return gathered if self.rank == dst else None

    @reports_blocking
    def scatter(self, xs: Optional[Sequence[Any]], src: int = 0) -> Any:
        """Return ``xs[r]`` on rank ``r``; only rank ``src`` passes ``xs``, one array per rank, the others pass None."""

        def check() -> tuple[None, list[str]]:
            arguments = [check_rank("src", src, self)]
            if self.rank == src and (xs is None or len(xs) != self.world_size):
                got = "None" if xs is None else len(xs)
                raise ValueError(
                    f"scatter from rank {src}: expected {self.world_size} arrays, one for each rank, got {got}"
                )
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

    # Point-to-point messages begin with a header of type and shape, so that rank ``dst`` never misreads the data.

    @reports_blocking
    def send(self, x: Any, dst: int) -> None:
        """Send ``x`` to rank ``dst``, which must call :meth:`recv` with an array of the same shape and type.

        An ``x`` that cannot be sent raises an error on both ranks; a wrong ``dst`` raises one on this rank only.
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

    @reports_blocking
    def recv(self, like: Any, src: int) -> Any:
        """Receive an array with the shape and type of ``like`` from rank ``src``.

        Raises:
            ValueError: rank ``src`` sent another shape or type (the message is then lost), or could not send.
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

    @reports_blocking
    def all_to_all(self, x: Any, counts: Sequence[int]) -> tuple[Any, list[int]]:
        """Send the first ``counts[0]`` rows of ``x`` to rank 0, the next to rank 1, and so on; a count may be 0.

        Returns the rows that the ranks sent to this rank, in rank order, and the number of rows from each. The rows of
        all ranks have the same shape and type.
        """

        def check() -> tuple[None, list[str]]:
            array = checked_array(x, self.label())
            if array.ndim == 0 or len(counts) != self.world_size or sum(counts) != len(array) or min(counts) < 0:
                raise ValueError(
                    f"all_to_all on rank {self.label()}: expected {self.world_size} counts, one for each rank, that "
                    f"add up to the rows of an array of shape {tuple(array.shape)}; got {list(counts)}"
                )
            return None, [f"rows of {dtype_name(array)}, shape {tuple(array.shape[1:])}"]

        self._agree("all_to_all", check, every_step=True)
        everyone = self._transport.all_gather(self._transport.to_native(np.array(counts, np.int64)))
        theirs = [int(to_host(part)[self.rank]) for part in everyone]
        return self.exchange_rows(x, counts, theirs), theirs

    @reports_blocking
    def exchange_rows(self, x: Any, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Any:
        """Exchange rows like :meth:`all_to_all` when every rank knows ``recv_counts``, without any check."""
        if math.prod(x.shape[1:]) == 0:
            return self._zeros((sum(recv_counts), *x.shape[1:]), dtype_name(x), isinstance(x, np.ndarray))
        rows = self._transport.all_to_all(self._transport.to_native(x), send_counts, recv_counts)
        return self._transport.from_native(rows, x)

    @reports_blocking
    def barrier(self) -> None:
        """Return when every rank has called this method."""
        check_agreement(self._transport, "barrier")
        self._transport.barrier()

    @reports_blocking
    def all_reduce_header(self, numbers: np.ndarray, last: Any = 0.0) -> np.ndarray:
        """Return the sums over the ranks of ``numbers`` (flat, float32) followed by ``last``; called at every update.

        ``last`` may be a one-element tensor, so that the host waits for a device only once. See ``checks`` of
        :func:`~mindnlp_dp.init_process_group`.
        """
        self._agree("all_reduce_header", lambda: (numbers, []), every_step=True)
        return self._transport.all_reduce_header(numbers, last)

    def _zeros(self, shape: tuple[int, ...], dtype: str, is_numpy: bool) -> Any:
        zeros = np.zeros(shape, np.float32 if dtype == "bfloat16" else dtype)
        if not is_numpy:
            return from_host(zeros, dtype)
        # NumPy gets bfloat16 only from ml_dtypes, so a job that sends such an array has it installed.
        return zeros.astype(importlib.import_module("ml_dtypes").bfloat16) if dtype == "bfloat16" else zeros


def _divide(x: Any, divisor: int) -> Any:
    mean = (x / divisor).astype(x.dtype)
    # NumPy turns a 0-dimensional array into a scalar.
    return np.asarray(mean) if isinstance(x, np.ndarray) else mean
