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
import pstats
import statistics
import sys
from pathlib import Path
from typing import Any, Optional

from common import (
    MINDSPORES_KERNELS,
    Job,
    gloo,
    in_turns,
    launched,
    machine,
    median_ratio,
    on_one_core,
    print_table,
    run_benchmark,
)
from operators import OPERATORS
from train_bert import OWN, PER_RANK

HERE = Path(__file__).parent


def operator_jobs(torch_python: Optional[str]) -> dict[str, Job]:
    """Return the commands that fill the table's columns, and their additional environment variables."""

    def alone(*libraries: str, python: str = sys.executable) -> list[str]:
        return [*on_one_core(python), str(HERE / "operators.py"), "--library", *libraries]

    jobs: dict[str, Job] = {"MindSpore": (alone("mindspore"), MINDSPORES_KERNELS), "ours": (alone("mindspore"), {})}
    if torch_python:
        jobs["PyTorch"] = (alone("torch", python=torch_python), {})
    # NumPy's BLAS starts a thread for every core that it finds when it is loaded; taskset leaves it one core.
    # Our kernels and the primitives that they call take turns in one process, because their ratio is wanted.
    return {**jobs, "NumPy": (alone("numpy"), {}), "ours, on arrays": (alone("kernels", "onednn"), {})}


def step_jobs(steps: int, torch_python: Optional[str]) -> dict[str, Job]:
    script = [str(HERE / "train_bert.py"), "--steps", str(steps), "--variants"]
    jobs: dict[str, Job] = {
        "as MindNLP does it": ([*on_one_core(), *script, OWN], MINDSPORES_KERNELS),
        "MindSpore's kernels, our update": ([*on_one_core(), *script, "auto"], MINDSPORES_KERNELS),
        "ours": ([*on_one_core(), *script, "auto", PER_RANK], {}),
        "ours, two ranks": ([*launched("mpi"), *script, "auto"], {}),
        'ours, "medium"': ([*on_one_core(), *script, "auto"], {"MINDNLP_DP_MATMUL_PRECISION": "medium"}),
    }
    if torch_python:
        jobs["PyTorch, autocast to bfloat16"] = (gloo(torch_python, "step amp", 1), {})
        jobs["PyTorch"] = (gloo(torch_python, "step", 1), {})
        jobs["PyTorch, two ranks, DistributedDataParallel"] = (gloo(torch_python, "step", 2), {})
    return jobs


def step_seconds(done: dict[str, Any]) -> float:
    """Return the median step time of a job of train_bert.py or gloo.py."""
    return done["step"] if "step" in done else statistics.median(next(iter(done["measured"].values()))["step"])


Times = dict[str, list[float]]


def operators_table(results: dict[str, list[dict[str, Times]]]) -> dict[str, Times]:
    """Return the forward and backward times for each operator and column, as medians of all rounds."""
    columns: dict[str, list[Times]] = {}
    for job, rounds in results.items():
        for library in rounds[0]:
            columns["oneDNN" if library == "onednn" else job] = [done[library] for done in rounds]
    return {
        name: {
            column: [statistics.median(times) for times in zip(*(done[name] for done in rounds))]
            for column, rounds in columns.items()
            if name in rounds[0]
        }
        for name in OPERATORS
    }


def ratios_of(steps: dict[str, list[float]]) -> dict[str, float]:
    ours, two = steps["ours"], steps["ours, two ranks"]
    ratios = {
        "stock_step_over_ours": median_ratio(steps["as MindNLP does it"], ours),
        "kernels_alone": median_ratio(steps["MindSpore's kernels, our update"], ours),
        "scaling_efficiency": median_ratio(ours, two),
        "highest_over_medium": median_ratio(ours, steps['ours, "medium"']),
    }
    if "PyTorch" in steps:
        torch, ddp = steps["PyTorch"], steps["PyTorch, two ranks, DistributedDataParallel"]
        ratios["ours_over_torch"] = median_ratio(ours, torch)
        ratios["two_ranks_over_ddp"] = median_ratio(two, ddp)
        ratios["ddp_scaling_efficiency"] = median_ratio(torch, ddp)
        ratios["medium_over_torch_amp"] = median_ratio(steps['ours, "medium"'], steps["PyTorch, autocast to bfloat16"])
    return ratios


def kernel_ratios(table: dict[str, dict[str, list[float]]]) -> dict[str, float]:
    """Return the time of forward and backward pass over PyTorch's, and without autograd over that of the primitives."""
    ratios = {}
    for name in ("gelu", "gelu, tanh", "layer norm", "softmax", "attention's product"):
        times = {library: sum(both) for library, both in table[name].items()}
        ratios[f"kernel_over_primitive, {name}"] = round(times["ours, on arrays"] / times["oneDNN"], 3)
        if "PyTorch" in times:
            ratios[f"kernels_over_torch, {name}"] = round(times["ours"] / times["PyTorch"], 3)
    return ratios


def global_over_per_rank(done: dict[str, Any]) -> float:
    """Return the step time with dropout masks by position over that with a rank's own; the two alternate."""
    masks = done["measured"]
    return median_ratio(masks["auto"]["step"], masks[PER_RANK]["step"])


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


def measure(args: argparse.Namespace) -> dict[str, Any]:
    if args.profile:
        profile()
        return {}
    steps = {} if args.operators else step_jobs(args.steps, args.torch_python)
    jobs = {"operators": operator_jobs(args.torch_python), "steps": steps}
    done = in_turns({f"{kind}, {name}": job for kind, of in jobs.items() for name, job in of.items()}, args.repeats)
    table = operators_table({name: done[f"operators, {name}"] for name in jobs["operators"]})
    seconds = {name: list(map(step_seconds, done[f"steps, {name}"])) for name in jobs["steps"]}
    print(f"{machine()}; medians of {args.repeats} jobs, one core a process")
    libraries = [*jobs["operators"], "oneDNN"]
    rows = [
        [name, *(f"{row[each][0]:.2f} + {row[each][1]:.2f}" if each in row else "" for each in libraries)]
        for name, row in table.items()
    ]
    print_table(["ms, forward + backward", *libraries], rows)
    ratios = kernel_ratios(table)
    if seconds:
        print_table(["", "s per step"], [[name, f"{statistics.median(taken):.3f}"] for name, taken in seconds.items()])
        ratios = {**ratios_of(seconds), **ratios}
        ratios["global_over_per_rank"] = statistics.median(map(global_over_per_rank, done["steps, ours"]))
    print_table(["ratios", ""], [[name, f"{ratio:.2f}"] for name, ratio in ratios.items()])
    return {"operators": table, "steps": seconds, "ratios": ratios}


if __name__ == "__main__":
    run_benchmark(
        __doc__, measure, {}, repeats=3, torch=True,
        steps={"type": int, "default": 8, "help": "measured steps of a job"},
        operators={"action": "store_true", "help": "leave out the training steps, which take most of the time"},
        profile={"action": "store_true", "help": "print what a step of ours consists of"},
    )  # fmt: skip
