"""One process owns the gradients: what PyTorch's ``nn.DataParallel`` does at every step.

::

    every rank computes ── gradients ──▶ rank 0 adds them up and updates ── parameters ──▶ every rank's next copy

The others own nothing: their copies of the model are thrown away behind each step, so the parameters are sent again
before the next. Rank 0 receives K bytes from each of the others and sends K to each, and is the only one that updates
while they wait. (The batch and the outputs, which it scatters and gathers as well, are not counted here.)
"""

from __future__ import annotations

import numpy as np

from .endpoint import Endpoint
from .reduce_broadcast import broadcast, reduce


def data_parallel_step(
    endpoint: Endpoint, parameters: np.ndarray, gradient: np.ndarray, learning_rate: float
) -> np.ndarray:
    """One step of gradient descent on rank 0's ``parameters``; every rank gets a copy of the new ones."""
    total = reduce(endpoint, gradient)
    if total is not None:
        parameters = parameters - learning_rate * total
    return broadcast(endpoint, parameters)


def data_parallel_all_reduce(endpoint: Endpoint, array: np.ndarray) -> np.ndarray:
    """The sum over the ranks, for every rank: the parameters after a step of length -1 that begins at zero."""
    return data_parallel_step(endpoint, np.zeros_like(array), array, -1)
