"""Measures the training speed and the share of communication in it; the Trainer reports both.

It counts the samples of all ranks and excludes the time of evaluation and saving.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Optional

import numpy as np

from mindnlp_dp.communication.process_group import ProcessGroup


class TrainingTimer:
    """A stopwatch for the training time, which is stopped during evaluation and saving.

    Attributes:
        seconds: the measured time so far.
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
        """Exclude the time of this block."""
        self.stop()
        try:
            yield
        finally:
            self.start()


def speed_metrics(
    group: ProcessGroup,
    *,
    seconds: float,
    sync_seconds: float,
    num_samples: int,
    num_updates: int,
    num_tokens: Optional[int] = None,
) -> dict[str, float]:
    """Return the speed of a run: samples are summed over the ranks, seconds are averaged. A collective.

    ``num_tokens`` is the total over all ranks, the same value on each rank.
    """
    samples, total_seconds, total_sync = group.all_reduce(np.array([num_samples, seconds, sync_seconds], np.float64))
    mean_seconds = max(total_seconds / group.world_size, 1e-9)
    speed = {
        "train_seconds": round(mean_seconds, 4),
        "train_samples_per_second": round(samples / mean_seconds, 3),
        "train_steps_per_second": round(num_updates / mean_seconds, 3),
        "gradient_sync_share": round(total_sync / group.world_size / mean_seconds, 4),
    }
    if num_tokens is not None:
        speed["train_tokens_per_second"] = round(num_tokens / mean_seconds, 3)
    return speed
