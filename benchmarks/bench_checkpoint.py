#!/usr/bin/env python3
"""Time for which a checkpoint of RoBERTa-base stops training: by rank 0, by every rank, and by their threads.

    python benchmarks/bench_checkpoint.py --json outputs/bench_checkpoint.json

A checkpoint holds 125 million weights and AdamW's state, 1.5 GB. Training is one row of 8 tokens on each rank; two
ranks shard the state (ZeRO). After each checkpoint the benchmark waits until it is on the disk. The first checkpoint
of a job does not count; medians are printed.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from typing import Any

import numpy as np
from common import Job, in_turns, job_of, machine, median_ratio, print_table, run_benchmark

CHECKPOINTS = 4


def save(args: argparse.Namespace) -> dict[str, list[float]]:
    """Train with checkpoints; return the seconds for which each one stopped training, and until it was on the disk."""
    import mindnlp_dp as dp

    group = dp.init_process_group()
    from bench_memory import make_roberta

    model = make_roberta(12, 768)
    rng = np.random.default_rng(0)
    num_rows = (CHECKPOINTS + 1) * group.world_size
    rows = [{"input_ids": rng.integers(5, 1000, 8), "labels": 0} for _ in range(num_rows)]
    stalls: list[float] = []
    complete: list[float] = []

    class Timed(dp.DataParallelTrainer):
        def write_checkpoint(self, metrics: Any) -> None:
            began = time.perf_counter()
            super().write_checkpoint(metrics)
            stalls.append(time.perf_counter() - began)
            self.checkpoint_writer.wait()
            complete.append(time.perf_counter() - began)

    with contextlib.ExitStack() as stack:
        folder = group.run_on_rank0(lambda: stack.enter_context(tempfile.TemporaryDirectory(dir=".")), "a folder")
        settings = dp.DataParallelArguments(
            folder, per_device_train_batch_size=1, max_steps=CHECKPOINTS + 1, save_strategy="steps", save_steps=1,
            save_total_limit=1, async_save=args.asynchronous, sharded_checkpoints=args.sharded, disable_tqdm=True,
        )  # fmt: skip
        Timed(model, settings, train_dataset=rows).train()
    return {"stalls": stalls[1:], "complete": complete[1:]}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run all kinds of jobs, and print a table."""
    jobs: dict[str, Job] = {
        "one rank": (job_of(__file__, "save", 1), {}),
        "one rank, async_save": (job_of(__file__, "save", 1, "--asynchronous"), {}),
        "two ranks": (job_of(__file__, "save", 2), {}),
        "two ranks, async_save": (job_of(__file__, "save", 2, "--asynchronous"), {}),
        "two ranks, sharded_checkpoints": (job_of(__file__, "save", 2, "--sharded"), {}),
        "two ranks, both": (job_of(__file__, "save", 2, "--sharded", "--asynchronous"), {}),
    }
    found = {
        name: {key: [value for run in runs for value in run[key]] for key in ("stalls", "complete")}
        for name, runs in in_turns(jobs, args.repeats).items()
    }
    print(f"{machine()}; RoBERTa-base, checkpoints of 1.5 GB")
    print_table(
        ["", "training stops, s", "until it is on the disk, s"],
        [
            [name, *(f"{statistics.median(of[key]):.2f}" for key in ("stalls", "complete"))]
            for name, of in found.items()
        ],
    )
    ratios = {
        name: median_ratio(found[name]["stalls"], found[name.split(",")[0]]["stalls"]) for name in found if "," in name
    }
    for name, ratio in ratios.items():
        print(f"{name}: training stops for {ratio:.2f} of the time without it")
    return {"runs": found, "ratios": ratios}


if __name__ == "__main__":
    flag = {"action": "store_true"}
    run_benchmark(__doc__, measure, {"save": save}, repeats=2, asynchronous=flag, sharded=flag)
