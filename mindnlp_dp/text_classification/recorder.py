"""This module records what a report needs and the Trainer does not provide; results.py reads it.

It adds the time in seconds to every log entry, and records the training time without evaluations and the classes that
were confused. It works with MindNLP's Trainer and with ours.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Optional

import numpy as np

from mindnlp_dp.training.evaluate import accuracy
from mindnlp_dp.training.trainer.mindnlp_trainer import TrainerCallback

NUM_CONFUSIONS = 10


class RunRecorder(TrainerCallback):
    """A Trainer callback that records times and confusions; pass its :meth:`metrics` as ``compute_metrics``.

    Attributes:
        train_seconds: time spent in epochs so far, without the evaluations between them.
        samples_seen: number of samples in that time, over all ranks.
        confusions: result of :func:`most_confused` for the last evaluation; None without one, as on ranks that do not
            compute metrics, or in a resumed run that was already complete.
    """

    def __init__(self, label_names: Sequence[str], num_train: int) -> None:
        self.label_names = label_names
        self.num_train = num_train
        self.train_seconds = 0.0
        self.samples_seen = 0
        self.confusions: Optional[list[dict[str, Any]]] = None
        self._began = self._epoch_began = 0.0
        self._began_at_epoch = 0.0

    def metrics(self, prediction: Any) -> dict[str, float]:
        """Return the accuracy, and record the confusions."""
        self.confusions = most_confused(prediction.predictions, prediction.label_ids, self.label_names)
        return {"accuracy": accuracy(prediction.predictions, prediction.label_ids)}

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


def most_confused(predictions: np.ndarray, labels: np.ndarray, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the pairs of classes that were confused most often, the worst first.

    ``predictions`` has the shape (rows, classes). Each pair occurs once: ``label`` and ``predicted`` are in the more
    frequent direction, ``count`` is for both directions, ``of`` is the number of rows of both classes.
    """
    taken_for = Counter(zip(labels.tolist(), predictions.argmax(-1).tolist()))
    of_class = Counter(labels.tolist())
    pairs = {tuple(sorted(pair)) for pair in taken_for if pair[0] != pair[1]}
    found = []
    for pair in sorted(pairs):
        label, predicted = max(pair, pair[::-1], key=lambda way: taken_for[way])
        found.append({
            "label": names[label], "predicted": names[predicted],
            "count": taken_for[pair] + taken_for[pair[::-1]], "of": of_class[label] + of_class[predicted],
        })  # fmt: skip
    return sorted(found, key=lambda pair: -pair["count"])[:NUM_CONFUSIONS]
