"""What is checked before a collective starts: its arguments on this rank, and that all ranks make the same call.

Goes in: a call and its arguments. Comes out: nothing, or an error that says what
was expected, what came and on which rank. Communicates for one purpose, agreement.
"""

from __future__ import annotations

import functools
import hashlib
import math
from typing import Any, Protocol

import numpy as np

from .backends.base import Backend
from .backends.dtypes import dtype_name

OPS = ("sum", "mean", "max", "min")
TYPES = (
    "float64", "float32", "float16", "bfloat16", "int8", "int16", "int32", "int64",
    "uint8", "uint16", "uint32", "uint64", "bool",
)  # fmt: skip


class Ranks(Protocol):
    """Whoever knows its rank and how many there are."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...


def check_rank(name: str, value: int, ranks: Ranks) -> None:
    if not 0 <= value < ranks.world_size:
        raise ValueError(f"{name} must be a rank from 0 to {ranks.world_size - 1}, got {value} on rank {ranks.rank}")


def check_peer(name: str, value: int, ranks: Ranks) -> None:
    check_rank(name, value, ranks)
    if value == ranks.rank:
        raise ValueError(f"{name} must be another rank, got {value} on rank {ranks.rank} itself")


def check_op(x: Any, op: str, rank: int) -> None:
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}, got {op!r} on rank {rank}")
    if op == "mean" and "float" not in dtype_name(x):
        raise TypeError(
            f"the mean of {dtype_name(x)} would be rounded (rank {rank}); "
            "convert to float32 first, or use op='sum' and divide"
        )


def checked_array(x: Any, rank: int) -> Any:
    """``x``, a NumPy number as an array without dimensions; TypeError for what no backend can move."""
    if isinstance(x, np.generic):
        x = np.asarray(x)
    if not hasattr(x, "dtype") or dtype_name(x) not in TYPES:
        what = dtype_name(x) if hasattr(x, "dtype") else type(x).__name__
        raise TypeError(
            f"expected a NumPy array or a MindSpore tensor of {', '.join(TYPES)}; got {what} on rank {rank}. "
            "Other things travel with broadcast_object and all_gather_object"
        )
    return x


def numel(x: Any) -> int:
    return math.prod(x.shape)


def describe(x: Any) -> str:
    return f"{dtype_name(x)} of shape {tuple(x.shape)}"


@functools.lru_cache(maxsize=1024)
def _code_of(call: str) -> int:
    return int.from_bytes(hashlib.blake2b(call.encode(), digest_size=7).digest(), "big")


def check_agreement(backend: Backend, call: str, *arguments: str) -> None:
    """Raise RuntimeError on every rank unless all are making this call, with these arguments.

    Libraries pair mismatched collectives up with each other, or hang.
    """
    if backend.world_size == 1:
        return
    mine = f"{call}({', '.join(arguments)})"
    if not backend.all_equal(_code_of(mine)):
        everyone = enumerate(backend.all_gather_object(mine))
        calls = "; ".join(f"rank {rank}: {theirs}" for rank, theirs in everyone)
        raise RuntimeError(
            f"the ranks do not agree on a collective: {calls}. Every rank must make the same calls, "
            "in the same order, with the same shapes and types"
        )
