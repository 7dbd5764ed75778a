"""This module explains the timeouts of MCCL, MindSpore's CPU library, and reports the call that a rank is blocked in.

MindSpore's cluster fails a collective on CPU if a rank does not arrive within MS_NODE_TIMEOUT seconds, or if a
neighbour in the ring has exited; for both it says "AllGather failed". The MindSpore transport wraps its calls here, so
that errors say which rank waited, how long, and in which call.
"""

from __future__ import annotations

import functools
import os
import re
import time
from typing import Any

from mindnlp_dp.runtime import heartbeat

VARIABLE = "MS_NODE_TIMEOUT"
DEFAULT_SECONDS = 30.0
# Fraction of the timeout from which a failure counts as one: MCCL starts its own clock, and retries in steps.
_NEARLY = 0.8
_FAILED = re.compile(r"\b(AllGather|AllReduce|Broadcast|ReduceScatter) failed\b")


class LateRankError(RuntimeError):
    """A rank did not arrive at a collective before MindSpore's timeout, or exited during it."""


def timeout_seconds() -> float:
    """Return how long one collective may wait under MCCL."""
    try:
        return float(os.environ.get(VARIABLE, DEFAULT_SECONDS))
    except ValueError:
        return DEFAULT_SECONDS


class MissingMessageError(LateRankError, ValueError):
    """A rank failed before it could send a message that this rank waited for; its own error says why."""


class WatchedCollectives:
    """Wraps the methods of ``collectives``, which return when all ranks have arrived.

    The launcher's monitor sees which call this rank is blocked in, even when a backward pass begins the exchange of a
    gradient. A call that fails after a long wait, or because a neighbour exited, raises :class:`LateRankError`.
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
                with heartbeat.waiting(f"MindSpore's {name}"):
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
