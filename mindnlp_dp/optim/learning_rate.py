"""How the learning rate grows with the batch, and in the first updates: arithmetic only."""

from __future__ import annotations


def scaled_learning_rate(learning_rate: float, batch_size: int, new_batch_size: int, rule: str = "linear") -> float:
    """The learning rate for ``new_batch_size`` samples an update, from one that suits ``batch_size``.

    ``"linear"`` keeps the distance that an epoch goes: k times the batch, k times the rate (Goyal et al., "Accurate,
    large minibatch SGD: training ImageNet in 1 hour", 2017). ``"sqrt"`` keeps the variance of an epoch's noise, which
    suits optimizers that divide by the gradient's size, such as LAMB (You et al., 2020, scale it so).

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
    """What the learning rate is multiplied with in update ``step``, from 0 on: it rises by equal steps to 1.

    A large rate at the beginning, when weights change most, is what breaks large batches (Goyal et al., section 2.2).

    Examples:
        >>> [warmup_factor(step, 4) for step in (0, 1, 3, 4, 100)]
        [0.25, 0.5, 1.0, 1.0, 1.0]
    """
    return 1.0 if num_warmup_steps <= 0 else min(1.0, (step + 1) / num_warmup_steps)
