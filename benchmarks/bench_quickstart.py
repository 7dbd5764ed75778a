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


def settings(python: str, cores: list[int]) -> dict[str, tuple[list[str], int, list[str]]]:
    """Return for each setting the command before the script, the number of ranks and further flags."""
    launch = [python, "-m", "mindnlp_dp", "run", "--nproc", "2", "--backend"]
    return {
        "one process, MindSpore's defaults": ([python], 1, ["--tune-runtime", "false"]),
        "one process, tuned, bound to one core": (["taskset", "-c", str(cores[0]), python], 1, []),
        "two ranks, MPI": ([*launch, "mpi"], 2, []),
        "two ranks, MCCL": ([*launch, "mindspore"], 2, []),
    }


def libraries(python: str) -> str:
    """Return the versions of MindNLP, MindSpore and Python of an interpreter, in one line."""
    ask = "import platform; from importlib.metadata import version; print(version('mindnlp'), version('mindspore'), "
    ask += "platform.python_version())"
    found = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.split()
    return "MindNLP {}, MindSpore {}, {}".format(*found)


def measure(command: list[str], ranks: int, flags: list[str], batch: int, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        log = ["--log-dir", f"{folder}/logs"] if "mindnlp_dp" in command else []
        job = [*command, *log, SCRIPT, *flags, "--max-steps", str(steps), "--output-dir", folder]
        # Use the programs of this interpreter's environment, such as mpirun, not those of the current one.
        environment = {
            **os.environ,
            "PATH": f"{Path(next(x for x in command if 'python' in x)).parent}:{os.environ['PATH']}",
        }
        done = subprocess.run(
            [*job, "--global-batch-size", str(batch * ranks)], capture_output=True, text=True, env=environment
        )
        if done.returncode != 0:
            sys.exit(f"{' '.join(job)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        return json.loads(Path(folder, "report.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64, help="samples a rank in an update")
    parser.add_argument("--steps", type=int, default=60, help="updates a run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="interpreters of the environments")
    args = parser.parse_args()

    cores = sorted(os.sched_getaffinity(0))
    pythons = {libraries(python): os.path.abspath(python) for python in args.python}
    if len(pythons) < len(args.python):
        parser.error(f"environments have the same versions: {', '.join(pythons)}")
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {name: {} for name in pythons}
    for _ in range(args.repeats):
        for name, python in pythons.items():
            for setting, (command, ranks, flags) in settings(python, cores).items():
                report = measure(command, ranks, flags, args.batch, args.steps)
                runs[name].setdefault(setting, []).append(report)

    def median(reports: list[dict[str, Any]], what: str) -> float:
        return statistics.median(report[what] for report in reports)

    rows: list[dict[str, Any]] = [
        {
            "libraries": name,
            "setting": setting,
            "samples_per_second": median(reports, "train_samples_per_second"),
            "gradient_sync_share": median(reports, "gradient_sync_share"),
        }
        for name, of_python in runs.items()
        for setting, reports in of_python.items()
    ]
    print(f"{machine()}; {args.batch} samples a rank, {args.steps} updates, median of {args.repeats}")
    first = {row["setting"]: row["samples_per_second"] for row in rows[: len(rows) // len(pythons)]}
    for name in pythons:
        mine = [row for row in rows if row["libraries"] == name]
        default, tuned = (row["samples_per_second"] for row in mine[:2])
        print(f"\n{name:40}{'samples/s':>10}{'x defaults':>12}{'x tuned':>10}{'x first':>10}{'sync share':>12}")
        for row in mine:
            rate = row["samples_per_second"]
            ratios = f"{rate / default:12.2f}{rate / tuned:10.2f}{rate / first[row['setting']]:10.2f}"
            print(f"{row['setting']:40}{rate:10.0f}{ratios}{row['gradient_sync_share']:12.3f}")
    default, tuned, mpi = list(first.values())[:3]
    numbers = {
        "machine": machine(),
        "batch_per_rank": args.batch,
        "steps": args.steps,
        "rows": rows,
        "ratios": {
            "one_core_over_defaults": round(tuned / default, 3),
            "two_ranks_over_defaults": round(mpi / default, 3),
            "two_ranks_over_one_core": round(mpi / tuned, 3),
        },
    }
    write_json(args.json, numbers)


if __name__ == "__main__":
    main()
