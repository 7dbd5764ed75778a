"""The first host's side of the rendezvous, where the launchers of a job's hosts join.

:mod:`mindnlp_dp.launch.run` creates the :class:`RendezvousServer`, which holds a proxy for each host that has joined
(:mod:`mindnlp_dp.launch.rendezvous.remote_host`). The first host decides; the others start, report and end ranks
(:mod:`mindnlp_dp.launch.rendezvous.client`). The launcher's event loop calls :meth:`RendezvousServer.handle_messages`
whenever the launcher waits.
"""

from __future__ import annotations

import random
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Optional

from mindnlp_dp.launch.errors import TemporaryError
from mindnlp_dp.launch.event_loop import EventLoop
from mindnlp_dp.launch.rendezvous.protocol import AuthenticationError, Connection, address_of, listen_at
from mindnlp_dp.launch.rendezvous.remote_host import RemoteHost

_BEAT_SECONDS = 1.0

_GREETING_SECONDS = 5.0

# The limits for callers that have not proved yet that they know the token.
_MOST_STRANGERS, _MOST_STRANGERS_OF_ONE_ADDRESS = 256, 64

# How long the last message to a host may take to arrive.
_PARTING_SECONDS = 2.0


@dataclass(frozen=True)
class Rendezvous:
    """The parameters of the rendezvous of a job's hosts, from the command line.

    Attributes:
        join_timeout: seconds within which enough hosts must join.
        last_call_timeout: seconds for which an elastic job with enough hosts waits for more hosts.
        lost_after: seconds without a message after which a host is lost.
    """

    host: str
    port: int
    token: bytes
    job: str = ""
    join_timeout: float = 600.0
    last_call_timeout: float = 30.0
    lost_after: float = 10.0


class RendezvousServer:
    """Listens at the endpoint, lets hosts join, and exchanges messages with them; used by the first host's launcher.

    Args:
        loop: event loop of this launcher, which receives the hosts' messages.
        device: device of this host's ranks, which all hosts must use.
        one_a_host: whether to refuse a second launcher on a host, whose ranks MPI could not tell from the first one's.

    Attributes:
        rendezvous: its parameters.
        hosts: hosts that have joined and are not lost, by node rank, then those without one in order of arrival.

    Raises:
        TemporaryError: the launcher cannot listen at the port.
    """

    def __init__(
        self, rendezvous: Rendezvous, version: str, loop: EventLoop, *, device: str, one_a_host: bool = False
    ) -> None:
        self.rendezvous, self._version, self._loop, self._one_a_host = rendezvous, version, loop, one_a_host
        self._device = device
        self.hosts: list[RemoteHost] = []
        self._by_connection: dict[Connection, RemoteHost] = {}
        # Until when callers may prove the token, and callers and hosts receive their last message.
        self._strangers: dict[Connection, float] = {}
        self._parting: dict[Connection, float] = {}
        # Addresses that were already named in a message.
        self._refused: set[str] = set()
        self._beat = 0.0
        try:
            self._listening = listen_at(rendezvous.host, rendezvous.port)
        except OSError as error:
            raise TemporaryError(f"cannot listen at port {rendezvous.port} of the endpoint: {error}") from None
        self._listening.setblocking(False)
        loop.handler = self

    @property
    def own_endpoint(self) -> str:
        """Return where this host itself reaches the endpoint, as HOST:PORT."""
        address, port = self._listening.getsockname()[:2]
        address = {"::": "127.0.0.1", "0.0.0.0": "127.0.0.1"}.get(address, address)
        return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"

    def sockets(self) -> Sequence[socket.socket]:
        return [self._listening, *(connection.socket for connection in self._connections())]

    def _connections(self) -> list[Connection]:
        return [*self._strangers, *self._by_connection, *self._parting]

    def handle_messages(self, elapsed: float) -> None:
        """Receive the hosts' messages, give up hosts that are silent, and send a heartbeat."""
        now, lost_after = time.monotonic(), self.rendezvous.lost_after
        if elapsed > lost_after / 2:
            # This launcher was stopped, or busy: the hosts' messages from that time are still unread.
            for host in self._by_connection.values():
                host.heard = now
        connections = self._connections()
        self._accept()
        for connection in connections:
            self._hear(connection)
        for host in self._by_connection.values():
            if not host.lost and now - host.heard > lost_after:
                host.lost = f"no message came from it for {lost_after:.0f} s"
        if now - self._beat > _BEAT_SECONDS:
            self._beat = now
            for host in self._by_connection.values():
                host.say(do="beat")
        over = [caller for caller, until in [*self._parting.items(), *self._strangers.items()] if now > until]
        over += [connection for connection, host in self._by_connection.items() if host.lost]
        for connection in over:
            self._hang_up(connection)
        self.hosts = [host for host in self.hosts if not host.lost]

    def _accept(self) -> None:
        for _ in range(_MOST_STRANGERS):
            try:
                sock, name = self._listening.accept()
            except OSError:
                # No caller is waiting, or this process has run out of descriptors.
                return
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = Connection(sock, self.rendezvous.token, is_server=True, address=address_of(name))
            self._make_room(connection.address)
            self._strangers[connection] = time.monotonic() + _GREETING_SECONDS
            with suppress(OSError):
                connection.flush()

    def _make_room(self, address: str) -> None:
        """Close a random caller's connection if there are too many, so that no caller can keep out a host.

        If the new caller's address has too many connections, close one of those.
        """
        own = [connection for connection in self._strangers if connection.address == address]
        if len(own) >= _MOST_STRANGERS_OF_ONE_ADDRESS:
            self._hang_up(random.choice(own))
        elif len(self._strangers) >= _MOST_STRANGERS:
            self._hang_up(random.choice(list(self._strangers)))

    def _hear(self, connection: Connection) -> None:
        host = self._by_connection.get(connection)
        try:
            for message in connection.receive():
                if host is not None:
                    host.hear(message)
                elif connection in self._strangers:
                    host = self._welcome(connection, message)
        except Exception as error:  # noqa: BLE001 -- whatever another program says, the job does not end by it
            why = "its launcher has ended" if isinstance(error, EOFError) else f"the connection to it broke ({error})"
            if host is not None:
                host.lost = host.lost or why
            else:
                is_new = connection.address not in self._refused and len(self._refused) < _MOST_STRANGERS
                if isinstance(error, AuthenticationError) and is_new:
                    self._refused.add(connection.address)
                    print(
                        f"a process at {connection.address} does not have this job's token, and was refused",
                        file=sys.stderr,
                    )
                self._hang_up(connection)

    def _hang_up(self, connection: Connection) -> None:
        for known in (self._strangers, self._by_connection, self._parting):
            known.pop(connection, None)
        connection.close()

    def _part_from(self, connection: Connection, code: int, why: str = "") -> None:
        """Tell the other end that the job is over for it, and close the connection when it has received that."""
        self._strangers.pop(connection, None)
        self._by_connection.pop(connection, None)
        self._parting[connection] = time.monotonic() + _PARTING_SECONDS
        try:
            connection.send_last({"do": "over", "code": code, "why": why})
        except OSError:
            self._hang_up(connection)

    def _welcome(self, connection: Connection, said: dict[str, Any]) -> Optional[RemoteHost]:
        if said["say"] == "daemon":
            # The caller is mpirun's remote shell.
            host = next((h for h in self.hosts if said["host"] in (h.address, h.name)), None)
            if host is not None:
                host.run_daemon(str(said["command"]))
            self._part_from(connection, 0 if host is not None else 1)
            return None
        for host in self.hosts:
            if host.launcher == said["launcher"]:
                # Its end of the connection broke, which our end has not noticed yet.
                host.lost = "its launcher joined again"
        self.hosts = [host for host in self.hosts if not host.lost]
        wrong = ""
        if said["version"] != self._version:
            wrong = f"it has mindnlp_dp {said['version']}, the endpoint's host {self._version}"
        elif said["job"] != self.rendezvous.job:
            wrong = f"its job is {said['job']!r}, the endpoint's {self.rendezvous.job!r} (--rdzv-id)"
        elif said["device"] != self._device:
            wrong = (
                f"its ranks would use {said['device']}, and those of the endpoint's host {self._device}; set the same "
                "DEVICE_TARGET on every host"
            )
        elif self._one_a_host and self._has_launcher(connection):
            wrong = "this host has a launcher of this job already; start one per host, with --nproc-per-node"
        if wrong:
            self._part_from(connection, 2, wrong)
            return None
        host = RemoteHost(connection, said, self._loop)
        del self._strangers[connection]
        self._by_connection[connection] = host
        self.hosts.append(host)
        self.hosts.sort(key=lambda h: float("inf") if h.node_rank is None else h.node_rank)
        return host

    def _has_launcher(self, connection: Connection) -> bool:
        """Return whether the caller is on this host, or on one that has already joined."""
        ours = address_of(connection.socket.getsockname())
        return connection.address in [ours, *(host.address for host in self.hosts)]

    def close(self, code: int) -> None:
        """Tell all hosts that the job is over, with this exit code, and wait until they have received it."""

        def is_heard() -> bool:
            # Hosts that join just now are told, too.
            for connection in list(self._by_connection):
                self._part_from(connection, code)
            return not self._parting

        self._loop.run_until(is_heard, _PARTING_SECONDS)
        # The launcher may still have to wait for its own ranks' ends.
        self._loop.handler = None
        for connection in [*self._strangers, *self._parting]:
            self._hang_up(connection)
        self._listening.close()
