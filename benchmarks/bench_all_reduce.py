#!/usr/bin/env python3
"""Time all-reduce of float32 between two ranks on one host, from 4 B to 512 MB, in ours and in other libraries.

    python benchmarks/bench_all_reduce.py --json outputs/bench_all_reduce.json

Every library is called as its users call it, and returns a new array: ``group.all_reduce`` under MPI, with its checks;
OpenMPI's ``Allreduce`` through mpi4py; MindSpore's MCCL through MindSpore; PyTorch's gloo. For comparison, both ranks
copy an array into existing memory at the same time. Jobs run in turns; medians are printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any, Callable

import numpy as np
from common import TORCH_HINT, has_torch, launched, machine, median_seconds, run_job, write_json

SIZES = [4, 1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28, 1 << 29]
# MCCL needs a second for 128 MB.
LARGEST_FOR_MCCL = 1 << 26
NAMES = {"ours": "ours (MPI)", "openmpi": "OpenMPI", "mccl": "MCCL", "gloo": "gloo", "copy": "one copy"}


def repeats_for(num_bytes: int) -> int:
    return max(5, min(200, (1 << 25) // num_bytes))


def measure_ours() -> dict[str, Any]:
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
    return seconds if group.is_main else {}


def measure_mccl() -> dict[str, Any]:
    import mindspore
    from mindspore import communication
    from mindspore.mint import distributed

    import mindnlp_dp as dp

    group = dp.init_process_group("mindspore")
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
    return seconds if communication.get_rank() == 0 and group.is_main else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="jobs of every kind")
    parser.add_argument("--torch-python", default=sys.executable, help="a Python that has PyTorch")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.kind:
        kinds: dict[str, Callable[[], dict[str, Any]]] = {"ours": measure_ours, "mccl": measure_mccl}
        measured = kinds[args.kind]()
        if measured:
            args.write.write_text(json.dumps(measured))
        return

    jobs = {"ours": [*launched("mpi"), __file__, "--kind", "ours"]}
    jobs["mccl"] = [*launched("mindspore"), __file__, "--kind", "mccl"]
    if has_torch(args.torch_python):
        jobs["gloo"] = [args.torch_python, str(Path(__file__).with_name("gloo.py")), "--kind", "all_reduce"]
    else:
        print(TORCH_HINT)
    runs: dict[str, list[dict[str, float]]] = {}
    for _ in range(args.repeats):
        for command in jobs.values():
            for name, seconds in run_job(command).items():
                runs.setdefault(name, []).append(seconds)
    medians = {
        name: {int(size): statistics.median(run[size] for run in all_runs) for size in all_runs[0]}
        for name, all_runs in runs.items()
    }
    columns = [name for name in NAMES if name in medians]
    print(f"{machine()}; 2 ranks, medians of {args.repeats} jobs, microseconds")
    print(f"{'bytes':>12}" + "".join(f"{NAMES[name]:>14}" for name in columns) + f"{'OpenMPI / ours':>16}")
    ratios = {}
    for size in SIZES:
        ratios[size] = round(statistics.median(
            openmpi[str(size)] / ours[str(size)] for openmpi, ours in zip(runs["openmpi"], runs["ours"])
        ), 3)  # fmt: skip
        cells = "".join(f"{1e6 * medians[n][size]:14.1f}" if size in medians[n] else f"{'':>14}" for n in columns)
        print(f"{size:12}{cells}{ratios[size]:16.2f}")
    numbers = {"machine": machine(), "runs": runs, "seconds": medians, "ratios": {"openmpi_over_ours": ratios}}
    write_json(args.json, numbers)


if __name__ == "__main__":
    main()
