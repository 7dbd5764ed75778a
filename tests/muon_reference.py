"""The update of Muon for one matrix in plain NumPy, which tests of the optimizer compare with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def muon_reference(
    weights: np.ndarray, gradient: np.ndarray, momentum: np.ndarray, group: Mapping[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the weights and the momentum of a matrix after an update, in plain NumPy, in the arrays' type."""
    mu, lr = group["momentum"], group["lr"]
    momentum = mu * momentum + (1 - mu) * gradient
    direction = mu * momentum + (1 - mu) * gradient if group["nesterov"] else momentum
    x = direction / max(np.linalg.norm(direction), group["eps"])
    a, b, c = group["ns_coefficients"]
    for _ in range(group["ns_steps"]):
        gram = x @ x.T
        x = a * x + b * gram @ x + c * gram @ gram @ x
    rows, columns = weights.shape
    scale = max(1.0, rows / columns) ** 0.5
    if group["adjust_lr_fn"] == "match_rms_adamw":
        scale = 0.2 * max(rows, columns) ** 0.5
    return (1 - lr * group["weight_decay"]) * weights - lr * scale * x, momentum
