"""This module computes the learning rate for a larger batch and the warm-up factor, for training scripts."""

from __future__ import annotations


def scaled_learning_rate(learning_rate: float, batch_size: int, new_batch_size: int, rule: str = "linear") -> float:
    """Return the learning rate for ``new_batch_size`` samples per update, given one that suits ``batch_size``.

    ``"linear"`` keeps the distance that the weights move in an epoch: k times the batch, k times the rate (Goyal et
    al., "Accurate, large minibatch SGD: training ImageNet in 1 hour", 2017). ``"sqrt"`` keeps the variance of an
    epoch's gradient noise, for optimizers that divide by the gradient's size, such as LAMB (You et al., 2020).

    Examples:
        >>> scaled_learning_rate(0.1, 256, 8192), scaled_learning_rate(1e-3, 128, 2048, "sqrt")
        (3.2, 0.004)
    """
    if batch_size < 1 or new_batch_size < 1:
        raise ValueError(f"batch sizes must be at least 1, got {batch_size} and {new_batch_size}")
    factor = new_batch_size / batch_size
    if rule == "linear":
        return learning_rate * factor
    if rule == "sqrt":
        return learning_rate * factor**0.5
    raise ValueError(f'rule must be "linear" or "sqrt", got {rule!r}')


def warmup_factor(step: int, num_warmup_steps: int) -> float:
    """Return the learning rate's factor in update ``step`` (the first is 0); it rises linearly to 1.

    With large batches, a large rate at the beginning, when weights change most, breaks training (Goyal et al., section
    2.2).

    Examples:
        >>> [warmup_factor(step, 4) for step in (0, 1, 3, 4, 100)]
        [0.25, 0.5, 1.0, 1.0, 1.0]
    """
    return 1.0 if num_warmup_steps <= 0 else min(1.0, (step + 1) / num_warmup_steps)
