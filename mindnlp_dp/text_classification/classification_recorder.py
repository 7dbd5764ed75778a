"""This module records the classes that a classifier confuses, beside the times of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Optional

import numpy as np

from mindnlp_dp.finetuning.recorder import TimeRecorder
from mindnlp_dp.training.evaluate import accuracy

NUM_CONFUSIONS = 10


class RunRecorder(TimeRecorder):
    """A Trainer callback that records times and confusions; pass its :meth:`metrics` as ``compute_metrics``.

    Attributes:
        confusions: result of :func:`most_confused` for the last evaluation; None without one, as on ranks that do not
            compute metrics, or in a resumed run that was already complete.
        classes: result of :func:`class_scores` for the last evaluation; empty without one.
    """

    def __init__(self, label_names: Sequence[str], num_train: int) -> None:
        super().__init__(num_train)
        self.label_names = label_names
        self.confusions: Optional[list[dict[str, Any]]] = None
        self.classes: list[dict[str, Any]] = []

    def metrics(self, prediction: Any) -> dict[str, float]:
        """Return accuracy and macro F1, and record the scores of each class and the confusions."""
        self.confusions = most_confused(prediction.predictions, prediction.label_ids, self.label_names)
        self.classes = class_scores(prediction.predictions, prediction.label_ids, self.label_names)
        return {
            "accuracy": accuracy(prediction.predictions, prediction.label_ids),
            "macro_f1": float(np.mean([scores["f1"] for scores in self.classes])),
        }


def class_scores(predictions: np.ndarray, labels: np.ndarray, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return precision, recall, F1 and number of samples of each class that occurs in labels or predictions."""
    pairs = labels * len(names) + predictions.argmax(-1)
    counts = np.bincount(pairs, minlength=len(names) ** 2).reshape(len(names), len(names))
    found = []
    for number, name in enumerate(names):
        right, of, taken = int(counts[number, number]), int(counts[number].sum()), int(counts[:, number].sum())
        if of or taken:
            found.append({
                "label": name, "precision": right / taken if taken else 0.0, "recall": right / of if of else 0.0,
                "f1": 2 * right / (of + taken), "samples": of,
            })  # fmt: skip
    return found


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
