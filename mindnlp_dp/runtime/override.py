"""This module replaces a function of another library by ours and keeps the stock one as the fallback."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def override(owner: Any, name: str = "") -> Callable[[Callable[..., Any]], None]:
    """Replace the function ``name`` of a module or class by the decorated one; ``name`` defaults to the latter's name.

    If our function returns NotImplemented, the stock one is called.

    MindSpore compiles graphs from the stock function's source, because ``inspect`` follows ``__wrapped__``.
    """

    def replace(ours: Callable[..., Any]) -> None:
        where = name or ours.__name__
        stock = getattr(owner, where)

        @functools.wraps(stock)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            result = ours(*args, **kwargs)
            return stock(*args, **kwargs) if result is NotImplemented else result

        setattr(owner, where, replaced)

    return replace
