#!/usr/bin/env python3
"""Time clipping and AdamW for a BERT with 22.7 million parameters: MindNLP's, ours on one and two ranks, PyTorch's.

    python benchmarks/bench_update.py --json outputs/bench_update.json

The update begins when all gradients exist, on two ranks as means; their norm is above 1.0, to which they are clipped.
All ranks begin together, and the slowest counts. Communication within the update (of a norm, of weights) counts; the
gradient exchange before it has its own column. Every process has one core. PyTorch's AdamW is the fused one, its
fastest on a CPU; two ranks shard it over gloo by ZeroRedundancyOptimizer (parameters_as_bucket_view=True, which is
three times as fast as without). The variants of a job alternate update by update, each with its own weights. Jobs run
in turns; medians are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Callable

import numpy as np
from common import TORCH_HINT, has_torch, launched, machine, median_ratio, run_job, write_json
from train_bert import LEARNING_RATE, MAX_NORM, OWN, make_bert, update_stages

WARM_UP = 3
# The standard deviation of a rank's gradients: with 22.7 million elements their norm is 4.8 on one rank.
DEVIATION = 1e-3
# The rows of the table: the job, and the name of the variant in it.
ROWS = {
    "MindNLP, one process": ("one", OWN),
    "ours, one rank": ("one", "auto"),
    "ours, two ranks, zero_stage=0": ("two", "zero_stage=0"),
    "ours, two ranks": ("two", "auto"),
    "PyTorch, one process": ("torch_one", "update"),
    "PyTorch, two ranks, ZeroRedundancyOptimizer": ("torch_two", "update"),
}


def updates(variant: str, group: Any) -> Callable[[], dict[str, float]]:
    """Return a function that does one update and returns the seconds of its stages on this rank."""
    import mindspore
    from mindnlp.core import nn, optim

    import mindnlp_dp as dp

    model = make_bert()
    dp.broadcast_parameters(model)
    parameters = list(model.parameters())
    optimizer = optim.AdamW(parameters, lr=LEARNING_RATE)
    rng = np.random.default_rng(group.rank)
    arrays = [rng.standard_normal(p.shape, np.float32) * np.float32(DEVIATION) for p in parameters]

    def own() -> dict[str, float]:
        for parameter, array in zip(parameters, arrays):
            parameter.grad = mindspore.Tensor(array)
        times = [time.perf_counter()]
        nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        times.append(time.perf_counter())
        optimizer.step()
        times.append(time.perf_counter())
        return {"exchange": 0.0, "clip": times[1] - times[0], "update": times[2] - times[1]}

    if variant == OWN:
        return own
    synchronizer = dp.GradientSynchronizer(parameters, group, overlap=False)
    stages = update_stages(optimizer, synchronizer, "auto" if variant == "auto" else 0)

    def ours() -> dict[str, float]:
        synchronizer.accumulate([mindspore.Tensor(array) for array in arrays], 1.0)
        group.barrier()
        began = time.perf_counter()
        seconds: dict[str, float] = {}
        for stage in stages():
            seconds[stage] = time.perf_counter() - began
            if stage == "exchange":
                group.barrier()
            began = time.perf_counter()
        seconds["update"] += seconds.pop("finish")
        return seconds

    return ours


def measure(variants: list[str], num_updates: int) -> dict[str, Any]:
    """Return the seconds of every stage of every update on the slowest rank."""
    import mindnlp_dp as dp

    group = dp.init_process_group()
    measured: dict[str, dict[str, list[float]]] = {name: {} for name in variants}
    calls = {name: updates(name, group) for name in variants}
    for number in range(WARM_UP + num_updates):
        for name, call in calls.items():
            taken = call()
            taken["both"] = taken["clip"] + taken["update"]
            slowest = group.all_reduce(np.array(list(taken.values())), op="max")
            for stage, seconds in zip(taken, slowest.tolist()) if number >= WARM_UP else ():
                measured[name].setdefault(stage, []).append(seconds)
    return measured if group.is_main else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="jobs of every kind")
    parser.add_argument("--updates", type=int, default=15, help="measured updates of a job")
    parser.add_argument("--torch-python", default=sys.executable, help="a Python that has PyTorch")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--variants", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.variants:
        measured = measure(args.variants, args.updates)
        if measured:
            args.write.write_text(json.dumps(measured))
        return

    core = str(min(os.sched_getaffinity(0)))
    script = [__file__, "--updates", str(args.updates), "--variants"]
    torch = [args.torch_python, str(Path(__file__).with_name("gloo.py")), "--kind", "update", "--nproc"]
    jobs = {
        "one": ["taskset", "-c", core, sys.executable, *script, OWN, "auto"],
        "two": [*launched("mpi"), *script, "zero_stage=0", "auto"],
    }
    if has_torch(args.torch_python):
        jobs.update(torch_one=[*torch, "1"], torch_two=[*torch, "2"])
    else:
        print(TORCH_HINT)
    rows = {row: place for row, place in ROWS.items() if place[0] in jobs}
    runs: dict[str, dict[str, list[float]]] = {row: {} for row in rows}
    for _ in range(args.repeats):
        results = {name: run_job(command) for name, command in jobs.items()}
        for row, (job, variant) in rows.items():
            for stage, seconds in results[job][variant].items():
                runs[row].setdefault(stage, []).append(statistics.median(seconds))

    stages = ("exchange", "clip", "update", "both")
    medians = {row: {stage: statistics.median(runs[row][stage]) for stage in stages} for row in rows}

    def ratio(above: str, below: str) -> float:
        return median_ratio(runs[above]["both"], runs[below]["both"])

    own, ours_one, _, ours_two, *with_torch = rows
    print(f"{machine()}; BERT, 22.7 million parameters, medians of {args.repeats} jobs, milliseconds")
    print(f"{'':46}{'exchange':>10}{'clip':>8}{'update':>8}{'clip + update':>15}{'MindNLP / this':>16}")
    for row, times in medians.items():
        exchange = f"{1e3 * times['exchange']:.1f}" if times["exchange"] else ""
        cells = f"{exchange:>10}{1e3 * times['clip']:8.1f}{1e3 * times['update']:8.1f}"
        print(f"{row:46}{cells}{1e3 * times['both']:15.1f}{ratio(own, row):16.2f}")
    ratios = {
        "mindnlp_over_ours_one_rank": ratio(own, ours_one),
        "mindnlp_over_ours_two_ranks": ratio(own, ours_two),
    }
    if with_torch:
        ratios["torch_over_ours_one_rank"] = ratio(with_torch[0], ours_one)
        ratios["torch_over_ours_two_ranks"] = ratio(with_torch[1], ours_two)
    write_json(args.json, {"machine": machine(), "runs": runs, "seconds": medians, "ratios": ratios})


if __name__ == "__main__":
    main()
