"""How fast training went, and how much of it was communication.

Counts samples of all ranks; excludes what is not training (evaluation, saving).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class TrainingTimer:
    """A stopwatch that runs while training does.

    Attributes:
        seconds: running time so far.
    """

    def __init__(self) -> None:
        self._total = 0.0
        self._began: float | None = None

    @property
    def seconds(self) -> float:
        running = time.perf_counter() - self._began if self._began is not None else 0.0
        return self._total + running

    def start(self) -> None:
        if self._began is None:
            self._began = time.perf_counter()

    def stop(self) -> None:
        self._total, self._began = self.seconds, None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of a block out."""
        self.stop()
        try:
            yield
        finally:
            self.start()
