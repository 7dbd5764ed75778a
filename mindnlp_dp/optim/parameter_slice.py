"""This module defines a slice of a flat parameter, as ZeRO assigns it to a rank; updaters and checkpoints use it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ParameterSlice:
    """Elements ``[start, stop)`` of parameter ``index``, and the ``offset`` of the first one in a flat array."""

    index: int
    start: int
    stop: int
    offset: int

    @property
    def flat(self) -> slice:
        return slice(self.offset, self.offset + self.stop - self.start)
