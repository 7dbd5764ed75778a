"""What a report tells of a run and the Trainer does not: when things were logged, how fast it went, what was confused.

Goes in: a run, as a callback and as ``compute_metrics`` see it; MindNLP's Trainer or ours. Comes out: a second for
every line of the log, the training time without evaluations, and the classes that were taken for each other.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Optional

import numpy as np

from mindnlp_dp.evaluation.metrics import accuracy
from mindnlp_dp.trainers.library import TrainerCallback

NUM_CONFUSIONS = 10


class RunRecorder(TrainerCallback):
    """Pass it as a callback, and its :meth:`metrics` as ``compute_metrics``.

    Attributes:
        train_seconds: spent in epochs so far, evaluations between them left out.
        samples_seen: in that time, over all ranks.
        confusions: of the last evaluation (:func:`most_confused`); None where there was none, as on ranks that do not
            compute metrics, or in a run that had ended when it was taken up.
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
        """The share of right answers."""
        self.confusions = most_confused(prediction.predictions, prediction.label_ids, self.label_names)
        return {"accuracy": accuracy(prediction.predictions, prediction.label_ids)}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # A run that was taken up goes on where its log ends.
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
    """The pairs of classes that were taken for each other most often, the worst first.

    ``predictions`` has the shape (rows, classes). Each pair is told once, whichever way round: ``label`` and
    ``predicted`` in the direction that is more frequent, ``count`` in both, ``of`` the number of rows of both classes.
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
