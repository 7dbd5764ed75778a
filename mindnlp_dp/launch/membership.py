"""Decide how many hosts and ranks a job has in each attempt.

launch_job.py asks it for the hosts of the next attempt, the ranks on each, and whether a running job
could grow. This depends on ``--nnodes`` and ``--nproc``, on hosts that join and leave, and on lost ranks.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional, Union

from mindnlp_dp.launch.errors import TemporaryError
from mindnlp_dp.launch.event_loop import POLL_SECONDS, EventLoop
from mindnlp_dp.launch.processes.local_host import LocalHost
from mindnlp_dp.launch.rendezvous.remote_host import RemoteHost
from mindnlp_dp.launch.rendezvous.server import RendezvousServer

Host = Union[LocalHost, RemoteHost]

# Hosts that are started together have joined by then, so until then no message is printed.
_SILENT_SECONDS = 5.0

# More processes or hosts are a mistyped number.
_MOST = 10_000


@dataclass(frozen=True)
class MinMax:
    """A number of hosts or ranks or, for an elastic job, its minimum and maximum."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> MinMax:
        """Parse ``N`` or ``MIN:MAX``.

        >>> MinMax.parse("2"), MinMax.parse("1:3")
        (MinMax(least=2, most=2), MinMax(least=1, most=3))

        Raises:
            ValueError: the text is neither.
        """
        least, colon, most = text.partition(":")
        most = most if colon else least
        if not (least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most)):
            raise ValueError(f"must be a number of at least 1, or MIN:MAX, got {text}")
        if int(most) > _MOST:
            raise ValueError(f"must be at most {_MOST}, got {text}")
        return cls(int(least), int(most))

    @property
    def is_elastic(self) -> bool:
        return self.least < self.most

    def __str__(self) -> str:
        return f"{self.least}:{self.most}" if self.is_elastic else str(self.least)


class Membership:
    """The hosts of a job, and the number of ranks on each.

    Args:
        nnodes: number of hosts.
        nproc: number of ranks on each host.
        grow_after: seconds after which the place of a lost rank is filled again.
    """

    def __init__(
        self,
        local: LocalHost,
        server: Optional[RendezvousServer],
        loop: EventLoop,
        *,
        nnodes: MinMax,
        nproc: MinMax,
        grow_after: float,
    ) -> None:
        self.local, self._server, self._loop = local, server, loop
        self.nnodes, self.nproc, self._grow_after = nnodes, nproc, grow_after
        self._has_begun = False
        # The times at which ranks were lost, by the host's name and address, which it has again when it comes back.
        self._lost: dict[tuple[str, str], list[float]] = {}

    @property
    def is_elastic(self) -> bool:
        return self.nnodes.is_elastic or self.nproc.is_elastic

    @property
    def max_world_size(self) -> int:
        return self.nnodes.most * self.nproc.most

    def gather(self) -> list[Host]:
        """Return the hosts of the next attempt, as soon as enough have joined.

        Raises:
            TemporaryError: too few hosts have joined after ``join_timeout``.
        """
        if self._server is None:
            return [self.local]
        rendezvous = self._server.rendezvous
        began, enough, is_silent = time.monotonic(), None, True
        where = f"{rendezvous.host}:{rendezvous.port}"
        while True:
            self._loop.run_once(POLL_SECONDS)
            hosts = self._there()
            now = time.monotonic()
            if is_silent and now - began > _SILENT_SECONDS:
                is_silent = False
                print(f"waiting at {where}: {len(hosts)} of {self.nnodes} hosts have joined", file=sys.stderr)
            if len(hosts) >= self.nnodes.least:
                enough = enough or now
                # A job that has started continues with the remaining hosts, and grows later.
                if self._has_begun or len(hosts) == self.nnodes.most:
                    break
                if now - enough >= rendezvous.last_call_timeout:
                    break
            elif now - began > rendezvous.join_timeout:
                raise TemporaryError(
                    f"{len(hosts)} of {self.nnodes} hosts have joined at {where} in "
                    f"{rendezvous.join_timeout:.0f} s; start the same command on the others, with the same token"
                )
        self._has_begun = True
        return hosts

    def _there(self) -> list[Host]:
        others: Sequence[Host] = self._server.hosts if self._server is not None else []
        return [self.local, *others][: self.nnodes.most]

    def counts(self, hosts: Sequence[Host]) -> list[int]:
        """Return the current number of ranks for each of these hosts, at most what its own launcher was given."""
        now = time.monotonic()
        counts = []
        for host in hosts:
            most = min(self.nproc.most, host.slots)
            lost = sum(now - when < self._grow_after for when in self._lost.get((host.name, host.address), []))
            counts.append(max(min(self.nproc.least, most), most - lost))
        return counts

    def note_lost_rank(self, host: Host) -> None:
        """Keep the place of a lost rank on that host empty for a while, if the job may be smaller."""
        if self.nproc.is_elastic:
            self._lost.setdefault((host.name, host.address), []).append(time.monotonic())

    def could_grow(self, num_ranks: int) -> bool:
        """Return whether an attempt would have more than ``num_ranks`` ranks if it were started now."""
        return sum(self.counts(self._there())) > num_ranks
