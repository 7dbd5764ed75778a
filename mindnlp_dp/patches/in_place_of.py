"""A function of ours in place of somebody else's, which is called wherever ours does not want to."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def in_place_of(owner: Any, name: str = "") -> Callable[[Callable[..., Any]], None]:
    """Put a function in place of the one called ``name``, or of its own name, in a module or a class.

    Ours returns NotImplemented to have the stock one called.

    Graphs are compiled from a function's source, and that is the stock one's: ``inspect`` follows ``__wrapped__``.
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
