"""Handle SIGTERM and SIGHUP: give a job some time to write a last checkpoint before its ranks are ended.

:mod:`mindnlp_dp.launch.run` creates the :class:`Termination`. It records when the job was asked to end, and raises an
exception if nothing can be saved.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Optional

# Kubernetes, Slurm and systemd grant 30 s or more between SIGTERM and SIGKILL.
GRACE_PERIOD_SECONDS = 30.0


class Interrupted(KeyboardInterrupt):
    """Raised for a signal other than Ctrl-C's."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Termination:
    """Handles the signals that end this launcher and its job.

    Args:
        grace_period: seconds that a job gets to write a checkpoint.

    Attributes:
        asked: time at which the first of these signals came, by the monotonic clock; None before.
    """

    def __init__(self, grace_period: float = GRACE_PERIOD_SECONDS) -> None:
        self._grace_period = grace_period
        self._is_awaited = False
        self.asked: Optional[float] = None
        self._number: int = signal.SIGTERM

    def handled(self) -> AbstractContextManager[None]:
        """End the job on SIGTERM, or on SIGHUP when the terminal or its connection is closed, inside the block."""
        # A signal that is ignored stays so: nohup ignores SIGHUP.
        numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
        # Except SIGCHLD: if the parent has ignored it, the kernel keeps no exit code of a child for this process.
        return _handlers({**dict.fromkeys(numbers, self._hear), signal.SIGCHLD: signal.SIG_DFL})

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Only record the first signal inside the block: the code there checks for it."""
        self._is_awaited = True
        try:
            yield
        finally:
            self._is_awaited = False

    def ignored(self) -> AbstractContextManager[None]:
        """Ignore signals inside the block, so that this launcher can make sure that all ranks have ended."""
        return _handlers(dict.fromkeys((signal.SIGTERM, signal.SIGHUP, signal.SIGINT), signal.SIG_IGN))

    def _hear(self, number: int, frame: object) -> None:
        if number == signal.SIGHUP and self.asked is not None:
            # A shell sends it to its jobs, and the kernel again when the shell has ended; systemd, after SIGTERM.
            return
        if not self._is_awaited or self.asked is not None or not self._grace_period:
            raise Interrupted(number)
        self.asked, self._number = time.monotonic(), number

    def end(self, is_saved: bool) -> None:
        """Raise Interrupted if the job was asked to end, and is saved or has used up its grace period."""
        if self.asked is not None and (is_saved or time.monotonic() - self.asked > self._grace_period):
            raise Interrupted(self._number)


@contextmanager
def _handlers(handlers: Mapping[int, Any]) -> Iterator[None]:
    """Install handlers of signals inside the block. Python allows it in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        handlers = {}
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
