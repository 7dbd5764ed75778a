"""Define what the hosts of a job need to know of one attempt, and what they report. Both are sent as JSON."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from mindnlp_dp.launch.processes.exit_status import ExitedProcess
from mindnlp_dp.runtime.heartbeat import RankHeartbeat


@dataclass(frozen=True)
class Attempt:
    """One attempt of a job, as one of its hosts needs to know it.

    Attributes:
        number: number of this attempt, from 0.
        backend: "mpi" or "mindspore".
        command: the script, or ``-m`` and a module, and its arguments.
        log_dir: folder of the attempt's logs, the same path on every host.
        counts: number of ranks on each host, in the order of the ranks.
        addresses: addresses of the hosts; empty for a single host.
        index: index of this host among them.
        port: port of the scheduler of MindSpore's cluster, which is on the first host.
        variables: environment variables that ranks get in addition to the host's own.
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

    @property
    def num_ranks(self) -> int:
        return sum(self.counts)

    @property
    def ranks(self) -> range:
        """Return the ranks of this host."""
        first = sum(self.counts[: self.index])
        return range(first, first + self.counts[self.index])


@dataclass
class HostReport:
    """What one host reports about its ranks to the launcher that leads the job.

    Attributes:
        ranks: progress of each rank; times by this host's clock, also for a report of another host.
        ended: processes that have ended.
        all_ended: whether all processes have ended, except those that only serve others.
        stopped: ranks whose process is stopped (SIGSTOP).
        gone: ranks whose process has ended.
        oom_kills: number of processes that the kernel has killed for lack of memory since the start of the attempt.
    """

    ranks: dict[int, RankHeartbeat] = field(default_factory=dict)
    ended: list[ExitedProcess] = field(default_factory=list)
    all_ended: bool = False
    stopped: list[int] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)
    oom_kills: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the report for another host, whose clock is another one."""
        return {**asdict(self), "now": time.monotonic()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> HostReport:
        ahead = time.monotonic() - data["now"]
        fields = {name: value for name, value in data.items() if name != "now"}
        ranks = {int(n): _shifted(RankHeartbeat(**rank), ahead) for n, rank in data["ranks"].items()}
        return cls(**{**fields, "ranks": ranks, "ended": [ExitedProcess(**ended) for ended in data["ended"]]})


def _shifted(rank: RankHeartbeat, seconds: float) -> RankHeartbeat:
    """Return the progress with times by a clock that is ahead by ``seconds``; 0 means "no time" and stays."""
    return replace(
        rank,
        changed=rank.changed + seconds if rank.changed else 0.0,
        since=rank.since + seconds if rank.since else 0.0,
        ended=rank.ended + seconds if rank.ended else 0.0,
    )
