"""SIGTERM: before its ranks are ended, a job gets some time to write a last checkpoint.

Goes in: signals. Comes out: whether the job is to end, and since when; an exception where nothing can be saved.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Optional

# Kubernetes, Slurm and systemd grant 30 s or more between SIGTERM and SIGKILL.
GRACE_PERIOD_SECONDS = 30.0


class Interrupted(KeyboardInterrupt):
    """By a signal that is not Ctrl-C's."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Termination:
    """Of this launcher.

    Args:
        grace_period: seconds that a job gets to write a checkpoint.

    Attributes:
        asked: by the monotonic clock, when SIGTERM came; None before.
    """

    def __init__(self, grace_period: float = GRACE_PERIOD_SECONDS) -> None:
        self._grace_period = grace_period
        self._is_awaited = False
        self.asked: Optional[float] = None

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Within it, SIGTERM, and SIGHUP of a terminal that is gone, end the job."""
        # nohup has it ignored.
        numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
        previous = {number: signal.signal(number, self._hear) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Within it, the first SIGTERM is only noted: whoever waits here looks at it."""
        self._is_awaited = True
        try:
            yield
        finally:
            self._is_awaited = False

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """Within it, no signal keeps this launcher from what it does last: to see to it that all ranks have ended."""
        is_theirs = threading.current_thread() is threading.main_thread()
        numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT) if is_theirs else ()
        previous = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _hear(self, number: int, frame: object) -> None:
        if number != signal.SIGTERM or not self._is_awaited or self.asked is not None or not self._grace_period:
            raise Interrupted(number)
        self.asked = time.monotonic()

    def end(self, is_saved: bool) -> None:
        """Raises Interrupted once the job was asked to end, and either is saved or has had its time."""
        if self.asked is not None and (is_saved or time.monotonic() - self.asked > self._grace_period):
            raise Interrupted(signal.SIGTERM)
