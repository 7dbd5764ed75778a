"""Send messages between the launchers of a job's hosts: JSON, each message with its length in front.

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
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

from mindnlp_dp.launch.processes.environment import TOKEN_VARIABLE

DEFAULT_TOKEN_FILE = "~/.config/mindnlp_dp/token"

SHORTEST_TOKEN = 16

_NONCE_BYTES = 16

_MAC_BYTES = 32

_LENGTH = struct.Struct(">I")

LONGEST_BYTES = 4 << 20


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
    """One end of a connection; the end that was called (``is_server``) asks for a proof first.

    Sockets do not block: :meth:`receive` returns the messages that have arrived, and sends what can be sent.

    Attributes:
        is_ready: whether the other end has proved that it knows the token.
    """

    def __init__(self, sock: socket.socket, token: bytes, *, is_server: bool) -> None:
        sock.setblocking(False)
        self.socket = sock
        self._token, self._is_server = token, is_server
        self._mine = secrets.token_bytes(_NONCE_BYTES)
        self._theirs = b""
        self._in, self._out = b"", b""
        self._kept: list[bytes] = []
        self._says_no_more = False
        self._broken: Optional[Exception] = None
        self.is_ready = False
        if is_server:
            self._out += self._mine

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message as soon as possible; keep it until the other end has proved the token."""
        payload = json.dumps(message).encode()
        if self.is_ready:
            self._frame(payload)
        else:
            self._kept.append(payload)
        self.flush()

    def _frame(self, payload: bytes) -> None:
        self._out += _LENGTH.pack(len(payload)) + payload

    def send_last(self, message: Mapping[str, Any]) -> None:
        """Send a message, and none after it. :meth:`receive` raises once the other end has closed the connection too.

        Closing a socket that holds unread data would reset the connection, and the other end might lose what it has
        not read yet.
        """
        self._says_no_more = True
        self.send(message)

    def flush(self) -> None:
        """Send what can be sent now; raise OSError if the connection is broken."""
        while self._out:
            try:
                sent = self.socket.send(self._out)
            except BlockingIOError:
                return
            self._out = self._out[sent:]
        if self._says_no_more and not self._kept:
            self.socket.shutdown(socket.SHUT_WR)

    def receive(self) -> list[Any]:
        """Return the messages since the last call; those from before a broken connection come before the error.

        Raises:
            AuthenticationError: the other end does not know the token.
            EOFError: the other end has closed the connection.
            OSError: the connection is broken.
        """
        try:
            self.flush()
        except OSError as error:
            self._broken = self._broken or error
        try:
            while part := self.socket.recv(1 << 16):
                self._in += part
                if len(self._in) > LONGEST_BYTES + 64 or (not self.is_ready and len(self._in) > 1024):
                    break
            else:
                self._broken = self._broken or EOFError()
        except BlockingIOError:
            pass
        except OSError as error:
            self._broken = self._broken or error
        if not self.is_ready:
            self._greet()
        messages = []
        while self.is_ready and (payload := self._next()) is not None:
            messages.append(json.loads(payload))
        if self._broken is not None and not messages:
            raise self._broken
        return messages

    def _greet(self) -> None:
        """Shake hands. Server: nonce out, nonce, proof in, proof out. Client: nonce in, nonce, proof out, proof in."""
        if self._is_server:
            if len(self._in) >= _NONCE_BYTES + _MAC_BYTES:
                self._theirs = self._take(_NONCE_BYTES)
                self._check(self._take(_MAC_BYTES), self._proof(b"client", self._mine, self._theirs))
                self._out += self._proof(b"server", self._mine, self._theirs)
                self._begin()
        elif not self._theirs and len(self._in) >= _NONCE_BYTES:
            self._theirs = self._take(_NONCE_BYTES)
            self._out += self._mine + self._proof(b"client", self._theirs, self._mine)
        if not self._is_server and self._theirs and len(self._in) >= _MAC_BYTES:
            self._check(self._take(_MAC_BYTES), self._proof(b"server", self._theirs, self._mine))
            self._begin()
        self.flush()

    def _begin(self) -> None:
        self.is_ready = True
        for payload in self._kept:
            self._frame(payload)
        self._kept = []

    def _next(self) -> Optional[bytes]:
        if len(self._in) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._in)
        if length > LONGEST_BYTES:
            raise AuthenticationError(f"a message of {length} bytes")
        if len(self._in) < _LENGTH.size + length:
            return None
        self._take(_LENGTH.size)
        return self._take(length)

    def _take(self, count: int) -> bytes:
        taken, self._in = self._in[:count], self._in[count:]
        return taken

    def _proof(self, what: bytes, of_server: bytes, of_client: bytes) -> bytes:
        return hmac.digest(self._token, b"mindnlp_dp " + what + of_server + of_client, "sha256")

    @property
    def was_asked(self) -> bool:
        """Return whether the other end, which was called, has asked for a proof."""
        return bool(self._theirs)

    @staticmethod
    def _check(given: bytes, expected: bytes) -> None:
        if not hmac.compare_digest(given, expected):
            raise AuthenticationError("the other end does not know this job's token")

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
