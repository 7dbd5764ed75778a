"""What a model puts out, on its way from the last stage of a pipeline to the others.

Goes in: nested outputs, of a model's own classes. Comes out: the same with arrays in place of tensors, which travel,
and back.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Tensor

from mindnlp_dp.arrays.conversion import from_host, to_host
from mindnlp_dp.arrays.types import dtype_name


def to_arrays(outputs: Any) -> Any:
    """Nested outputs of a model with arrays in place of tensors; of its own classes of outputs, too."""
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
