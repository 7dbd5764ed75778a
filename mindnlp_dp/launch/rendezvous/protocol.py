"""Send messages between the launchers of a job's hosts: JSON, a line for each.

:mod:`mindnlp_dp.launch.rendezvous.server` and :mod:`mindnlp_dp.launch.rendezvous.client` are the two ends.

Both ends prove that they have the job's token, by an HMAC-SHA256 (RFC 2104) over fresh random numbers of both, before
anything else is read. Nothing is unpickled. What follows is neither encrypted nor authenticated: who can change the
traffic of an open connection could do the same to MPI's and MindSpore's, which have no authentication at all.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import os
import secrets
import socket
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

from mindnlp_dp.launch.processes.environment import TOKEN_VARIABLE

DEFAULT_TOKEN_FILE = "~/.config/mindnlp_dp/token"

SHORTEST_TOKEN = 16

_NONCE_BYTES = 16

# The limits for a line, once the token is proved and before.
LONGEST_BYTES, _LONGEST_GREETING = 4 << 20, 1024


class AuthenticationError(Exception):
    """Raised when the other end does not know the token, or uses another protocol."""


def read_token(environ: Mapping[str, str], file: Optional[Path] = None) -> bytes:
    """Return the job's token, from MINDNLP_DP_RDZV_TOKEN or from a file that only its owner can read.

    Raises:
        ValueError: the token is missing or too short, or other users can read it; the message says what to do.
    """
    text = environ.get(TOKEN_VARIABLE) if file is None else None
    if text is None:
        path = file or Path(DEFAULT_TOKEN_FILE)
        try:
            path = path.expanduser()
            found = path.stat()
            # Kubernetes' Secrets belong to root, and a pod reads them through its group.
            others = 0o037 if found.st_uid == 0 != os.geteuid() else 0o077
            if stat.S_IMODE(found.st_mode) & others:
                raise ValueError(f"{path} can be read by other users: chmod 600 {path}")
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError, RuntimeError) as error:
            raise ValueError(
                f"hosts of a job authenticate each other by a token, and none was found ({error}). Make one, "
                f"(umask 077; mkdir -p {path.parent}; openssl rand -hex 32 > {path}), and copy it to every host, or "
                f"set {TOKEN_VARIABLE} to the same on each"
            ) from None
    text = text.strip()
    if len(text) < SHORTEST_TOKEN:
        raise ValueError(f"the token has {len(text)} characters, and needs {SHORTEST_TOKEN}: openssl rand -hex 32")
    return text.encode()


class Connection:
    """One end of a connection, which sends messages as lines; the end that was called asks for a proof first.

    Sockets do not block: :meth:`receive` returns the messages that have arrived, and sends what can be sent.

    Attributes:
        is_ready: whether the other end has proved that it knows the token. Only then may messages be sent.
        address: address of the other end, which has called; "" if this end has.
        was_asked: whether the other end, which was called, has asked for a proof.
    """

    def __init__(self, sock: socket.socket, token: bytes, *, is_server: bool, address: str = "") -> None:
        sock.setblocking(False)
        self.socket, self.address = sock, address
        self._token, self._is_server = token, is_server
        self._mine, self._theirs = secrets.token_hex(_NONCE_BYTES).encode(), b""
        self._in, self._out = b"", self._mine + b"\n" if is_server else b""
        self._is_finished = False
        self._broken: Optional[Exception] = None
        self.is_ready = self.got_challenge = False

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message as soon as possible."""
        self._out += json.dumps(message).encode() + b"\n"
        self.flush()

    def send_last(self, message: Mapping[str, Any]) -> None:
        """Send a message, and none after it. :meth:`receive` raises once the other end has closed the connection too.

        Closing a socket that holds unread data would reset the connection, and the other end might lose what it has
        not read yet.
        """
        self._is_finished = True
        self.send(message)

    def flush(self) -> None:
        """Send what can be sent now; raise OSError if the connection is broken."""
        while self._out:
            try:
                sent = self.socket.send(self._out)
            except BlockingIOError:
                return
            self._out = self._out[sent:]
        if self._is_finished:
            self.socket.shutdown(socket.SHUT_WR)

    def receive(self) -> list[Any]:
        """Return the messages since the last call; those from before a broken connection come before the error.

        Raises:
            AuthenticationError: the other end does not know the token.
            EOFError: the other end has closed the connection.
            OSError: the connection is broken.
        """
        most = LONGEST_BYTES if self.is_ready else _LONGEST_GREETING
        try:
            self.flush()
        except OSError as error:
            # What the other end has sent before is still read.
            self._broken = self._broken or error
        try:
            while len(self._in) <= most:
                if not (part := self.socket.recv(1 << 16)):
                    raise EOFError
                self._in += part
        except BlockingIOError:
            pass
        except (OSError, EOFError) as error:
            self._broken = self._broken or error
        *lines, self._in = self._in.split(b"\n")
        if len(self._in) > most:
            raise AuthenticationError(f"a message of more than {most} bytes")
        messages = []
        for line in lines:
            if self.is_ready:
                messages.append(json.loads(line))
            else:
                self._greet(line)
        if self._broken is not None and not messages:
            raise self._broken
        return messages

    def _greet(self, line: bytes) -> None:
        """Shake hands: the server sends its nonce, the client its nonce and proof, and the server its proof."""
        if self._is_server:
            self._theirs, _, proof = line.partition(b" ")
            self._check(proof, b"client")
            self._out += self._proof(b"server") + b"\n"
        elif not self.got_challenge:
            self._theirs, self.got_challenge = line, True
            self._out += self._mine + b" " + self._proof(b"client") + b"\n"
        else:
            self._check(line, b"server")
        self.flush()

    def _proof(self, of: bytes) -> bytes:
        nonces = (self._mine, self._theirs) if self._is_server else (self._theirs, self._mine)
        return hmac.digest(self._token, b" ".join([b"mindnlp_dp", of, *nonces]), "sha256").hex().encode()

    def _check(self, proof: bytes, of: bytes) -> None:
        if not hmac.compare_digest(proof, self._proof(of)):
            raise AuthenticationError("the other end does not have this job's token")
        self.is_ready = True

    def close(self) -> None:
        try:
            self.flush()
        except OSError:
            pass
        self.socket.close()


def parse_endpoint(text: str, default_port: int = 29400) -> tuple[str, int]:
    """Parse ``HOST[:PORT]``, also ``[IPV6]:PORT``.

    >>> parse_endpoint("10.0.0.1:1234"), parse_endpoint("node0"), parse_endpoint("[::1]:99")
    (('10.0.0.1', 1234), ('node0', 29400), ('::1', 99))

    Raises:
        ValueError: the text is neither, or an address that every host has.
    """
    host, colon, port = text.rpartition(":")
    if text.endswith("]") or not colon or (":" in host and not host.startswith("[")):
        host, port = text, str(default_port)
    host = host.strip("[]")
    if ":" in host:
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            host = ""
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"an endpoint is HOST:PORT, got {text!r}")
    if host in ("0.0.0.0", "::"):
        raise ValueError(f"an endpoint is an address of one host, got {text!r}, which is every host's")
    return host, int(port)


def listen_at(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an endpoint of this host.

    If ``host`` is an address of this host, it listens only there. A name often means another address on this host than
    on the others, and a service's address is not this host's: then it listens at all addresses, also those of IPv6.

    Raises:
        OSError: the socket cannot listen there.
    """
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    except ValueError:
        family = None
    if family is not None and is_this_host(host):
        return socket.create_server((host, port), family=family, backlog=128)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128)
    return socket.create_server(("", port), backlog=128)


def address_of(name: tuple[str, int]) -> str:
    """Return the address in a socket's name; an IPv4 address at an IPv6 socket is returned in the form of IPv4."""
    return name[0].removeprefix("::ffff:")


def is_this_host(host: str) -> bool:
    """Return whether a name or address is one of this host's."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind(address)
            except OSError:
                continue
            return True
    return False
