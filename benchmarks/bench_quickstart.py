#!/usr/bin/env python3
"""Measure the quickstart's training speed: MindSpore's defaults, one tuned process with our kernels, two ranks.

    python benchmarks/bench_quickstart.py --json outputs/bench_quickstart.json
    python benchmarks/bench_quickstart.py --python .venv/bin/python .venv-mindspore-2.10.0/bin/python

Runs scripts/finetune.py with the same batch size per rank (64 by default) in each setting, several times in turns, and
prints the median samples per second and their ratios. The first updates, in which MindSpore compiles its kernels, count
in every setting. --python names the interpreters of several environments; each is compared with the first.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import machine, on_one_core, print_table, run_benchmark, run_finetune


def settings(python: str) -> dict[str, tuple[list[str], int, dict[str, str]]]:
    """Return for each setting the command before the script, the number of ranks and further settings."""
    # Use the programs of this interpreter's environment, such as mpirun, not those of the current one.
    path = ["env", f"PATH={Path(python).parent}:{os.environ['PATH']}"]
    launch = [*path, python, "-m", "mindnlp_dp", "run", "--nproc", "2", "--backend"]
    return {
        "one process, MindSpore's defaults": ([*path, python], 1, {"tune_runtime": "false"}),
        "one process, tuned, bound to one core": ([*path, *on_one_core(python)], 1, {}),
        "two ranks, MPI": ([*launch, "mpi"], 2, {}),
        "two ranks, MCCL": ([*launch, "mindspore"], 2, {}),
    }


def libraries(python: str) -> str:
    """Return the versions of MindNLP, MindSpore and Python of an interpreter, in one line."""
    ask = "import platform; from importlib.metadata import version; print(version('mindnlp'), version('mindspore'), "
    ask += "platform.python_version())"
    found = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.split()
    return "MindNLP {}, MindSpore {}, {}".format(*found)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    pythons = {libraries(python): os.path.abspath(python) for python in args.python}
    if len(pythons) < len(args.python):
        sys.exit(f"environments have the same versions: {', '.join(pythons)}")
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {name: {} for name in pythons}
    for _ in range(args.repeats):
        for name, python in pythons.items():
            for setting, (command, ranks, more) in settings(python).items():
                report = run_finetune(command, max_steps=args.steps, global_batch_size=args.batch * ranks, **more)
                runs[name].setdefault(setting, []).append(report)

    def medians(reports: list[dict[str, Any]]) -> dict[str, float]:
        names = {"samples_per_second": "train_samples_per_second", "gradient_sync_share": "gradient_sync_share"}
        return {name: statistics.median(report[key] for report in reports) for name, key in names.items()}

    table = {name: {setting: medians(reports) for setting, reports in runs[name].items()} for name in pythons}
    print(f"{machine()}; {args.batch} samples per rank, {args.steps} updates, median of {args.repeats}")
    first = next(iter(table.values()))
    for name, of_python in table.items():
        default, tuned, *_ = (row["samples_per_second"] for row in of_python.values())
        rows = []
        for setting, row in of_python.items():
            rate = row["samples_per_second"]
            ratios = (rate / default, rate / tuned, rate / first[setting]["samples_per_second"])
            rows.append([setting, f"{rate:.0f}", *(f"{r:.2f}" for r in ratios), f"{row['gradient_sync_share']:.3f}"])
        print_table([name, "samples/s", "x defaults", "x tuned", "x first", "sync share"], rows)
    default, tuned, mpi, _ = (row["samples_per_second"] for row in first.values())
    ratios_of_first = {
        "one_core_over_defaults": round(tuned / default, 3),
        "two_ranks_over_defaults": round(mpi / default, 3),
        "two_ranks_over_one_core": round(mpi / tuned, 3),
    }
    return {"batch_per_rank": args.batch, "steps": args.steps, "table": table, "ratios": ratios_of_first}


if __name__ == "__main__":
    run_benchmark(
        __doc__, measure, {}, repeats=3,
        batch={"type": int, "default": 64, "help": "samples per rank in an update"},
        steps={"type": int, "default": 60, "help": "updates a run"},
        python={"nargs": "+", "default": [sys.executable], "help": "interpreters of the environments"},
    )  # fmt: skip
