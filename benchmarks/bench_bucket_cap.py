#!/usr/bin/env python3
"""Find a good bucket size for this machine: measure the time of a gradient exchange with several sizes.

    python benchmarks/bench_bucket_cap.py                          # a BERT of 22.7 M parameters, two ranks over MPI
    python benchmarks/bench_bucket_cap.py --backend mindspore

A good ``bucket_cap_mb`` is the smallest that is nearly as fast as the fastest: a smaller bucket is full sooner, so its
exchange overlaps more of the backward pass.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
from bench_gradient_sync import shapes_of
from common import job_of, machine, print_table, run_benchmark, run_job

CANDIDATES_MB = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 25.0)
_NEARLY = 1.05


def exchanges(args: argparse.Namespace) -> dict[str, Any]:
    """Return the exchange times of one update for each candidate, measured in turns, on the slowest rank."""
    import mindspore

    import mindnlp_dp as dp

    group = dp.init_process_group()
    rng = np.random.default_rng(group.rank)
    gradients = [mindspore.Tensor(rng.standard_normal(shape).astype(np.float32)) for shape in shapes_of("bert")]
    parameters = [gradient.copy() for gradient in gradients]
    seconds: dict[float, list[float]] = {cap: [] for cap in CANDIDATES_MB}
    for turn in range(args.repeats + 1):
        for cap in CANDIDATES_MB:
            sync = dp.GradientSynchronizer(
                parameters, group, bucket_cap_mb=cap, overlap=False, compression=args.compression or None
            )
            # The first update allocates the memory, so it does not count.
            sync(gradients)
            group.barrier()
            began = time.perf_counter()
            sync(gradients)
            if turn:
                seconds[cap].append(time.perf_counter() - began)
    return {str(cap): group.all_reduce(np.array(times), op="max").tolist() for cap, times in seconds.items()}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    flags = ["--repeats", args.repeats, *(["--compression", args.compression] if args.compression else [])]
    seconds = run_job(job_of(__file__, "exchanges", args.nproc, *flags, backend=args.backend))
    medians = {float(cap): statistics.median(times) for cap, times in seconds.items()}
    fastest = min(medians.values())
    chosen = min(cap for cap, taken in medians.items() if taken <= _NEARLY * fastest)
    print(f"{machine()}; {args.nproc} ranks, {args.backend}; median of {args.repeats}")
    rows = [
        [f"{cap:g}", f"{1e3 * taken:.1f} ms", f"{taken / fastest:.2f}", "<- the smallest that does" * (cap == chosen)]
        for cap, taken in medians.items()
    ]
    print_table(["bucket_cap_mb", "exchange", "x fastest", ""], rows)
    return {"ranks": args.nproc, "backend": args.backend, "seconds": medians, "bucket_cap_mb": chosen}


if __name__ == "__main__":
    run_benchmark(
        __doc__, measure, {"exchanges": exchanges}, repeats=9,
        nproc={"type": int, "default": 2, "help": "number of ranks"},
        backend={"choices": ["mpi", "mindspore"], "default": "mpi", "help": "of the launcher"},
        compression={"default": "", "choices": ["", "fp16", "bf16"], "help": "of the gradients"},
    )  # fmt: skip
