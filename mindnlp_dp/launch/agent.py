"""The launcher of a host that is not the endpoint's: it does what the first host's says, and reports.

Goes in: the endpoint. Comes out: the job's exit code. When nothing is heard of the endpoint its ranks are ended, for
nobody watches them; it is asked for a while whether it is there again.
"""

from __future__ import annotations

import secrets
import selectors
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any, Optional

from .engines import LaunchError, NotMetError
from .head import Rendezvous
from .host import LocalHost
from .messages import Connection, WrongPeerError, this_host_name
from .termination import Termination
from .tries import Try

_REPORT_SECONDS = 0.5
_POLL_SECONDS = 0.05
_RETRY_SECONDS = 0.5
# In which an endpoint that is started at the same time is there.
_SILENT_SECONDS = 5.0
# How long an endpoint that was there is looked for when it is gone.
REJOIN_SECONDS = 30.0


class _HeadIsLostError(Exception):
    """Nothing is heard of the endpoint."""


def call(rendezvous: Rendezvous, seconds: float) -> Connection:
    """A connection to the endpoint, which may not be there yet.

    Raises:
        NotMetError: it was not there in so many seconds, or does not know our token.
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
        except (EOFError, WrongPeerError):
            # It hangs up on who does not know its token; before it has asked for that, on whoever is one too many.
            why = "it does not know our token: the same has to be set on every host"
            if not connection.was_asked:
                why = "it hung up before it asked for our token: too many call it, or it has ended"
            connection.close()
        except (OSError, UnicodeError) as error:
            why = str(error)
        waited = time.monotonic() - began
        if waited > seconds:
            raise NotMetError(f"{where} cannot be reached: {why}. If it is of this host itself: --node-rank 0")
        if is_silent and waited > _SILENT_SECONDS:
            is_silent = False
            print(f"waiting for {where}, which cannot be reached yet: {why}", file=sys.stderr)
        time.sleep(_RETRY_SECONDS)


class Agent:
    """Of this host, which takes ``slots`` ranks at most."""

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
        self._host = LocalHost(environ, slots, sleep=self._sleep_and_say_so)
        self._said = 0.0
        self._join = {
            "say": "join", "name": this_host_name(), "slots": slots, "job": rendezvous.job, "version": version,
            "node_rank": node_rank, "launcher": secrets.token_hex(8),
        }  # fmt: skip
        self._connection: Optional[Connection] = None

    def run(self) -> int:
        """Do what the first host says until the job is over, and return its exit code.

        Raises:
            NotMetError: the endpoint cannot be reached.
            LaunchError: a try cannot be started here.
        """
        patience = self._rendezvous.join_timeout
        try:
            while True:
                try:
                    self._connection = call(self._rendezvous, patience)
                except NotMetError as error:
                    if patience == REJOIN_SECONDS:
                        print(f"{error}; the job is over for this host", file=sys.stderr)
                        return NotMetError.exit_code
                    raise
                try:
                    return self._serve(self._connection)
                except _HeadIsLostError as error:
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

    def _sleep_and_say_so(self, seconds: float) -> None:
        """While ranks are ended, which may take longer than a silent host is waited for."""
        now = time.monotonic()
        if now - self._said >= _REPORT_SECONDS:
            self._said = now
            self._say(say="busy")
        time.sleep(seconds)

    def _serve(self, connection: Connection) -> int:
        with self._termination.awaited():
            return self._obey_until_it_is_over(connection)

    def _obey_until_it_is_over(self, connection: Connection) -> int:
        self._say(**self._join)
        heard, looked, reported, last, has_told = time.monotonic(), time.monotonic(), 0.0, None, False
        with selectors.DefaultSelector() as selector:
            selector.register(connection.socket, selectors.EVENT_READ)
            while True:
                selector.select(_POLL_SECONDS)
                try:
                    orders = connection.receive()
                except (EOFError, OSError, WrongPeerError) as error:
                    raise _HeadIsLostError(
                        f"the endpoint {self._rendezvous.host}:{self._rendezvous.port} is gone ({error or 'closed'})"
                    ) from None
                now = time.monotonic()
                if now - looked > self._rendezvous.lost_after / 2:
                    # This launcher was stopped itself; what was sent to it comes now.
                    heard = now
                looked = now
                if orders:
                    heard = now
                elif now - heard > self._rendezvous.lost_after:
                    raise _HeadIsLostError(
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
                # An end is said at once, progress twice a second; without a try it is a sign of life.
                report = self._host.look()
                ended = (sorted(report.statuses), len(report.ended))
                if now - reported >= _REPORT_SECONDS or ended != last:
                    reported, last = now, ended
                    self._say(say="report", **{"try": self._host.number}, report=report.to_json())

    def _obey(self, order: Mapping[str, Any]) -> None:
        do = order["do"]
        if do == "start":
            this = Try(**order["this"])
            ranks = this.ranks
            print(
                f"try {this.number}: ranks {ranks.start} to {ranks.stop - 1} of {this.num_ranks}; logs: {this.log_dir}",
                flush=True,
            )
            try:
                self._host.start(this)
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
            report = self._host.look()
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
            # Who listens finds out.
            pass
