#!/usr/bin/env python3
"""Time clipping and AdamW for a BERT with 22.7 million parameters: MindNLP's, ours on one and two ranks, PyTorch's.

    python benchmarks/bench_update.py --json outputs/bench_update.json

The update begins when all gradients exist, on two ranks as means; their norm is above 1.0, to which they are clipped.
All ranks begin together, and the slowest counts. Communication within the update (of a norm, of weights) counts; the
gradient exchange before it has its own column. Every process has one core. PyTorch's AdamW is the fused one, its
fastest on a CPU; two ranks shard it over gloo by ZeroRedundancyOptimizer (parameters_as_bucket_view=True, which is
three times as fast as without). The variants of a job alternate update by update, each with its own weights. Jobs run
in turns; medians are printed. With --optimizer muon, the first row is Muon's own step, and
PyTorch's is torch.optim.Muon for matrices with the fused AdamW for the rest; its ranks do not shard it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any, Callable

import numpy as np
from common import Job, gloo, in_turns, job_of, machine, median_ratio, on_one_core, print_table, run_benchmark
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


def updates(variant: str, group: Any, kind: str) -> Callable[[], dict[str, float]]:
    """Return a function that does one update and returns the seconds of its stages on this rank."""
    import mindspore
    from mindnlp.core import nn, optim

    import mindnlp_dp as dp

    model = make_bert()
    dp.broadcast_parameters(model)
    parameters = list(model.parameters())
    optimizer = optim.AdamW(parameters, lr=LEARNING_RATE)
    if kind == "muon":
        from mindnlp_dp.optim import Muon, muon_groups

        optimizer = Muon(muon_groups(model), lr=LEARNING_RATE, adjust_lr_fn="match_rms_adamw")
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


def stages_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of every stage of every update on the slowest rank."""
    import mindnlp_dp as dp

    group = dp.init_process_group()
    measured: dict[str, dict[str, list[float]]] = {name: {} for name in args.variants}
    calls = {name: updates(name, group, args.optimizer) for name in args.variants}
    for number in range(WARM_UP + args.updates):
        for name, call in calls.items():
            taken = call()
            taken["both"] = taken["clip"] + taken["update"]
            slowest = group.all_reduce(np.array(list(taken.values())), op="max")
            for stage, seconds in zip(taken, slowest.tolist()) if number >= WARM_UP else ():
                measured[name].setdefault(stage, []).append(seconds)
    return measured


def measure(args: argparse.Namespace) -> dict[str, Any]:
    flags = ["--updates", args.updates, "--optimizer", args.optimizer, "--variants"]
    _, *one = job_of(__file__, "stages", 1, *flags, OWN, "auto")
    jobs: dict[str, Job] = {
        "one": ([*on_one_core(), *one], {}),
        "two": (job_of(__file__, "stages", 2, *flags, "zero_stage=0", "auto"), {}),
    }
    if args.torch_python:
        job = "update muon" if args.optimizer == "muon" else "update"
        jobs["torch_one"] = (gloo(args.torch_python, job, 1), {})
        jobs["torch_two"] = (gloo(args.torch_python, job, 2), {})
    results = in_turns(jobs, args.repeats)
    stages = ("exchange", "clip", "update", "both")
    runs = {
        row: {stage: [statistics.median(done[variant][stage]) for done in results[job]] for stage in stages}
        for row, (job, variant) in ROWS.items()
        if job in jobs
    }
    medians = {
        row: {stage: statistics.median(taken) for stage, taken in of_row.items()} for row, of_row in runs.items()
    }

    def ratio(above: str, below: str) -> float:
        return median_ratio(runs[above]["both"], runs[below]["both"])

    own, ours_one, _, ours_two, *with_torch = runs
    print(f"{machine()}; BERT, 22.7 million parameters, medians of {args.repeats} jobs, milliseconds")
    rows = [
        [row, *(f"{1e3 * times[stage]:.1f}" if times[stage] else "" for stage in stages), f"{ratio(own, row):.2f}"]
        for row, times in medians.items()
    ]
    print_table(["", "exchange", "clip", "update", "clip + update", "MindNLP / this"], rows)
    ratios = {
        "mindnlp_over_ours_one_rank": ratio(own, ours_one),
        "mindnlp_over_ours_two_ranks": ratio(own, ours_two),
    }
    if with_torch:
        ratios["torch_over_ours_one_rank"] = ratio(with_torch[0], ours_one)
        ratios["torch_over_ours_two_ranks"] = ratio(with_torch[1], ours_two)
    return {"runs": runs, "seconds": medians, "ratios": ratios}


if __name__ == "__main__":
    updates_flag = {"type": int, "default": 15, "help": "measured updates of a job"}
    run_benchmark(
        __doc__,
        measure,
        {"stages": stages_of},
        repeats=3,
        torch=True,
        updates=updates_flag,
        variants={"nargs": "+"},
        optimizer={"choices": ("adamw", "muon"), "default": "adamw", "help": "which to time"},
    )
