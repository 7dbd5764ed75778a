#!/usr/bin/env python3
"""Find a good bucket size for this machine: measure the time of a gradient exchange with several sizes.

    python benchmarks/bench_bucket_cap.py                          # a BERT of 22.7 M parameters, two ranks over MPI
    python benchmarks/bench_bucket_cap.py --backend mindspore

A good ``bucket_cap_mb`` is the smallest that is nearly as fast as the fastest: a smaller bucket is full sooner, so its
exchange overlaps more of the backward pass.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import common
import numpy as np
from bench_gradient_sync import shapes_of

CANDIDATES_MB = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 25.0)
_NEARLY = 1.05


def measure(repeats: int, compression: str) -> dict[str, Any]:
    """Return the exchange times of one window for each candidate, measured in turns, on the slowest rank."""
    import mindspore

    import mindnlp_dp as dp

    group = dp.init_process_group()
    rng = np.random.default_rng(group.rank)
    gradients = [mindspore.Tensor(rng.standard_normal(shape).astype(np.float32)) for shape in shapes_of("bert")]
    parameters = [gradient.copy() for gradient in gradients]
    seconds: dict[float, list[float]] = {cap: [] for cap in CANDIDATES_MB}
    for turn in range(repeats + 1):
        for cap in CANDIDATES_MB:
            sync = dp.GradientSynchronizer(
                parameters, group, bucket_cap_mb=cap, overlap=False, compression=compression or None
            )
            # The first window allocates the memory, so it does not count.
            sync(gradients)
            group.barrier()
            began = time.perf_counter()
            sync(gradients)
            if turn:
                seconds[cap].append(time.perf_counter() - began)
    return {str(cap): group.all_reduce(np.array(times), op="max").tolist() for cap, times in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--backend", choices=["mpi", "mindspore"], default="mpi")
    parser.add_argument("--compression", default="", choices=["", "fp16", "bf16"])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write:
        import mindnlp_dp as dp

        seconds = measure(args.repeats, args.compression)
        if dp.get_process_group().is_main:
            args.write.write_text(json.dumps(seconds))
        return
    flags = ["--repeats", str(args.repeats), *(["--compression", args.compression] if args.compression else [])]
    seconds = common.run_job([*common.launched(args.backend, args.nproc), __file__, *flags])
    medians = {float(cap): statistics.median(times) for cap, times in seconds.items()}
    fastest = min(medians.values())
    chosen = min(cap for cap, taken in medians.items() if taken <= _NEARLY * fastest)
    print(f"{common.machine()}; {args.nproc} ranks, {args.backend}; median of {args.repeats}")
    print(f"{'bucket_cap_mb':>14}{'exchange':>12}{'x fastest':>11}")
    for cap, taken in medians.items():
        print(f"{cap:14g}{1e3 * taken:9.1f} ms{taken / fastest:11.2f}{'  <- the smallest that does' * (cap == chosen)}")
    numbers = {"machine": common.machine(), "ranks": args.nproc, "backend": args.backend, "seconds": medians}
    common.write_json(args.json, {**numbers, "bucket_cap_mb": chosen})


if __name__ == "__main__":
    main()
