"""One try of a job: what its hosts have to know of it, and what they report. Both go over the wire as JSON."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from mindnlp_dp.runtime.progress import Progress

from .environment import name_of_try
from .verdict import Ended, Status


@dataclass(frozen=True)
class Try:
    """One try of a job, as one of its hosts has to know it.

    Attributes:
        number: of this try, from 0 on.
        backend: "mpi" or "mindspore".
        command: the script, or ``-m`` and a module, and its arguments.
        log_dir: the same on every host.
        counts: ranks on each host, in the order of the ranks.
        addresses: of the hosts; empty where there is one.
        index: of this host among them.
        port: of the scheduler of MindSpore's cluster, which is on the first host.
        variables: what ranks find in their environment besides the host's own.
        in_place: whether ranks go on without one that is lost.
    """

    number: int
    backend: str
    command: list[str]
    log_dir: str
    counts: list[int]
    addresses: list[str] = field(default_factory=list)
    index: int = 0
    port: int = 0
    variables: dict[str, str] = field(default_factory=dict)
    in_place: bool = False

    @property
    def num_ranks(self) -> int:
        return sum(self.counts)

    @property
    def name(self) -> str:
        """As its ranks know it."""
        return name_of_try(self.variables)

    @property
    def ranks(self) -> range:
        """Those of this host."""
        first = sum(self.counts[: self.index])
        return range(first, first + self.counts[self.index])


@dataclass
class Report:
    """Of one host's ranks.

    Attributes:
        ranks: how far they are; times by the reader's clock.
        statuses: what those have said that ended.
        ended: processes that have ended.
        all_ended: whether no process that works is left.
        stopped: ranks whose process is stopped (SIGSTOP).
        gone: ranks whose process has ended.
    """

    ranks: dict[int, Progress] = field(default_factory=dict)
    statuses: dict[int, Status] = field(default_factory=dict)
    ended: list[Ended] = field(default_factory=list)
    all_ended: bool = False
    stopped: list[int] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """For another host, whose clock is another one: ages in the place of times."""
        now = time.monotonic()
        return {
            "ranks": {n: asdict(_shifted(rank, -now)) for n, rank in self.ranks.items()},
            "statuses": {n: asdict(_since(status, now)) for n, status in self.statuses.items()},
            "ended": [asdict(ended) for ended in self.ended],
            "all_ended": self.all_ended,
            "stopped": self.stopped,
            "gone": self.gone,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Report:
        now = time.monotonic()
        return cls(
            {int(n): _shifted(Progress(**rank), now) for n, rank in data["ranks"].items()},
            {int(n): _since(Status(**status), now) for n, status in data["statuses"].items()},
            [Ended(**ended) for ended in data["ended"]],
            bool(data["all_ended"]),
            [int(n) for n in data["stopped"]],
            [int(n) for n in data["gone"]],
        )


def _since(status: Status, now: float) -> Status:
    """With its age in the place of its time, and the other way round."""
    return replace(status, time=now - status.time)


def _shifted(rank: Progress, seconds: float) -> Progress:
    """With times by a clock that is that much ahead; a time of 0 says that there is none."""
    return replace(
        rank,
        changed=rank.changed + seconds if rank.changed else 0.0,
        since=rank.since + seconds if rank.since else 0.0,
    )
