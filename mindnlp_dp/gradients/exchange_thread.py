"""Where an exchange runs that begins during the backward pass: on a thread of its own, or at once.

A library of host memory, such as MPI, exchanges in the thread that calls it, so it gets one that computes nothing
else. A device's library only begins something, which its stream goes on with: that can be done where it comes up.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Optional

from mindnlp_dp.communication.transports.patience import Patience


class ExchangeThread:
    """Runs what it is given, in order, on a thread of its own, which ends with the window."""

    def __init__(self) -> None:
        self.patience = Patience()
        self._tasks: queue.SimpleQueue[Optional[Callable[[], None]]] = queue.SimpleQueue()
        self._error: Optional[BaseException] = None
        self._thread = threading.Thread(target=self._run, name="gradient-exchange", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                if self._error is None:
                    task()
            except BaseException as error:  # noqa: BLE001
                # The thread that waits for the result raises it.
                self._error = error

    def submit(self, task: Callable[[], None]) -> None:
        self._tasks.put(task)

    def finish(self) -> None:
        """Return when all is done, or raise what a task raised."""
        self._tasks.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """End the thread, whatever it is waiting for."""
        self.patience.give_up()
        self._error = self._error or RuntimeError("abandoned")
        self._tasks.put(None)
        self._thread.join()


class ImmediateExchange:
    """Runs what it is given at once: it begins something that a device goes on with."""

    patience = None

    def submit(self, task: Callable[[], None]) -> None:
        task()

    def finish(self) -> None:
        """Nothing is left: who takes a bucket's result waits for it."""

    def abandon(self) -> None:
        """The device ends what it has begun."""
