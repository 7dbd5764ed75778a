"""Converts nested model outputs to arrays and back, so that the last stage of a pipeline can broadcast them."""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Tensor

from mindnlp_dp.runtime.arrays import dtype_name, from_host, to_host


def to_arrays(outputs: Any) -> Any:
    """Replace the tensors in nested model outputs by arrays; output classes of the model are kept."""
    if isinstance(outputs, Tensor):
        return _Array(to_host(outputs), dtype_name(outputs))
    if isinstance(outputs, dict):
        return type(outputs)(**{key: to_arrays(value) for key, value in outputs.items()})
    if isinstance(outputs, (list, tuple)):
        return type(outputs)(map(to_arrays, outputs))
    return outputs


def to_tensors(outputs: Any) -> Any:
    if isinstance(outputs, _Array):
        return outputs.tensor()
    if isinstance(outputs, dict):
        return type(outputs)(**{key: to_tensors(value) for key, value in outputs.items()})
    if isinstance(outputs, (list, tuple)):
        return type(outputs)(map(to_tensors, outputs))
    return outputs


class _Array:
    def __init__(self, array: np.ndarray, dtype: str) -> None:
        self.array, self.dtype = array, dtype

    def tensor(self) -> Any:
        return from_host(self.array, self.dtype)
