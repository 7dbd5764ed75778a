"""How many hosts and ranks a job has, from one try to the next.

Goes in: what was asked for (``--nnodes``, ``--nproc``), hosts that come and go, ranks that are lost. Comes out: the
hosts of the next try, the ranks on each, and whether a job that runs could grow.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional, Union

from .engines import NotMetError
from .head import Head, Rendezvous
from .host import LocalHost
from .remote_host import RemoteHost

Host = Union[LocalHost, RemoteHost]
# In which hosts that are started together have come.
_SILENT_SECONDS = 5.0


@dataclass(frozen=True)
class Size:
    """A number, or, of an elastic job, the least and the most."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> Size:
        """``N`` or ``MIN:MAX``.

        >>> Size.parse("2"), Size.parse("1:3")
        (Size(least=2, most=2), Size(least=1, most=3))

        Raises:
            ValueError: it is neither.
        """
        least, colon, most = text.partition(":")
        most = most if colon else least
        if not (least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most)):
            raise ValueError(f"must be a number of at least 1, or MIN:MAX, got {text}")
        return cls(int(least), int(most))

    @property
    def is_elastic(self) -> bool:
        return self.least < self.most

    def __str__(self) -> str:
        return f"{self.least}:{self.most}" if self.is_elastic else str(self.least)


def _place(host: Host) -> str:
    """A host, also when it has come again. Names alone may be alike."""
    return f"{host.name} {host.address}" if isinstance(host, RemoteHost) else host.name


class Members:
    """Of a job.

    Args:
        nnodes: hosts.
        nproc: ranks on each.
        grow_after: seconds after which the place of a lost rank is taken again.
    """

    def __init__(
        self,
        local: LocalHost,
        head: Optional[Head],
        rendezvous: Optional[Rendezvous],
        *,
        nnodes: Size,
        nproc: Size,
        grow_after: float,
    ) -> None:
        self.local, self._head, self._rendezvous = local, head, rendezvous
        self.nnodes, self.nproc, self._grow_after = nnodes, nproc, grow_after
        self._has_begun = False
        # When places were lost, by host.
        self._lost: dict[str, list[float]] = {}

    @property
    def is_elastic(self) -> bool:
        return self.nnodes.is_elastic or self.nproc.is_elastic

    @property
    def full_size(self) -> int:
        return self.nnodes.most * self.nproc.most

    def gather(self) -> list[Host]:
        """The hosts of the next try: as many as there are, once they are enough.

        Raises:
            NotMetError: there are too few after ``join_timeout``.
        """
        if self._head is None or self._rendezvous is None:
            return [self.local]
        began, enough, is_silent = time.monotonic(), None, True
        where = f"{self._rendezvous.host}:{self._rendezvous.port}"
        while True:
            self._head.pump(0.05)
            hosts = self._there()
            now = time.monotonic()
            if is_silent and now - began > _SILENT_SECONDS:
                is_silent = False
                print(f"waiting at {where}: {len(hosts)} of {self.nnodes} hosts have come", file=sys.stderr)
            if len(hosts) >= self.nnodes.least:
                enough = enough or now
                # A job that has begun goes on with those that are left; it grows later.
                if self._has_begun or len(hosts) == self.nnodes.most:
                    break
                if now - enough >= self._rendezvous.last_call_timeout:
                    break
            elif now - began > self._rendezvous.join_timeout:
                raise NotMetError(
                    f"{len(hosts)} of {self.nnodes} hosts have come to {where} in {self._rendezvous.join_timeout:.0f} "
                    "s; start the same line on the others, with the same token"
                )
        self._has_begun = True
        return hosts

    def _there(self) -> list[Host]:
        others: Sequence[Host] = self._head.hosts if self._head is not None else []
        return [self.local, *others][: self.nnodes.most]

    def counts(self, hosts: Sequence[Host]) -> list[int]:
        """Ranks on each of these hosts, now: no more than its own launcher was told."""
        now = time.monotonic()
        counts = []
        for host in hosts:
            most = min(self.nproc.most, host.slots)
            lost = sum(now - when < self._grow_after for when in self._lost.get(_place(host), []))
            counts.append(max(min(self.nproc.least, most), most - lost))
        return counts

    def lose_a_rank(self, host: Host) -> None:
        """Its place on that host stays empty for a while, where the job may be smaller."""
        if self.nproc.is_elastic:
            self._lost.setdefault(_place(host), []).append(time.monotonic())

    def could_grow(self, num_ranks: int) -> bool:
        """Whether a try with so many ranks would have more, were it started now."""
        return sum(self.counts(self._there())) > num_ranks
