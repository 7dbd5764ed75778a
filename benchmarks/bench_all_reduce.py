#!/usr/bin/env python3
"""Time all-reduce of float32 between two ranks on one host, from 4 B to 512 MB, in ours and in other libraries.

    python benchmarks/bench_all_reduce.py --json outputs/bench_all_reduce.json

Every library is called as its users call it, and returns a new array: ``group.all_reduce`` under MPI, with its checks;
OpenMPI's ``Allreduce`` through mpi4py; MindSpore's MCCL through MindSpore; PyTorch's gloo. For comparison, both ranks
copy an array into existing memory at the same time. Jobs run in turns; medians are printed.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from typing import Any, Callable

import numpy as np
from common import Job, gloo, in_turns, job_of, machine, median_ratio, median_seconds, print_table, run_benchmark

SIZES = [4, 1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28, 1 << 29]
# MCCL needs a second for 128 MB.
LARGEST_FOR_MCCL = 1 << 26
NAMES = {"ours": "ours (MPI)", "openmpi": "OpenMPI", "mccl": "MCCL", "gloo": "gloo", "copy": "one copy"}


def repeats_for(num_bytes: int) -> int:
    return max(5, min(200, (1 << 25) // num_bytes))


def measure_ours(_: argparse.Namespace) -> dict[str, Any]:
    from mpi4py import MPI

    import mindnlp_dp as dp

    group, comm = dp.init_process_group("mpi"), MPI.COMM_WORLD
    seconds: dict[str, dict[int, float]] = {"ours": {}, "openmpi": {}, "copy": {}}
    for num_bytes in SIZES:
        x = np.random.rand(num_bytes // 4).astype(np.float32)
        kept = np.empty_like(x)

        def openmpi(x: np.ndarray = x) -> np.ndarray:
            out = np.empty_like(x)
            comm.Allreduce(x, out)
            return out

        calls: dict[str, Callable[[], Any]] = {
            "ours": partial(group.all_reduce, x),
            "openmpi": openmpi,
            "copy": partial(np.copyto, kept, x),
        }
        for name, call in calls.items():
            seconds[name][num_bytes] = median_seconds(comm.Barrier, call, repeats_for(num_bytes))
    return seconds


def measure_mccl(_: argparse.Namespace) -> dict[str, Any]:
    import mindspore
    from mindspore.mint import distributed

    import mindnlp_dp as dp

    dp.init_process_group("mindspore")
    seconds: dict[str, dict[int, float]] = {"mccl": {}}
    one = mindspore.Tensor(np.zeros(1, np.float32))

    def barrier() -> None:
        distributed.all_reduce(one)
        one.asnumpy()

    for num_bytes in (size for size in SIZES if size <= LARGEST_FOR_MCCL):
        x = mindspore.Tensor(np.random.rand(num_bytes // 4).astype(np.float32))

        def call(x: Any = x) -> None:
            out = x.copy()
            distributed.all_reduce(out)
            out.asnumpy()

        seconds["mccl"][num_bytes] = median_seconds(barrier, call, min(20, repeats_for(num_bytes)))
    return seconds


def measure(args: argparse.Namespace) -> dict[str, Any]:
    jobs: dict[str, Job] = {
        "ours": (job_of(__file__, "ours"), {}),
        "mccl": (job_of(__file__, "mccl", backend="mindspore"), {}),
    }
    if args.torch_python:
        jobs["gloo"] = (gloo(args.torch_python, "all_reduce"), {})
    runs: dict[str, list[dict[str, float]]] = {}
    for results in in_turns(jobs, args.repeats).values():
        for result in results:
            for name, seconds in result.items():
                runs.setdefault(name, []).append(seconds)
    medians = {
        name: {int(size): statistics.median(run[size] for run in all_runs) for size in all_runs[0]}
        for name, all_runs in runs.items()
    }
    ratios = {s: median_ratio(*([run[str(s)] for run in runs[name]] for name in ("openmpi", "ours"))) for s in SIZES}
    columns = [name for name in NAMES if name in medians]
    print(f"{machine()}; 2 ranks, medians of {args.repeats} jobs, microseconds")
    rows = [
        [size, *(f"{1e6 * medians[n][size]:.1f}" if size in medians[n] else "" for n in columns), f"{ratios[size]:.2f}"]
        for size in SIZES
    ]
    print_table(["bytes", *(NAMES[name] for name in columns), "OpenMPI / ours"], rows)
    return {"runs": runs, "seconds": medians, "ratios": {"openmpi_over_ours": ratios}}


if __name__ == "__main__":
    run_benchmark(__doc__, measure, {"ours": measure_ours, "mccl": measure_mccl}, repeats=3, torch=True)
