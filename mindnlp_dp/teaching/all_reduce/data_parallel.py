"""This module shows what PyTorch's ``nn.DataParallel`` does at every step: one process owns the parameters.

::

    every rank computes ── gradients ──▶ rank 0 adds them up and updates ── parameters ──▶ every rank's next copy

The other ranks keep no state: they discard their copies of the model after each step, so the parameters are sent again
before the next. Rank 0 receives K bytes from each of the others, updates alone while they wait, and sends K bytes to
each. (DataParallel also scatters the batch and gathers the outputs; this is not counted here.)
"""

from __future__ import annotations

import numpy as np

from .endpoint import Endpoint
from .reduce_broadcast import broadcast, reduce


def data_parallel_step(
    endpoint: Endpoint, parameters: np.ndarray, gradient: np.ndarray, learning_rate: float
) -> np.ndarray:
    """Do one step of gradient descent on rank 0's ``parameters``; return a copy of the new ones on every rank."""
    total = reduce(endpoint, gradient)
    if total is not None:
        parameters = parameters - learning_rate * total
    return broadcast(endpoint, parameters)


def data_parallel_all_reduce(endpoint: Endpoint, array: np.ndarray) -> np.ndarray:
    """Return the sum over the ranks, on every rank: the parameters after a step from zero at learning rate -1."""
    return data_parallel_step(endpoint, np.zeros_like(array), array, -1)
