#!/usr/bin/env python3
"""Compare kernels of MindSpore, ours and PyTorch's on one core: the operators of a BERT, and complete training steps.

    python benchmarks/bench_kernels.py --json outputs/bench_kernels.json
    python benchmarks/bench_kernels.py --profile

The BERT has 22.7 million parameters and trains 32 sequences of 32 tokens per rank, with dropout. A step is forward,
backward, clipping and AdamW (train_bert.py). "as MindNLP does it" is one process tuned like ours, with MindSpore's
kernels and MindNLP's own clipping and AdamW. Jobs run in turns; medians are printed.

--profile instead prints the functions in which one step of ours spends its time.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import statistics
import sys
from pathlib import Path
from typing import Any

from common import MINDSPORES_KERNELS, TORCH_HINT, Job, has_torch, launched, machine, median_ratio, run_job, write_json
from operators import OPERATORS
from train_bert import OWN

HERE = Path(__file__).parent


def on_one_core(python: str, script: str, *flags: str) -> list[str]:
    return ["taskset", "-c", str(min(os.sched_getaffinity(0))), python, str(HERE / script), *flags]


def operator_jobs(torch_python: str) -> dict[str, Job]:
    """Return for each column of the table a command and its additional environment variables."""
    jobs: dict[str, Job] = {
        "MindSpore": (on_one_core(sys.executable, "operators.py", "--library", "mindspore"), MINDSPORES_KERNELS),
        "ours": (on_one_core(sys.executable, "operators.py", "--library", "mindspore"), {}),
    }
    if has_torch(torch_python):
        jobs["PyTorch"] = (on_one_core(torch_python, "operators.py", "--library", "torch"), {})
    # NumPy's BLAS starts a thread for every core that it finds when it is loaded; taskset leaves it one core.
    jobs["NumPy"] = (on_one_core(sys.executable, "operators.py", "--library", "numpy"), {})
    return jobs


def step_jobs(steps: int, torch_python: str) -> dict[str, Job]:
    script = ["--steps", str(steps), "--variants"]
    jobs: dict[str, Job] = {
        "as MindNLP does it": (on_one_core(sys.executable, "train_bert.py", *script, OWN), MINDSPORES_KERNELS),
        "MindSpore's kernels, our update": (
            on_one_core(sys.executable, "train_bert.py", *script, "auto"),
            MINDSPORES_KERNELS,
        ),
        "ours": (on_one_core(sys.executable, "train_bert.py", *script, "auto"), {}),
        "ours, two ranks": ([*launched("mpi"), str(HERE / "train_bert.py"), *script, "auto"], {}),
    }
    if has_torch(torch_python):
        gloo = [torch_python, str(HERE / "gloo.py"), "--kind", "step", "--nproc"]
        jobs["PyTorch"] = ([*gloo, "1"], {})
        jobs["PyTorch, two ranks, DistributedDataParallel"] = ([*gloo, "2"], {})
    return jobs


def step_seconds(done: dict[str, Any]) -> float:
    """Return the median step time of a job of train_bert.py or gloo.py."""
    return done["step"] if "step" in done else statistics.median(next(iter(done["measured"].values()))["step"])


def operators_table(rounds: list[dict[str, dict[str, list[float]]]]) -> dict[str, dict[str, list[float]]]:
    """Return the forward and backward times for each operator and library, as medians of all rounds."""
    table: dict[str, dict[str, list[float]]] = {}
    for name in OPERATORS:
        for library in rounds[0]:
            if name in rounds[0][library]:
                both = zip(*(each[library][name] for each in rounds))
                table.setdefault(name, {})[library] = [statistics.median(times) for times in both]
    return table


def print_operators(table: dict[str, dict[str, list[float]]]) -> None:
    libraries = list(next(iter(table.values())))
    print(f"{'ms, forward + backward':26}" + "".join(f"{library:>18}" for library in libraries))
    for name, row in table.items():
        cells = [f"{row[each][0]:.2f} + {row[each][1]:.2f}" if each in row else "" for each in libraries]
        print(f"{name:26}" + "".join(f"{cell:>18}" for cell in cells))


def ratios_of(steps: dict[str, list[float]]) -> dict[str, float]:
    ours, two = steps["ours"], steps["ours, two ranks"]
    ratios = {
        "stock_step_over_ours": median_ratio(steps["as MindNLP does it"], ours),
        "kernels_alone": median_ratio(steps["MindSpore's kernels, our update"], ours),
        "scaling_efficiency": median_ratio(ours, two),
    }
    if "PyTorch" in steps:
        torch, ddp = steps["PyTorch"], steps["PyTorch, two ranks, DistributedDataParallel"]
        ratios["ours_over_torch"] = median_ratio(ours, torch)
        ratios["two_ranks_over_ddp"] = median_ratio(two, ddp)
        ratios["ddp_scaling_efficiency"] = median_ratio(torch, ddp)
    return ratios


def profile() -> None:
    """Print the functions that take most of the time of one step of ours."""
    import mindnlp_dp as dp

    group = dp.init_process_group()
    from train_bert import Step

    step = Step("auto", group)
    for _ in range(3):
        step()
    profiler = cProfile.Profile()
    profiler.runcall(step)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="jobs of every kind")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of a job")
    parser.add_argument("--torch-python", default=sys.executable, help="a Python that has PyTorch")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--profile", action="store_true", help="print what a step of ours consists of")
    args = parser.parse_args()
    if args.profile:
        return profile()
    if not has_torch(args.torch_python):
        print(TORCH_HINT)

    operators, steps = operator_jobs(args.torch_python), step_jobs(args.steps, args.torch_python)
    rounds: list[dict[str, Any]] = []
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(args.repeats):
        rounds.append({name: run_job(*job) for name, job in operators.items()})
        for name, job in steps.items():
            seconds[name].append(step_seconds(run_job(*job)))

    print(f"{machine()}; medians of {args.repeats} jobs, one core a process")
    print_operators(table := operators_table(rounds))
    for name, taken in seconds.items():
        print(f"{name:48}{statistics.median(taken):9.3f} s a step")
    for name, ratio in (ratios := ratios_of(seconds)).items():
        print(f"{name:48}{ratio:9.2f}")
    write_json(args.json, {"machine": machine(), "operators": table, "steps": seconds, "ratios": ratios})
    return None


if __name__ == "__main__":
    main()
