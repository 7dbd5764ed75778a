"""MCCL's patience with ranks that are late, in words, and what a rank waits in.

MindSpore's cluster gives up a collective on CPU for which a rank does not come within MS_NODE_TIMEOUT seconds, and one
whose neighbour in the ring is gone; of both it says "AllGather failed". What comes in is whatever has these calls; what
goes out is the same, whose errors say who waited, how long, in which call.
"""

from __future__ import annotations

import functools
import os
import re
import time
from typing import Any

from mindnlp_dp.runtime import progress

VARIABLE = "MS_NODE_TIMEOUT"
DEFAULT_SECONDS = 30.0
# MCCL counts from its own start of the call, and retries in steps.
_NEARLY = 0.8
_FAILED = re.compile(r"\b(AllGather|AllReduce|Broadcast|ReduceScatter) failed\b")


class LateRankError(RuntimeError):
    """A rank did not come to a collective before MindSpore lost its patience, or has gone in the midst of it."""


def timeout_seconds() -> float:
    """How long one collective may wait under MCCL."""
    try:
        return float(os.environ.get(VARIABLE, DEFAULT_SECONDS))
    except ValueError:
        return DEFAULT_SECONDS


class MissingMessageError(LateRankError, ValueError):
    """A rank failed before it could send a message that this one waited for; its own error says why."""


class WatchedCollectives:
    """The functions of ``collectives``, which end when all ranks have come.

    Whoever watches the job sees which one this rank is in, also where a backward pass begins the exchange of a
    gradient. One that fails after a long wait, or for want of a neighbour, raises :class:`LateRankError`.
    """

    def __init__(self, collectives: Any, rank: int) -> None:
        self._collectives = collectives
        self._rank = rank

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._collectives, name)

        @functools.wraps(call)
        def watched(*args: Any, **kwargs: Any) -> Any:
            began = time.monotonic()
            try:
                with progress.waiting(f"MindSpore's {name}"):
                    return call(*args, **kwargs)
            except RuntimeError as error:
                waited = time.monotonic() - began
                if waited < _NEARLY * timeout_seconds():
                    if not _FAILED.search(str(error)):
                        raise
                    raise LateRankError(
                        f"rank {self._rank} lost a rank that it exchanges with, {waited:.0f} s after it came to "
                        f"{name}: that one has ended, as its log says"
                    ) from error
                raise LateRankError(
                    f"rank {self._rank} waited {waited:.0f} s in {name} for a rank that did not come, and MindSpore "
                    f"gave up. That rank has ended, as its log says, or it is late by more than {VARIABLE}, which is "
                    f"{timeout_seconds():.0f} s here. mindnlp-dp run --backend mindspore sets it to an hour; "
                    f"elsewhere: export {VARIABLE}=600"
                ) from error

        setattr(self, name, watched)
        return watched
