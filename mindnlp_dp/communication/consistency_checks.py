"""This module checks a collective before it starts: its arguments on this rank, and that all ranks make the same call.

The process group calls it. Errors say what was expected, what came and on which rank. The module communicates only to
reach agreement.
"""

from __future__ import annotations

import functools
import hashlib
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any, Optional, Protocol

import numpy as np

from mindnlp_dp.communication.transports.mindspore.collective_calls import MissingMessageError
from mindnlp_dp.communication.transports.transport import Transport
from mindnlp_dp.runtime.arrays import dtype_name

LEVELS = ("auto", "all", "setup")

OPS = ("sum", "mean", "max", "min")

TYPES = (
    "float64", "float32", "float16", "bfloat16", "int8", "int16", "int32", "int64",
    "uint8", "uint16", "uint32", "uint64", "bool",
)  # fmt: skip


class Ranks(Protocol):
    """An object that knows its rank and the number of ranks, such as a process group."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def label(self) -> str: ...


def check_level(checks: str) -> None:
    """Raise ValueError unless ``checks`` is a known level."""
    if checks not in LEVELS:
        raise ValueError(f"checks must be one of {', '.join(map(repr, LEVELS))}, got {checks!r}")


def check_rank(name: str, value: int, ranks: Ranks) -> str:
    """Return the argument as messages show it; raise ValueError if it is not a rank."""
    if not 0 <= value < ranks.world_size:
        raise ValueError(f"{name} must be a rank from 0 to {ranks.world_size - 1}, got {value} on rank {ranks.label()}")
    return f"{name}={value}"


def check_peer(name: str, value: int, ranks: Ranks) -> None:
    """Raise ValueError unless ``value`` is the number of another rank."""
    check_rank(name, value, ranks)
    if value == ranks.rank:
        raise ValueError(f"{name} must be another rank, got {value} on rank {ranks.label()} itself")


def check_op(x: Any, op: str, rank: str) -> str:
    """Return ``op``; raise ValueError or TypeError if ``x`` cannot be reduced by it."""
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}, got {op!r} on rank {rank}")
    if op == "mean" and "float" not in dtype_name(x):
        raise TypeError(
            f"the mean of {dtype_name(x)} would be rounded (rank {rank}); "
            "convert to float32 first, or use op='sum' and divide"
        )
    return op


def checked_array(x: Any, rank: str) -> Any:
    """Return ``x``, a NumPy scalar as a 0-dimensional array; raise TypeError if no transport can move it."""
    if isinstance(x, np.generic):
        x = np.asarray(x)
    # Tensors are recognized by asnumpy, because MindSpore need not be installed.
    is_array = isinstance(x, np.ndarray) or hasattr(x, "asnumpy")
    if not is_array or dtype_name(x) not in TYPES:
        what = dtype_name(x) if is_array else type(x).__name__
        raise TypeError(
            f"expected a NumPy array or a MindSpore tensor of {', '.join(TYPES)}; got {what} on rank {rank}. "
            "Send other objects with broadcast_object and all_gather_object"
        )
    return x


def numel(x: Any) -> int:
    """Return the number of elements of an array or a tensor."""
    return math.prod(x.shape)


def describe(x: Any) -> str:
    """Return the shape and type of an array or a tensor, for messages."""
    return f"{dtype_name(x)} of shape {tuple(x.shape)}"


# The limit of NumPy 1.
_MOST_DIMENSIONS = 32

_CANNOT_BE_SENT = -1


def message_header(x: Optional[Any]) -> np.ndarray:
    """Return a message's type, number of dimensions and shape in a fixed number of int64.

    None stands for a message that cannot be sent.

    >>> described_by(message_header(np.zeros((2, 3), np.int8)))
    ((2, 3), 'int8')
    """
    header = np.full(2 + _MOST_DIMENSIONS, _CANNOT_BE_SENT, np.int64)
    if x is not None:
        header[: 2 + len(x.shape)] = TYPES.index(dtype_name(x)), len(x.shape), *x.shape
    return header


def described_by(header: np.ndarray, src: str = "0") -> tuple[tuple[int, ...], str]:
    """Return the shape and type of the message that ``header`` announces.

    Raises:
        MissingMessageError: rank ``src`` could not send its message.
    """
    kind, num_dimensions = header[:2].tolist()
    if kind == _CANNOT_BE_SENT:
        raise MissingMessageError(f"recv: rank {src} could not send its message; its own error says why")
    return tuple(header[2 : 2 + num_dimensions].tolist()), TYPES[kind]


@functools.lru_cache(maxsize=1024)
def _code_of(call: str) -> int:
    return int.from_bytes(hashlib.blake2b(call.encode(), digest_size=7).digest(), "big")


def check_agreement(transport: Transport, call: str, *arguments: str, wrong: Optional[Exception] = None) -> None:
    """Raise an error on every rank unless all ranks make this call, with these arguments.

    Libraries match different collectives with each other, or hang. ``wrong`` is the error that this rank's own
    arguments should raise: this rank raises it, and the others raise the same kind, with this rank's name.

    Raises:
        RuntimeError: the calls differ; ``wrong`` is raised as it is.
    """
    mine = f"{call}({', '.join(arguments)})"
    if transport.world_size > 1 and not transport.all_equal(_code_of(mine)):
        everyone = transport.all_gather_object((mine, report_of(wrong)))
        raise_reported([report for _, report in everyone], wrong, call, transport.label)
        calls = "; ".join(f"rank {transport.label(rank)}: {theirs}" for rank, (theirs, _) in enumerate(everyone))
        raise RuntimeError(
            f"the ranks do not agree on a collective: {calls}. Every rank must make the same calls, "
            "in the same order, with the same shapes and types"
        )
    if wrong is not None:
        raise wrong


# An error of one rank is raised on all ranks.

ReportedError = Optional[tuple[type[Exception], str]]


def report_of(error: Optional[Exception]) -> ReportedError:
    """Return an error's type and message; RuntimeError for a type that cannot be pickled, such as a local class."""
    if error is None:
        return None
    try:
        pickle.dumps(type(error))
    except (pickle.PicklingError, AttributeError):
        return RuntimeError, str(error)
    return type(error), str(error)


def raise_reported(
    reports: Sequence[ReportedError], mine: Optional[Exception], doing: str, label: Callable[[int], str]
) -> None:
    """Raise this rank's own error if it has one, else the first error that another rank reports, with its rank."""
    if mine is not None:
        raise mine
    for rank, report in enumerate(reports):
        if report is not None:
            kind, message = report
            try:
                remote = kind(f"{doing} failed on rank {label(rank)}: {message}")
            except TypeError:
                remote = RuntimeError(f"{doing} failed on rank {label(rank)}: {kind.__name__}: {message}")
            raise remote
