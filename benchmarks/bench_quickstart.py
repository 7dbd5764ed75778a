#!/usr/bin/env python3
"""The quickstart's training step: one process as MindSpore comes, one process tuned and with our kernels, two ranks.

    python benchmarks/bench_quickstart.py --json outputs/bench_quickstart.json

Runs scripts/finetune.py with the same batch a rank (64 by default) in each setting, in turn and
several times, and prints medians of the samples per second with their ratios. The first updates, in
which MindSpore compiles its kernels, count everywhere alike.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import machine, write_json

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = str(ROOT / "scripts" / "finetune.py")
LAUNCH = [sys.executable, "-m", "mindnlp_dp", "run"]


def settings(cores: list[int]) -> dict[str, tuple[list[str], int, list[str]]]:
    """Name: command in front of the script, ranks, further flags."""
    return {
        "one process, MindSpore's defaults": ([sys.executable], 1, ["--tune-runtime", "false"]),
        "one process, tuned, bound to one core": (["taskset", "-c", str(cores[0]), sys.executable], 1, []),
        "two ranks, MPI": ([*LAUNCH, "--nproc", "2", "--backend", "mpi"], 2, []),
        "two ranks, MCCL": ([*LAUNCH, "--nproc", "2", "--backend", "mindspore"], 2, []),
    }


def measure(command: list[str], ranks: int, flags: list[str], batch: int, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        launched = command[1:4] == LAUNCH[1:4]
        log = ["--log-dir", f"{folder}/logs"] if launched else []
        job = [*command, *log, SCRIPT, *flags, "--max-steps", str(steps), "--output-dir", folder]
        done = subprocess.run([*job, "--global-batch-size", str(batch * ranks)], capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{' '.join(job)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        return json.loads(Path(folder, "report.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64, help="samples a rank in an update")
    parser.add_argument("--steps", type=int, default=60, help="updates a run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    args = parser.parse_args()

    todo = settings(sorted(os.sched_getaffinity(0)))
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in todo}
    for _ in range(args.repeats):
        for name, (command, ranks, flags) in todo.items():
            runs[name].append(measure(command, ranks, flags, args.batch, args.steps))

    speed = {name: statistics.median(r["train_samples_per_second"] for r in reports) for name, reports in runs.items()}
    share = {name: statistics.median(r["gradient_sync_share"] for r in reports) for name, reports in runs.items()}
    default, tuned = (speed[name] for name in list(todo)[:2])
    print(f"{machine()}; {args.batch} samples a rank, {args.steps} updates, median of {args.repeats}")
    print(f"{'':40}{'samples/s':>10}{'x defaults':>12}{'x tuned':>10}{'sync share':>12}")
    for name in todo:
        rate = speed[name]
        print(f"{name:40}{rate:10.0f}{rate / default:12.2f}{rate / tuned:10.2f}{share[name]:12.3f}")
    numbers = {
        "machine": machine(),
        "batch_per_rank": args.batch,
        "steps": args.steps,
        "rows": [
            {"setting": name, "samples_per_second": speed[name], "gradient_sync_share": share[name]} for name in todo
        ],
        "ratios": {
            "one_core_over_defaults": round(tuned / default, 3),
            "two_ranks_over_defaults": round(speed["two ranks, MPI"] / default, 3),
            "two_ranks_over_one_core": round(speed["two ranks, MPI"] / tuned, 3),
        },
    }
    write_json(args.json, numbers)


if __name__ == "__main__":
    main()
