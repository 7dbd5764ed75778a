#!/usr/bin/env python3
"""A whole training step of a BERT of 22.7 million parameters in MindNLP: one rank on one core, and two on two.

    python benchmarks/bench_step.py --json outputs/bench_step.json

Every rank trains 32 sequences of 32 tokens a step: forward, backward, exchange, clipping, AdamW (train_bert.py).
Beside it PyTorch with DistributedDataParallel over gloo, on a model of the same layers. Jobs are run in turns; medians
are printed. The scaling efficiency is what one rank's step takes, over what two ranks' does. "No exchange" is what two
processes that know nothing of each other reach: they share the memory, and the slower one counts.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from common import TORCH_HINT, has_torch, launched, machine, run_job, write_json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="jobs of every kind")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of a job")
    parser.add_argument("--torch-python", default=sys.executable, help="a Python that has PyTorch")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    args = parser.parse_args()

    here = Path(__file__).parent
    job = [str(here / "train_bert.py"), "--steps", str(args.steps), "--variants"]
    core = str(min(os.sched_getaffinity(0)))
    torch = [args.torch_python, str(here / "gloo.py"), "--kind", "step", "--nproc"]
    with_torch = has_torch(args.torch_python)
    if not with_torch:
        print(TORCH_HINT)
    one: dict[str, list[float]] = {"compute": [], "auto": []}
    two: dict[str, list[float]] = {"compute": [], "auto": [], "overlap": []}
    exposed: dict[str, list[float]] = {"compute": [], "auto": [], "overlap": []}
    ddp: dict[int, list[float]] = {1: [], 2: []}
    state = ""
    for _ in range(args.repeats):
        alone = run_job(["taskset", "-c", core, sys.executable, *job, *one])["measured"]
        done = run_job([*launched("mpi"), *job, *two])
        both, state = done["measured"], done["overlap"]["auto"]
        for variant, steps in one.items():
            steps.append(statistics.median(alone[variant]["step"]))
        for variant, steps in two.items():
            steps.append(statistics.median(both[variant]["step"]))
            shares = [hidden / step for hidden, step in zip(both[variant]["exposed"], both[variant]["step"])]
            exposed[variant].append(statistics.median(shares))
        for nproc in (1, 2) if with_torch else ():
            ddp[nproc].append(run_job([*torch, str(nproc)])["step"])

    def efficiency(single: list[float], double: list[float]) -> list[float]:
        return [alone / both for alone, both in zip(single, double)]

    print(f"{machine()}; BERT, 22.7 million parameters, 32 x 32 tokens a rank, medians of {args.repeats} jobs")
    print(f"{'':44}{'1 rank':>10}{'2 ranks':>10}{'efficiency':>12}{'exposed':>10}")

    def line(name: str, single: list[float], double: list[float], share: str = "") -> None:
        ratio = statistics.median(efficiency(single, double))
        print(f"{name:44}{statistics.median(single):9.3f}s{statistics.median(double):9.3f}s{ratio:12.3f}{share:>10}")

    line("MindNLP, no exchange: the machine's own", one["compute"], two["compute"])
    line('MindNLP, ours (overlap="auto")', one["auto"], two["auto"], f"{statistics.median(exposed['auto']):.1%}")
    line("MindNLP, ours (overlap=True)", one["auto"], two["overlap"], f"{statistics.median(exposed['overlap']):.1%}")
    if with_torch:
        line("PyTorch, DistributedDataParallel over gloo", ddp[1], ddp[2])
    print(f'"auto" is {state}')
    runs: dict[str, Any] = {
        "one_rank": one, "two_ranks": two, "ddp": ddp,
        "scaling_efficiency": efficiency(one["auto"], two["auto"]), "exposed_share": exposed["auto"],
    }  # fmt: skip
    ratios = {name: statistics.median(runs[name]) for name in ("scaling_efficiency", "exposed_share")}
    ratios["scaling_efficiency_without_exchange"] = statistics.median(efficiency(one["compute"], two["compute"]))
    if with_torch:
        ratios["ddp_scaling_efficiency"] = statistics.median(efficiency(ddp[1], ddp[2]))
    write_json(args.json, {"machine": machine(), "auto": state, "runs": runs, "ratios": ratios})


if __name__ == "__main__":
    main()
