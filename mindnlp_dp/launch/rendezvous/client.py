"""The launcher of every host but the first: it follows the orders of the first host's launcher, and reports to it.

:mod:`mindnlp_dp.launch.run` creates the :class:`HostAgent`. If the connection to the endpoint is lost, the agent ends
this host's ranks, because no launcher monitors them any more, and tries for a while to connect again.
"""

from __future__ import annotations

import secrets
import selectors
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any, Optional

from mindnlp_dp.launch.errors import LaunchError, RendezvousTimeoutError
from mindnlp_dp.launch.processes.attempt import Attempt
from mindnlp_dp.launch.processes.environment import this_host_name
from mindnlp_dp.launch.processes.host import LocalHost
from mindnlp_dp.launch.rendezvous.protocol import AuthenticationError, Connection
from mindnlp_dp.launch.rendezvous.server import Rendezvous
from mindnlp_dp.launch.termination import Termination

_REPORT_SECONDS = 0.5

_POLL_SECONDS = 0.05

_RETRY_SECONDS = 0.5

# An endpoint that is started at the same time is up by then, so until then no message is printed.
_SILENT_SECONDS = 5.0

# How long to try to connect again after the endpoint was lost.
REJOIN_SECONDS = 30.0


class _ServerLostError(Exception):
    """Raised when the endpoint has closed the connection, or has been silent for too long."""


def connect(rendezvous: Rendezvous, seconds: float) -> Connection:
    """Connect to the endpoint, which may not be up yet, and return the connection.

    Raises:
        RendezvousTimeoutError: the endpoint was not reachable within ``seconds``, or does not know this host's token.
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
                if connection.receive():
                    break
                time.sleep(0.01)
            if connection.is_ready:
                return connection
            why = "it does not answer"
            connection.close()
        except (EOFError, AuthenticationError):
            # The endpoint hangs up if our token is wrong, or, before it asks for the token, if it has too many callers.
            why = "it does not know our token: the same has to be set on every host"
            if not connection.was_asked:
                why = "it hung up before it asked for our token: too many call it, or it has ended"
            connection.close()
        except (OSError, UnicodeError) as error:
            why = str(error)
        waited = time.monotonic() - began
        if waited > seconds:
            raise RendezvousTimeoutError(
                f"{where} cannot be reached: {why}. If it is of this host itself: --node-rank 0"
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
        *,
        version: str,
        node_rank: Optional[int],
        termination: Termination,
    ) -> None:
        self._rendezvous, self._termination = rendezvous, termination
        self._host = LocalHost(environ, slots, sleep=self._sleep_and_report)
        self._said = 0.0
        self._join = {
            "say": "join", "name": this_host_name(), "slots": slots, "job": rendezvous.job, "version": version,
            "node_rank": node_rank, "launcher": secrets.token_hex(8),
        }  # fmt: skip
        self._connection: Optional[Connection] = None

    def run(self) -> int:
        """Follow the first host's orders until the job is over, and return its exit code.

        Raises:
            RendezvousTimeoutError: the endpoint cannot be reached.
            LaunchError: an attempt cannot be started here.
        """
        patience = self._rendezvous.join_timeout
        try:
            while True:
                try:
                    self._connection = connect(self._rendezvous, patience)
                except RendezvousTimeoutError as error:
                    if patience == REJOIN_SECONDS:
                        print(f"{error}; the job is over for this host", file=sys.stderr)
                        return RendezvousTimeoutError.exit_code
                    raise
                try:
                    return self._serve(self._connection)
                except _ServerLostError as error:
                    self._termination.end(is_saved=True)
                    print(f"{error}; this host's ranks are ended, and it is called again", file=sys.stderr)
                    self._host.end()
                    self._connection.socket.close()
                    patience = REJOIN_SECONDS
        except KeyboardInterrupt:
            if self._connection is not None:
                self._say(say="leave", why="its launcher was ended")
            raise
        finally:
            with self._termination.ignored():
                self._host.leave()
            if self._connection is not None:
                self._connection.close()

    def _sleep_and_report(self, seconds: float) -> None:
        """Sleep while ranks are ended, and send heartbeats: this may take longer than a host may be silent."""
        now = time.monotonic()
        if now - self._said >= _REPORT_SECONDS:
            self._said = now
            self._say(say="busy")
        time.sleep(seconds)

    def _serve(self, connection: Connection) -> int:
        with self._termination.awaited():
            return self._follow_orders(connection)

    def _follow_orders(self, connection: Connection) -> int:
        self._say(**self._join)
        heard, looked, reported, last, has_told = time.monotonic(), time.monotonic(), 0.0, None, False
        with selectors.DefaultSelector() as selector:
            selector.register(connection.socket, selectors.EVENT_READ)
            while True:
                selector.select(_POLL_SECONDS)
                try:
                    orders = connection.receive()
                except (EOFError, OSError, AuthenticationError) as error:
                    raise _ServerLostError(
                        f"the endpoint {self._rendezvous.host}:{self._rendezvous.port} is gone ({error or 'closed'})"
                    ) from None
                now = time.monotonic()
                if now - looked > self._rendezvous.lost_after / 2:
                    # This launcher itself was stopped; messages that were sent meanwhile arrive only now.
                    heard = now
                looked = now
                if orders:
                    heard = now
                elif now - heard > self._rendezvous.lost_after:
                    raise _ServerLostError(
                        f"nothing was heard of the endpoint {self._rendezvous.host}:{self._rendezvous.port} for "
                        f"{self._rendezvous.lost_after:.0f} s"
                    )
                for order in orders:
                    if order["do"] == "over":
                        if order.get("why"):
                            print(order["why"], file=sys.stderr)
                        return int(order["code"])
                    self._obey(order)
                looked = time.monotonic()
                if self._termination.asked is not None and not has_told:
                    has_told = True
                    self._say(say="terminates")
                self._termination.end(is_saved=self._host.number < 0)
                # Ends are reported at once, progress twice a second. Between attempts the report is a heartbeat.
                report = self._host.poll()
                ended = (sorted(report.statuses), len(report.ended))
                if now - reported >= _REPORT_SECONDS or ended != last:
                    reported, last = now, ended
                    self._say(say="report", **{"try": self._host.number}, report=report.to_json())

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
        elif do == "prepare":
            self._host.prepare_restart()
        elif do == "answer":
            self._say(say="answer", answer=self._answer(order))
        elif do == "end":
            report = self._host.poll()
            self._host.end()
            self._say(say="ended", **{"try": order["number"]}, report=report.to_json())

    def _answer(self, question: Mapping[str, Any]) -> Any:
        if question["what"] == "stacks":
            return self._host.stacks()
        if question["what"] == "tail":
            return self._host.tail(question["rank"])
        try:
            self._host.clear(question["log_dir"], question["number"])
        except LaunchError as error:
            self._say(say="leave", why=str(error))
            raise
        return True

    def _say(self, **message: Any) -> None:
        assert self._connection is not None
        try:
            self._connection.send(message)
        except OSError:
            # The next receive() raises, too.
            pass
