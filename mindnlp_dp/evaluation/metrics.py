"""This module computes and names the metrics of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


def with_prefix(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Return the metrics under names that begin with ``prefix`` and an underscore."""
    start = f"{prefix}_"
    return {name if name.startswith(start) else start + name: value for name, value in metrics.items()}


def accuracy(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Return the fraction of rows whose largest of ``predictions`` (rows, classes) is at ``labels`` (rows,)."""
    return float(np.sum(predictions.argmax(-1) == labels) / len(labels))
