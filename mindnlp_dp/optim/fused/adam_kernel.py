"""This module calls MindSpore's Adam kernel for CPU, on arrays; rules.py calls it for each segment.

It is the function that the operator ``mindspore.ops.Adam`` calls, from the same library, ``libnnacl.so``, and returns
the same bits. A call by ctypes takes a few microseconds, an operator about a hundred, so that segments can be short
enough to stay in a core's cache.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import numpy as np

# Changes weights and moments in place; arguments: weights, first and second moment, gradient, step size, beta 1 and 2,
# epsilon.
Adam = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray, float, float, float, float], None]

_POINTER = ctypes.c_void_p
# Weights, moments, learning rate, beta 1 and 2, epsilon, gradient, first and last element, Nesterov.
_ARGUMENTS = [*[_POINTER] * 3, *[ctypes.c_float] * 4, _POINTER, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_bool]


def step_size(rate: float, beta1: float, beta2: float, step: int) -> float:
    """Return the learning rate with the bias corrections of update ``step``, in float32 as the operator computes it."""
    one, first, second = np.float32(1), np.float32(beta1**step), np.float32(beta2**step)
    return float(np.float32(rate) * np.sqrt(one - second) / (one - first))


@functools.cache
def kernel() -> Optional[Adam]:
    """Return the kernel, or None if this MindSpore has none that computes what the operator does."""
    import mindspore

    try:
        run: Any = ctypes.CDLL(str(Path(mindspore.__file__).parent / "lib" / "libnnacl.so")).AdamFp32
    except (OSError, AttributeError):
        return None
    run.argtypes, run.restype = _ARGUMENTS, ctypes.c_int

    def adam(  # noqa: PLR0917
        weights: np.ndarray,
        first: np.ndarray,
        second: np.ndarray,
        gradient: np.ndarray,
        size: float,
        beta1: float,
        beta2: float,
        epsilon: float,
    ) -> None:
        at = (array.ctypes.data for array in (weights, first, second))
        run(*at, size, beta1, beta2, epsilon, gradient.ctypes.data, 0, len(weights), False)

    return adam if _equals_the_operator(adam) else None


def _equals_the_operator(adam: Adam) -> bool:
    """Return whether the kernel gives the operator's bits: another version may have other arguments."""
    import mindspore

    rng = np.random.default_rng(0)
    weights, first, second, gradient = (rng.random(64, np.float32) for _ in range(4))
    tensors = [mindspore.Tensor(array.copy()) for array in (weights, first, second, gradient)]
    rate, beta1, beta2, epsilon, step = 1e-2, 0.9, 0.999, 1e-8, 3
    scalars = [mindspore.Tensor(np.float32(x)) for x in (beta1**step, beta2**step, rate, beta1, beta2, epsilon)]
    mindspore.ops.Adam()(*tensors[:3], *scalars, tensors[3])
    adam(weights, first, second, gradient, step_size(rate, beta1, beta2, step), beta1, beta2, epsilon)
    return all((array == tensor.asnumpy()).all() for array, tensor in zip((weights, first, second), tensors))
