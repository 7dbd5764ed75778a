"""Where the processes meet: the group, and the collectives that everything else calls.

Goes in: a backend, chosen by who launched us (:mod:`mindnlp_dp.rendezvous`). Comes
out: one :class:`ProcessGroup` a process, with its rank and the world size.

Collectives are functional, take NumPy arrays and MindSpore tensors, and give back
the kind that they were given. All ranks must call the same ones in the same
order; ranks that do not agree get an error that shows every rank's call.
"""

from __future__ import annotations

import importlib
import os
import pickle
from collections.abc import Sequence
from typing import Any, Callable, Optional, TypeVar

import numpy as np

from .backends.base import Backend
from .backends.buckets import Bucket
from .backends.dtypes import dtype_name
from .bucket import BucketLayout
from .collective_checks import check_agreement, check_op, check_peer, check_rank, checked_array, describe, numel
from .compat import obey_device_target
from .rendezvous import choose_backend, detect_launch, make_backend

T = TypeVar("T")
_group: Optional[ProcessGroup] = None
# Whether this process ever joined a job; stays so when it has left.
was_started = False


def init_process_group(backend: str = "auto", *, tune_runtime: bool = True) -> ProcessGroup:
    """Meet the other processes of this job, and return the group of all of them.

    Call it once, before the first tensor is made; later calls return the same group.
    With ``tune_runtime``, on CPU, threads and dispatch are fitted to the cores of this
    process (:mod:`mindnlp_dp.runtime`); pass ``False`` to keep MindSpore's own.

    Raises:
        ValueError: ``backend`` is unknown, or contradicts the launcher or an earlier call.
        ImportError, RuntimeError: the backend's library is not installed, or sees other processes than were started.
    """
    global _group, was_started
    if _group is not None:
        if backend not in ("auto", _group.backend, _group.backend_kind):
            raise ValueError(f"init_process_group({backend!r}), but the group was started with {_group.backend!r}")
        return _group

    # MindNLP obeys DEVICE_TARGET when it is imported, which may be later.
    device = obey_device_target()
    kind = choose_backend(backend, launch := detect_launch(os.environ), device)
    implementation = make_backend(kind, launch)
    if tune_runtime:
        from .runtime import configure_runtime

        configure_runtime(device, implementation)
    _group = ProcessGroup(implementation, kind)
    was_started = True
    return _group


def get_process_group() -> ProcessGroup:
    """The group that :func:`init_process_group` made.

    Raises:
        RuntimeError: there is none yet; under a launcher, every process would train its own model.
    """
    if _group is not None:
        return _group
    launch = detect_launch(os.environ)
    among = f", though {launch.by} started {launch.num_known} processes" if launch.num_known > 1 else ""
    raise RuntimeError(
        f"no process group{among}; call mindnlp_dp.init_process_group() first, before the model is built"
    )


def destroy_process_group() -> None:
    """Leave the job."""
    global _group
    if _group is not None:
        _group._backend.close()
        _group = None


class ProcessGroup:
    """All processes of a job.

    Attributes:
        rank: this process, from 0 to ``world_size - 1``.
        world_size: how many processes there are.
        local_rank, local_world_size: the same, counted on this host.
        backend: the library that moves the bytes: ``"single"``, ``"mpi"``, ``"hccl"``, ``"nccl"`` or ``"mccl"``.
        is_main: whether this is rank 0, the one that writes and logs.
    """

    def __init__(self, backend: Backend, kind: str = "single") -> None:
        self._backend = backend
        self.backend_kind = kind

    @property
    def rank(self) -> int:
        return self._backend.rank

    @property
    def world_size(self) -> int:
        return self._backend.world_size

    @property
    def local_rank(self) -> int:
        return self._backend.local_rank

    @property
    def local_world_size(self) -> int:
        return self._backend.local_world_size

    @property
    def backend(self) -> str:
        return self._backend.name

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def __repr__(self) -> str:
        return f"ProcessGroup(rank={self.rank}, world_size={self.world_size}, backend={self.backend!r})"

    # Arrays: NumPy arrays or MindSpore tensors of any real type, any shape and any layout in memory. Shapes
    # and types are the same on every rank.

    def all_reduce(self, x: Any, op: str = "sum") -> Any:
        """Reduce elementwise over the ranks; every rank gets the result, shaped like ``x``.

        ``op`` is ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``. Half precision is summed
        in float32 on CPU. Of booleans, ``sum`` and ``max`` are "any", ``min`` is "all". The ``mean`` of
        integers or booleans raises TypeError: it would be rounded.
        """
        x = checked_array(x, self.rank)
        total = self._reduced("all_reduce", x, op)
        return x.copy() if total is None else self._backend.from_native(total, x)

    def _reduced(self, call: str, x: Any, op: str) -> Optional[Any]:
        """The reduction as the backend's own kind of array; None for an empty ``x``."""
        check_op(x, op, self.rank)
        check_agreement(self._backend, call, op, describe(x))
        if numel(x) == 0:
            return None
        total = self._backend.all_reduce(self._backend.to_native(x), "sum" if op == "mean" else op)
        return _divide(total, self.world_size) if op == "mean" else total

    def reduce(self, x: Any, dst: int = 0, op: str = "sum") -> Optional[Any]:
        """Like :meth:`all_reduce`, but the result is rank ``dst``'s; the others get None."""
        check_rank("dst", dst, self)
        result = self.all_reduce(x, op)
        return result if self.rank == dst else None

    def reduce_scatter(self, x: Any, op: str = "sum") -> Any:
        """Reduce ``x`` of shape ``(world_size, ...)`` over the ranks; rank ``r`` gets row ``r``."""
        x = checked_array(x, self.rank)
        if x.ndim == 0 or x.shape[0] != self.world_size:
            raise ValueError(
                f"reduce_scatter on rank {self.rank}: expected a first dimension of world_size "
                f"({self.world_size}), got shape {tuple(x.shape)}"
            )
        total = self._reduced("reduce_scatter", x, op)
        if total is None:
            return x.copy()[self.rank]
        return self._backend.from_native(total[self.rank : self.rank + 1].reshape(x.shape[1:]), x)

    def broadcast(self, x: Any, src: int = 0) -> Any:
        """Every rank gets rank ``src``'s ``x``."""
        x = checked_array(x, self.rank)
        check_rank("src", src, self)
        check_agreement(self._backend, "broadcast", f"src={src}", describe(x))
        if numel(x) == 0:
            return x.copy()
        return self._backend.from_native(self._backend.broadcast(self._backend.to_native(x), src), x)

    def all_gather(self, x: Any) -> list[Any]:
        """Every rank gets the list of all ranks' ``x``, in rank order."""
        x = checked_array(x, self.rank)
        check_agreement(self._backend, "all_gather", describe(x))
        if numel(x) == 0:
            return [x.copy() for _ in range(self.world_size)]
        gathered = self._backend.all_gather(self._backend.to_native(x))
        return [self._backend.from_native(part, x) for part in gathered]

    def gather(self, x: Any, dst: int = 0) -> Optional[list[Any]]:
        """Rank ``dst`` gets the list of all ranks' ``x``, in rank order; the others get None."""
        check_rank("dst", dst, self)
        gathered = self.all_gather(x)
        return gathered if self.rank == dst else None

    def scatter(self, xs: Optional[Sequence[Any]], src: int = 0) -> Any:
        """Rank ``r`` gets ``xs[r]``; only rank ``src`` passes ``xs``, one array a rank, the others None."""
        check_rank("src", src, self)
        wrong = None
        if self.rank == src and (xs is None or len(xs) != self.world_size):
            wrong = f"expected {self.world_size} arrays, one a rank, got {'None' if xs is None else len(xs)}"
        self.raise_together(ValueError(wrong) if wrong else None, f"scatter from rank {src}")
        mine = [checked_array(x, self.rank) for x in xs] if self.rank == src and xs is not None else []
        header = [(tuple(x.shape), dtype_name(x), isinstance(x, np.ndarray)) for x in mine]
        parts: list[Any] = []
        for index, (shape, dtype, is_numpy) in enumerate(self.broadcast_object(header, src)):
            parts.append(self.broadcast(mine[index] if mine else self._zeros(shape, dtype, is_numpy), src))
        return parts[self.rank]

    def send(self, x: Any, dst: int) -> None:
        """Send ``x`` to rank ``dst``, which must call :meth:`recv` with an array like it."""
        x = checked_array(x, self.rank)
        check_peer("dst", dst, self)
        self._backend.send(self._backend.to_native(x), dst)

    def recv(self, like: Any, src: int) -> Any:
        """Receive an array with the shape and type of ``like`` from rank ``src``."""
        like = checked_array(like, self.rank)
        check_peer("src", src, self)
        return self._backend.from_native(self._backend.recv(self._backend.to_native(like), src), like)

    def barrier(self) -> None:
        """Return when every rank is here."""
        check_agreement(self._backend, "barrier")
        self._backend.barrier()

    # Python objects, through pickle: between the processes of one job only, never from a file.

    def broadcast_object(self, obj: T, src: int = 0) -> T:
        """Every rank gets rank ``src``'s object."""
        check_rank("src", src, self)
        check_agreement(self._backend, "broadcast_object", f"src={src}")
        return self._backend.broadcast_object(obj, src)

    def all_gather_object(self, obj: T) -> list[T]:
        """Every rank gets the list of all ranks' objects, in rank order."""
        check_agreement(self._backend, "all_gather_object")
        return self._backend.all_gather_object(obj)

    # What the ranks do as one.

    def call_where(self, here: bool, function: Callable[[], T], doing: str) -> Optional[T]:
        """Call ``function`` on the ranks that say ``here``; the others get None, and every rank the same exception."""
        result, error = None, None
        if here:
            try:
                result = function()
            except Exception as caught:  # noqa: BLE001
                # Whatever it is, it goes to every rank.
                error = caught
        self.raise_together(error, doing)
        return result

    def call_on_main(self, function: Callable[[], T], doing: str) -> T:
        """Call ``function`` on rank 0; every rank gets its result, or the same exception."""
        return self.broadcast_object(self.call_where(self.is_main, function, doing))  # type: ignore[return-value]

    def raise_together(self, error: Optional[Exception], doing: str) -> None:
        """Raise on every rank when any rank brings an error; the lowest such rank's is the cause.

        The rank that failed raises its own error. The others raise the same kind, with the
        rank and ``doing`` in front, or RuntimeError where that kind cannot be rebuilt.
        """
        reports = self.all_gather_object(None if error is None else (_kind(error), str(error)))
        if error is not None:
            raise error
        for rank, report in enumerate(reports):
            if report is not None:
                kind, message = report
                try:
                    remote = kind(f"{doing} failed on rank {rank}: {message}")
                except TypeError:
                    remote = RuntimeError(f"{doing} failed on rank {rank}: {kind.__name__}: {message}")
                raise remote

    def make_buckets(self, layouts: Sequence[BucketLayout], compression: Optional[str] = None) -> list[Bucket]:
        """Memory of the backend's own kind for gradients, a bucket for each layout. A collective."""
        return self._backend.make_buckets(layouts, compression)

    def _zeros(self, shape: tuple[int, ...], dtype: str, is_numpy: bool) -> Any:
        zeros = np.zeros(shape, np.float32 if dtype == "bfloat16" else dtype)
        if not is_numpy:
            return self._backend.from_host(zeros, dtype)
        # NumPy learns bfloat16 from ml_dtypes, and a bfloat16 array cannot have come from elsewhere.
        return zeros.astype(importlib.import_module("ml_dtypes").bfloat16) if dtype == "bfloat16" else zeros


def _kind(error: Exception) -> type[Exception]:
    """The type of an error, if it can travel: one that is defined inside a function cannot."""
    try:
        pickle.dumps(type(error))
    except (pickle.PicklingError, AttributeError):
        return RuntimeError
    return type(error)


def _divide(x: Any, divisor: int) -> Any:
    mean = (x / divisor).astype(x.dtype)
    # NumPy makes a number of an array without dimensions.
    return np.asarray(mean) if isinstance(x, np.ndarray) else mean
