"""This module gives NumPy's and MindSpore's data types one common name."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

HALF_TYPES = ("float16", "bfloat16")


def dtype_name(x: Any) -> str:
    """Return the type of a NumPy array or a MindSpore tensor: ``"float32"``, ``"int64"``, ``"bool"``, ..."""
    return _name_of(x.dtype)


@functools.cache
def _name_of(dtype: Any) -> str:
    if isinstance(dtype, np.dtype):
        # The name does not depend on the byte order.
        return dtype.name
    # MindSpore prints Float32, or mindspore.float32 once MindNLP is imported.
    return str(dtype).lower().rpartition(".")[2].rstrip("_")
