"""This job compares every kind of collective with NumPy's answer, for ``mindnlp-dp doctor --devices``.

Every rank can compute what all ranks contribute, and so the expected result. Rank 0 prints one line of JSON: the
backend, each call and type with what was wrong with it on any rank, and the times of two large sums.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import mindnlp_dp as dp
from mindnlp_dp.communication.operations import Operation

TYPES = ("float32", "float16", "int32", "int64", "bool")
NUM_TRIES = 5
LARGE_MIB = (4, 64)

# The result of a call on this rank, and the expected one.
Answers = Callable[[], tuple[Any, Any]]


def calls(group: dp.ProcessGroup, dtype: str) -> Iterator[tuple[str, Answers]]:
    """Yield the name of each call, and a function that makes it with arrays of a type."""
    size, rank, last = group.world_size, group.rank, group.world_size - 1
    everyone = [(np.arange(size * 6).reshape(size, 6) % 5 + r).astype(dtype) for r in range(size)]
    mine, stacked = everyone[rank], np.stack(everyone)
    total = stacked.any(0) if dtype == "bool" else stacked.sum(0).astype(dtype)
    yield "all_reduce, sum", lambda: (group.all_reduce(mine), total)
    yield "all_reduce, max", lambda: (group.all_reduce(mine, "max"), stacked.max(0))
    yield "all_reduce, min", lambda: (group.all_reduce(mine, "min"), stacked.min(0))
    if dtype.startswith("float"):
        yield "all_reduce, mean", lambda: (group.all_reduce(mine, "mean"), stacked.mean(0, dtype=dtype))
    yield "reduce_scatter", lambda: (group.reduce_scatter(mine), total[rank])
    yield "broadcast", lambda: (group.broadcast(mine, last), everyone[last])
    yield "all_gather", lambda: (np.stack(group.all_gather(mine)), stacked)
    yield "scatter", lambda: (group.scatter(everyone if rank == last else None, last), mine)
    if not group.library_without(Operation.ALL_TO_ALL):
        columns = np.stack([each[rank] for each in everyone])
        yield "all_to_all", lambda: (group.all_to_all(mine, [1] * size)[0], columns)
    if not group.library_without(Operation.MESSAGES):
        yield "send and recv", lambda: (_passed_on(group, mine), everyone[(rank - 1) % size])


def _passed_on(group: dp.ProcessGroup, mine: np.ndarray) -> np.ndarray:
    """Pass an array to the next rank of a ring, and return the previous one's; rank 0 receives first."""
    following, previous = (group.rank + 1) % group.world_size, (group.rank - 1) % group.world_size
    if group.is_main:
        received: np.ndarray = group.recv(mine, previous)
        group.send(mine, following)
        return received
    group.send(mine, following)
    return group.recv(mine, previous)


def wrong_with(answers: Answers) -> str:
    """Make a call and return what is wrong with its result; "" if nothing is."""
    try:
        result, expected = answers()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    if np.shape(result) != np.shape(expected):
        return f"shape {np.shape(result)} instead of {np.shape(expected)}"
    differs = np.asarray(result) != np.asarray(expected)
    if not differs.any():
        return ""
    at = tuple(int(number) for number in np.argwhere(differs)[0])
    return f"{int(differs.sum())} of {differs.size} elements differ; at {at}: {result[at]} instead of {expected[at]}"


def run() -> None:
    """Make all calls on every rank, and print what was found on rank 0."""
    group = dp.init_process_group()
    if group.world_size > 1:
        # The first call of a device's library takes longer.
        group.all_reduce(np.ones(1, np.float32))
    found = []
    for dtype in TYPES:
        for call, answers in calls(group, dtype):
            everyone = group.all_gather_object(wrong_with(answers))
            wrong = [f"rank {rank}: {text}" for rank, text in enumerate(everyone) if text]
            found.append({"call": call, "dtype": dtype, "wrong": "; ".join(wrong)})
    milliseconds = {}
    for mebibytes in LARGE_MIB:
        ones, taken = np.ones(mebibytes << 18, np.float32), []
        for _ in range(NUM_TRIES):
            group.barrier()
            began = time.perf_counter()
            group.all_reduce(ones)
            taken.append(1e3 * (time.perf_counter() - began))
        milliseconds[mebibytes] = sorted(taken)[NUM_TRIES // 2]
    if group.is_main:
        print(json.dumps({"backend": group.backend, "calls": found, "milliseconds": milliseconds}), flush=True)


if __name__ == "__main__":
    run()
