"""This module writes the labels of the texts of ``--predict-file``, for finetune_classifier.py."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mindnlp_dp.runtime.atomic_write import atomic_write

PREDICTIONS_FILE = "predictions.csv"


def write_predictions(folder: Path, texts: Sequence[str], logits: np.ndarray, label_names: Sequence[str]) -> None:
    """Write each text, its label and the label's probability, in the order of the file."""
    shifted = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    best, likely = logits.argmax(axis=-1), (shifted / shifted.sum(axis=-1, keepdims=True)).max(axis=-1)
    with atomic_write(folder / PREDICTIONS_FILE) as file, open(file, "w", newline="", encoding="utf-8") as opened:
        writer = csv.writer(opened)
        writer.writerow(["text", "label", "probability"])
        writer.writerows([text, label_names[at], f"{p:.6f}"] for text, at, p in zip(texts, best, likely))
