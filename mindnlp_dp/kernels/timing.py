"""This module measures the passes of the kernels, for the profile of a run."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

from mindspore.common._grad_function import _Function

from mindnlp_dp.kernels import functions

# Called with a name, and the begin and the end as values of time.perf_counter().
Record = Callable[[str, float, float], None]


@contextlib.contextmanager
def timed_passes(record: Record) -> Iterator[None]:
    """Call ``record`` for every forward and backward pass of a kernel in this block, such as "Linear backward"."""
    kinds = [kind for kind in vars(functions).values() if isinstance(kind, type) and issubclass(kind, _Function)]
    originals = [(kind, way, vars(kind)[way]) for kind in kinds for way in ("forward", "backward") if way in vars(kind)]
    for kind, way, original in originals:
        setattr(kind, way, staticmethod(_timed(original.__func__, f"{kind.__name__.strip('_')} {way}", record)))
    try:
        yield
    finally:
        for kind, way, original in originals:
            setattr(kind, way, original)


def _timed(function: Callable[..., Any], name: str, record: Record) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any) -> Any:
        began = time.perf_counter()
        result = function(*args)
        record(name, began, time.perf_counter())
        return result

    return call
