"""The names of types, which NumPy and MindSpore spell differently."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

HALF_TYPES = ("float16", "bfloat16")


def dtype_name(x: Any) -> str:
    """``"float32"``, ``"int64"``, ``"bool"``, ... of a NumPy array or a MindSpore tensor."""
    return _name_of(x.dtype)


@functools.cache
def _name_of(dtype: Any) -> str:
    if isinstance(dtype, np.dtype):
        # Whatever the order of its bytes.
        return dtype.name
    # MindSpore prints Float32, or mindspore.float32 once MindNLP is imported.
    return str(dtype).lower().rpartition(".")[2].rstrip("_")
