"""This module records the times of a run, which the Trainer does not; it works with MindNLP's Trainer and with ours."""

from __future__ import annotations

import time
from typing import Any

from mindnlp_dp.training.trainer.mindnlp_trainer import TrainerCallback


class TimeRecorder(TrainerCallback):
    """A Trainer callback that adds ``seconds`` to every log entry, and measures the training time without evaluations.

    Attributes:
        train_seconds: time spent in epochs so far, without the evaluations between them.
        samples_seen: number of samples in that time, over all ranks.
    """

    def __init__(self, num_train: int) -> None:
        self.num_train = num_train
        self.train_seconds = 0.0
        self.samples_seen = 0
        self._began = self._epoch_began = 0.0
        self._began_at_epoch = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # The clock of a resumed run continues where its log ends.
        before = max((row.get("seconds", 0.0) for row in state.log_history), default=0.0)
        self._began = time.perf_counter() - before
        self._began_at_epoch = state.epoch or 0.0

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._epoch_began = time.perf_counter()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.train_seconds += time.perf_counter() - self._epoch_began
        self.samples_seen = round((state.epoch - self._began_at_epoch) * self.num_train)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        state.log_history[-1]["seconds"] = round(time.perf_counter() - self._began, 3)

    @property
    def samples_per_second(self) -> float:
        return self.samples_seen / self.train_seconds if self.train_seconds else 0.0
