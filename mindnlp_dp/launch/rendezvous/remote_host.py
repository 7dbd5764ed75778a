"""A proxy, in the first host's launcher, for another host that has joined the job.

:class:`~mindnlp_dp.launch.rendezvous.server.RendezvousServer` creates it. It has the methods of
:class:`~mindnlp_dp.launch.processes.local_host.LocalHost`; the other host's launcher
(:mod:`mindnlp_dp.launch.rendezvous.client`) carries them out.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any, Optional

from mindnlp_dp.launch.event_loop import EventLoop
from mindnlp_dp.launch.processes.attempt import Attempt, HostReport
from mindnlp_dp.launch.rendezvous.protocol import Connection, address_of

# Twice the time that ranks with devices have (processes/spawn.py), once to end and once to be killed, and a margin.
_ENDING_SECONDS = 60.0

_ANSWER_SECONDS = 3.0


class RemoteHost:
    """A host that has joined, used like a :class:`~mindnlp_dp.launch.processes.local_host.LocalHost`.

    Args:
        connection: connection to the host's launcher.
        said: message by which that launcher introduced itself.
        loop: event loop, by which this host's messages arrive.

    Attributes:
        launcher: identity of the host's launcher, which stays the same when it connects again.
        lost: why the host was lost; "" while it works.
        terminates: whether the host's launcher was asked to end, and waits for a checkpoint.
    """

    def __init__(self, connection: Connection, said: dict[str, Any], loop: EventLoop) -> None:
        self._connection, self._loop = connection, loop
        self.name, self.slots, self.node_rank = str(said["name"]), int(said["slots"]), said.get("node_rank")
        self.launcher = str(said["launcher"])
        self.address = connection.address
        # The address by which this host reaches the first one.
        self.address_of_server = address_of(connection.socket.getsockname())
        self.heard, self.lost, self.terminates = time.monotonic(), "", False
        self._number, self._report = -1, HostReport()
        self._has_ended = True
        self._answer: Any = None

    def hear(self, said: dict[str, Any]) -> None:
        self.heard = time.monotonic()
        what = said["say"]
        if what == "report":
            self.terminates = said["terminates"]
            if said["attempt"] == self._number:
                self._report, self._has_ended = HostReport.from_json(said["report"]), said["has_ended"]
        elif what == "answer":
            self._answer = said["answer"]
        elif what == "leave":
            self.lost = str(said["why"])

    def say(self, **order: Any) -> None:
        if not self.lost:
            try:
                self._connection.send(order)
            except OSError as error:
                self.lost = f"the connection to it broke ({error})"

    def start(self, attempt: Attempt) -> None:
        self._number, self._report, self._has_ended = attempt.number, HostReport(), False
        self.say(do="start", attempt=asdict(attempt))

    def run_daemon(self, command: str) -> None:
        self.say(do="daemon", command=command)

    def poll(self) -> HostReport:
        return self._report

    def stacks(self) -> dict[int, str]:
        return {int(rank): str(text) for rank, text in (self._ask(None) or {}).items()}

    def tail(self, rank: int) -> str:
        return str(self._ask(rank) or "")

    def _ask(self, rank: Optional[int]) -> Any:
        """Return the end of a rank's log or, without a rank, the stacks of all; None without an answer."""
        self._answer = None
        self.say(do="answer", rank=rank)
        self._loop.run_until(lambda: self._answer is not None or bool(self.lost), _ANSWER_SECONDS)
        return self._answer

    def end(self) -> None:
        """Have the host end its ranks, and wait until it reports that."""
        self.say(do="end", number=self._number)
        self._loop.run_until(lambda: self._has_ended or bool(self.lost), _ENDING_SECONDS)
