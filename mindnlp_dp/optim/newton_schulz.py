"""This module has the arithmetic of Muon for one matrix; the optimizer (muon.py) and its rule (rules.py) call it.

Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

ADJUSTMENTS = (None, "original", "match_rms_adamw")


def directions(gradient: Any, momentum: Any, group: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the new momentum, and the direction that is orthogonalized."""
    rate = float(group["momentum"])
    momentum = momentum + (1 - rate) * (gradient - momentum)
    return momentum, gradient + rate * (momentum - gradient) if group["nesterov"] else momentum


def orthogonalize(matrix: Any, group: Mapping[str, Any], product: Callable[[Any, Any], Any]) -> Any:
    """Return nearly the polar factor of a 2-D array or tensor, whose singular values are all 1, by Newton-Schulz."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    a, b, c = map(float, group["ns_coefficients"])
    x = matrix.T if is_tall else matrix
    # Squares of the largest float32 numbers would overflow.
    largest = abs(x).max() + 1e-30
    x = x / largest
    x = x / ((x * x).sum() ** 0.5).clip(group["eps"] / largest, None)
    for _ in range(group["ns_steps"]):
        gram = product(x, x.T)
        x = a * x + product(b * gram + c * product(gram, gram), x)
    return x.T if is_tall else x


def matrix_shape(shape: Sequence[int], group: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the shape of each matrix in a parameter, which has ``num_packed`` of them side by side."""
    matrix = list(shape)
    matrix[group["packed_axis"]] //= group["num_packed"]
    return tuple(matrix)


def adjustment(shape: Sequence[int], group: Mapping[str, Any]) -> float:
    """Return the factor of the learning rate for a parameter of this shape.

    "original" is that of Jordan; "match_rms_adamw" gives updates the size of AdamW's, so that both can have one rate
    (Liu et al., "Muon is scalable for LLM training", 2025).
    """
    rows, columns = matrix_shape(shape, group)
    if group["adjust_lr_fn"] == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


def multiplications(shape: Sequence[int], group: Mapping[str, Any]) -> int:
    """Return the number of multiplications that orthogonalize a parameter of this shape.

    >>> multiplications((2, 3), {"num_packed": 1, "packed_axis": 0, "ns_steps": 5})
    160
    """
    small, large = sorted(matrix_shape(shape, group))
    return int(group["num_packed"] * group["ns_steps"] * (2 * small * small * large + small**3))
