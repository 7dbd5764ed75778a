"""This module implements the base class of a process group: agreement between ranks, and exchange of Python objects.

It calls a transport (transports/); collectives.py adds the collectives of arrays.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Sequence
from typing import Any, Callable, Optional, TypeVar, cast

from mindnlp_dp.runtime import heartbeat

from .checks import check_agreement, check_rank, describe, raise_reported, report_of
from .transports.transport import Transport

T = TypeVar("T")
G = TypeVar("G", bound="RankGroup")
F = TypeVar("F", bound=Callable[..., Any])


def waits(method: F) -> F:
    """Decorate a method that may wait for other ranks: report it as a wait (:mod:`mindnlp_dp.runtime.heartbeat`)."""

    @functools.wraps(method)
    def call(self: RankGroup, *args: Any, **kwargs: Any) -> Any:
        report = heartbeat.reporter()
        if report is None:
            return method(self, *args, **kwargs)
        report.begin_to_wait(f"{method.__name__} of {self.world_size} ranks")
        try:
            return method(self, *args, **kwargs)
        finally:
            report.end_wait()

    return cast(F, call)


class RankGroup:
    """Ranks that agree on calls and exchange Python objects; the base of :class:`~mindnlp_dp.ProcessGroup`."""

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

    @waits
    def split(self: G, ranks: Sequence[int], labels: Sequence[str] = ()) -> G:
        """Return the subgroup of ``ranks``, which include this one. A collective; the subgroups must be disjoint."""
        transport = self._transport.split(ranks)
        transport.labels = labels
        return type(self)(transport, self.backend_kind, checks=self._checks)

    def tells_of_a_loss(self, error: BaseException) -> bool:
        """Return whether ``error`` means that a rank was lost and the others can continue without it (MPI's ULFM)."""
        return self._transport.tells_of_a_loss(error)

    def go_on_without_lost(self) -> None:
        """Shrink this group to the surviving ranks, which are renumbered in their order.

        A collective of the surviving ranks; each calls it after an error for which :meth:`tells_of_a_loss` is true.
        Objects that belong to the larger group, such as an exchange of gradients, can no longer be used.
        """
        with heartbeat.waiting("going on without a lost rank"):
            self._transport = self._transport.of_those_left()
        heartbeat.note_members(self.world_size)

    def name_ranks(self, labels: Sequence[str]) -> None:
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

    def __repr__(self) -> str:
        return f"ProcessGroup(rank={self.rank}, world_size={self.world_size}, backend={self.backend!r})"

    def _agree(self, call: str, check: Callable[[], tuple[Any, list[str]]], is_hot: bool = False) -> Any:
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
        if wrong is not None or not is_hot or self._checks_hot_calls:
            check_agreement(self._transport, call, *arguments, wrong=wrong)
        return x

    # Python objects are pickled: only between the processes of one job, never from a file.

    @waits
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

    @waits
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

    def call_where(self, here: bool, function: Callable[[], T], doing: str) -> Optional[T]:
        """Call ``function`` on the ranks where ``here`` is true; the others get None. Exceptions reach every rank."""
        result, error = None, None
        if here:
            try:
                result = function()
            except Exception as caught:  # noqa: BLE001
                # Any error must reach every rank.
                error = caught
        self.raise_together(error, doing)
        return result

    def call_on_main(self, function: Callable[[], T], doing: str) -> T:
        """Call ``function`` on rank 0, and return its result, or raise its exception, on every rank."""
        return self.broadcast_object(self.call_where(self.is_main, function, doing))  # type: ignore[return-value]

    def raise_together(self, error: Optional[Exception], doing: str) -> None:
        """Raise an error on every rank if any rank passes one; the error of the lowest such rank counts.

        A rank that failed raises its own error. The others raise the same kind, with the rank and ``doing`` in
        front, or RuntimeError where that kind cannot be rebuilt.
        """
        raise_reported(self.all_gather_object(report_of(error)), error, doing, self.label)
