"""The launcher's event loop: one thread waits, and handles the messages of other hosts meanwhile.

:mod:`mindnlp_dp.launch.run` creates the :class:`EventLoop`, and hands it to what waits: the rendezvous, the monitor of
an attempt, the console, and the code that ends ranks. A job of one host has no messages, and only sleeps.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Sequence
from typing import Optional, Protocol

POLL_SECONDS = 0.05

# How often the condition of run_until is checked.
_CHECK_SECONDS = 0.01


class MessageHandler(Protocol):
    """One of the two ends of the rendezvous."""

    def sockets(self) -> Sequence[socket.socket]:
        """Return the sockets whose messages end a wait."""
        ...

    def handle_messages(self, elapsed: float) -> None:
        """Handle the messages that have arrived, if any, and what is due by the clock. It must not wait.

        Args:
            elapsed: seconds since the last call; many if the launcher was stopped or busy, and its messages are unread.
        """
        ...


class EventLoop:
    """Waits, and calls the message handler after each wait.

    Attributes:
        handler: the handler, if the job has several hosts and is not over.
    """

    def __init__(self) -> None:
        self.handler: Optional[MessageHandler] = None
        self._handled = time.monotonic()

    def run_once(self, seconds: float) -> None:
        """Wait for at most ``seconds``, or until a message arrives, and call the handler."""
        if self.handler is None:
            time.sleep(seconds)
            return
        # poll takes any descriptor number, and opens none itself.
        poll = select.poll()
        for sock in self.handler.sockets():
            poll.register(sock, select.POLLIN)
        poll.poll(1000 * seconds)
        now, before = time.monotonic(), self._handled
        self._handled = now
        self.handler.handle_messages(now - before)

    def run_until(self, is_done: Callable[[], bool], seconds: float) -> None:
        """Wait until a condition is true, for at most ``seconds``."""
        deadline = time.monotonic() + seconds
        while not is_done() and (left := deadline - time.monotonic()) > 0:
            self.run_once(min(left, _CHECK_SECONDS))

    def sleep(self, seconds: float) -> None:
        """Wait for ``seconds``, whatever arrives."""
        self.run_until(lambda: False, seconds)
