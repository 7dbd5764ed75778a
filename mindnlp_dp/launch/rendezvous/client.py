"""The launcher of every host but the first: it follows the orders of the first host's launcher, and reports to it.

:mod:`mindnlp_dp.launch.run` creates the :class:`HostAgent`. If the connection to the endpoint is lost, the agent ends
this host's ranks, because no launcher monitors them any more, and tries for a while to connect again.
"""

from __future__ import annotations

import secrets
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from mindnlp_dp.launch.errors import LaunchError, LeaderLostError, TemporaryError
from mindnlp_dp.launch.event_loop import POLL_SECONDS, EventLoop
from mindnlp_dp.launch.processes.attempt import Attempt, HostReport
from mindnlp_dp.launch.processes.local_host import LocalHost
from mindnlp_dp.launch.rendezvous.protocol import AuthenticationError, Connection
from mindnlp_dp.launch.rendezvous.server import Rendezvous
from mindnlp_dp.launch.termination import Termination
from mindnlp_dp.runtime.devices import default_device

_REPORT_SECONDS = 0.5

_RETRY_SECONDS = 0.5

# An endpoint that is started at the same time is up by then, so until then no message is printed.
_SILENT_SECONDS = 5.0

# How long to try to connect again after the endpoint was lost.
REJOIN_SECONDS = 30.0


def connect(rendezvous: Rendezvous, seconds: float) -> Connection:
    """Connect to the endpoint, which may not be up yet, and return the connection.

    Raises:
        TemporaryError: the endpoint was not reachable within ``seconds``, or does not know this host's token.
    """
    began, why, is_silent = time.monotonic(), "", True
    where = f"the endpoint {rendezvous.host}:{rendezvous.port}"
    while True:
        try:
            sock = socket.create_connection((rendezvous.host, rendezvous.port), timeout=5)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = Connection(sock, rendezvous.token, is_server=False)
            until = time.monotonic() + 5
            while not connection.is_ready and time.monotonic() < until:
                connection.receive()
                time.sleep(0.01)
            if connection.is_ready:
                return connection
            why = "it does not answer"
            connection.close()
        except (EOFError, AuthenticationError):
            # The endpoint hangs up if our token is wrong, or, before it asks for the token, if it has too many callers.
            why = "it does not have this host's token: set the same token on every host"
            if not connection.got_challenge:
                why = (
                    "it closed the connection before it asked for a token: it has too many "
                    "connections, or it has exited"
                )
            connection.close()
        except (OSError, UnicodeError) as error:
            why = str(error)
        waited = time.monotonic() - began
        if waited > seconds:
            raise TemporaryError(
                f"{where} cannot be reached: {why}. If the endpoint is this host itself, pass --node-rank 0"
            )
        if is_silent and waited > _SILENT_SECONDS:
            is_silent = False
            print(f"waiting for {where}, which cannot be reached yet: {why}", file=sys.stderr)
        time.sleep(_RETRY_SECONDS)


class HostAgent:
    """Runs the ranks of this host, ``slots`` at most, as the first host orders."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        environ: Mapping[str, str],
        slots: int,
        loop: EventLoop,
        *,
        version: str,
        node_rank: Optional[int],
        termination: Termination,
    ) -> None:
        self._rendezvous, self._loop, self._termination = rendezvous, loop, termination
        self._host = LocalHost(environ, slots, loop)
        self._join = {
            "say": "join", "name": self._host.name, "slots": slots, "job": rendezvous.job, "version": version,
            "node_rank": node_rank, "device": default_device(environ), "launcher": secrets.token_hex(8),
        }  # fmt: skip
        # The connection to the endpoint; None before the first and once the endpoint is lost, which `_lost` explains.
        self._connection: Optional[Connection] = None
        self._lost, self._heard = "", 0.0
        # Orders that have arrived and are not carried out yet.
        self._orders: list[dict[str, Any]] = []
        # What the last report said of ranks' ends, and when it was sent.
        self._ended: list[Any] = []
        self._reported = 0.0
        # The report from before this host's ranks were ended, while they are.
        self._final: Optional[HostReport] = None
        loop.handler = self

    def run(self) -> int:
        """Follow the first host's orders until the job is over, and return its exit code.

        Raises:
            TemporaryError: the endpoint cannot be reached.
            LaunchError: an attempt cannot be started here.
        """
        patience = self._rendezvous.join_timeout
        try:
            while True:
                try:
                    connection = connect(self._rendezvous, patience)
                except TemporaryError as error:
                    if self._lost:
                        print(f"{error}; the job is over for this host", file=sys.stderr)
                        return LeaderLostError.exit_code
                    raise
                with self._termination.awaited():
                    code = self._follow_orders(connection)
                if code is not None:
                    return code
                self._termination.end(is_saved=True)
                print(f"{self._lost}; this host's ranks are ended, and it joins again", file=sys.stderr)
                self._end_ranks()
                patience = REJOIN_SECONDS
        except KeyboardInterrupt:
            self._say(say="leave", why="its launcher was ended")
            raise
        finally:
            with self._termination.ignored():
                self._end_ranks()
            if self._connection is not None:
                self._connection.close()

    def _follow_orders(self, connection: Connection) -> Optional[int]:
        """Follow orders until the job is over; return its exit code, or None if the endpoint is lost."""
        self._connection, self._orders, self._heard = connection, [], time.monotonic()
        self._ended, self._reported = [], 0.0
        self._say(**self._join)
        while self._connection is not None:
            self._loop.run_once(POLL_SECONDS)
            while self._orders:
                order = self._orders.pop(0)
                if order["do"] == "over":
                    if order.get("why"):
                        print(order["why"], file=sys.stderr)
                    return int(order["code"])
                self._obey(order)
            self._termination.end(is_saved=self._host.number < 0)
        return None

    def sockets(self) -> Sequence[socket.socket]:
        return [] if self._connection is None else [self._connection.socket]

    def handle_messages(self, elapsed: float) -> None:
        """Receive orders and report, also while ranks are ended: ending them takes longer than a host may be silent."""
        if self._connection is None:
            return
        where = f"the endpoint {self._rendezvous.host}:{self._rendezvous.port}"
        now, lost_after = time.monotonic(), self._rendezvous.lost_after
        try:
            orders = self._connection.receive()
        except Exception as error:  # noqa: BLE001 -- whatever the endpoint says, this host's ranks are ended
            self._lose(f"{where} closed the connection ({str(error) or 'no message'})")
            return
        self._orders += orders
        if orders or elapsed > lost_after / 2:
            # In the second case this launcher was stopped or busy; messages that were sent meanwhile arrive only now.
            self._heard = now
        elif now - self._heard > lost_after and self._final is None:
            self._lose(f"no message came from {where} for {lost_after:.0f} s")
            return
        # Ends are reported at once, progress twice a second. Between attempts the report is a heartbeat.
        report = self._final or self._host.poll()
        ended = [(n, r.threads_ended) for n, r in report.ranks.items() if r.exit_code is not None] + [len(report.ended)]
        if now - self._reported >= _REPORT_SECONDS or ended != self._ended:
            self._reported, self._ended = now, ended
            self._report(self._host.number, report)

    def _report(self, attempt: int, report: HostReport, *, has_ended: bool = False) -> None:
        terminates = self._termination.asked is not None
        self._say(say="report", attempt=attempt, report=report.to_json(), has_ended=has_ended, terminates=terminates)

    def _lose(self, why: str) -> None:
        assert self._connection is not None
        self._connection.close()
        self._connection, self._lost = None, why

    def _end_ranks(self) -> HostReport:
        """End this host's ranks; return the report from before, because ranks that are ended look like failures."""
        self._final = report = self._host.poll()
        self._host.end()
        self._final = None
        return report

    def _obey(self, order: Mapping[str, Any]) -> None:
        do = order["do"]
        if do == "start":
            attempt = Attempt(**order["attempt"])
            ranks = attempt.ranks
            print(
                f"attempt {attempt.number}: ranks {ranks.start} to {ranks.stop - 1} of {attempt.num_ranks}; logs: "
                f"{attempt.log_dir}",
                flush=True,
            )
            try:
                self._host.start(attempt)
            except LaunchError as error:
                self._say(say="leave", why=str(error))
                raise
        elif do == "daemon":
            self._host.run_daemon(str(order["command"]))
        elif do == "answer":
            rank = order["rank"]
            self._say(say="answer", answer=self._host.stacks() if rank is None else self._host.tail(rank))
        elif do == "end":
            self._report(order["number"], self._end_ranks(), has_ended=True)

    def _say(self, **message: Any) -> None:
        if self._connection is not None:
            try:
                self._connection.send(message)
            except OSError:
                # The next receive() raises, too.
                pass
