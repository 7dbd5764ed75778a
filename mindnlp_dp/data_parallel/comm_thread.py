"""This module runs the exchange that overlaps the backward pass: on a separate thread, or immediately.

A library for host memory, such as MPI, does its work in the thread that calls it, so it needs a separate thread. A
device library only enqueues the operation in a stream, so it can be called in the gradient hook itself.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Optional

from mindnlp_dp.communication.transports.polling_wait import PollingWait


class ExchangeThread:
    """Runs the submitted tasks in order on a separate thread, which ends with the window."""

    def __init__(self) -> None:
        self.waiter = PollingWait()
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
                # finish() raises it in the thread that waits for the result.
                self._error = error

    def submit(self, task: Callable[[], None]) -> None:
        self._tasks.put(task)

    def finish(self) -> None:
        """Wait until all tasks are done; raise the error of a task that failed."""
        self._tasks.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """Stop the thread, even if it is blocked in a wait for other ranks."""
        self.waiter.give_up()
        self._error = self._error or RuntimeError("abandoned")
        self._tasks.put(None)
        self._thread.join()


class ImmediateExchange:
    """Runs each task immediately: a task only enqueues work that the device continues in the background."""

    waiter = None

    def submit(self, task: Callable[[], None]) -> None:
        task()

    def finish(self) -> None:
        """Do nothing: :meth:`.Bucket.wait` waits for each result."""

    def abandon(self) -> None:
        """Do nothing: the device completes the operations that were enqueued."""
