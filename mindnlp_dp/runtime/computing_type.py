"""Holds the type in which a model computes now, if it is not that of its parameters; models make their masks in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Optional

_now: Optional[Any] = None


def computing_type() -> Optional[Any]:
    """Return the type in which a forward pass computes now; None: that of the parameters."""
    return _now


@contextlib.contextmanager
def computing_in(dtype: Any) -> Iterator[None]:
    """Let models make their masks in this type, in this block."""
    global _now
    before, _now = _now, dtype
    try:
        yield
    finally:
        _now = before
