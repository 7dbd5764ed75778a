#!/usr/bin/env python3
"""Measure how far N ranks end from one process if the loss is a mean over labels: by default and weighted by rows.

    python benchmarks/bench_token_losses.py --json outputs/bench_token_losses.json       (about five minutes)

The models are small, and the rows have 2 to 12 labels that count. Each number is the norm of the difference of the
final weights, divided by the norm of the change that one process with the full batch makes. The second table is the
evaluation loss of one model on one data set for several numbers of ranks and batch sizes; it should not depend on them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from common import ROOT, job_of, machine, print_table, run_benchmark, run_job

# The small models are in the tests' folder.
sys.path.insert(0, str(ROOT / "tests"))
ADAMW = {"optim": "adamw", "learning_rate": 1e-3, "adam_epsilon": 1e-4}
BATCH_SIZES = (1, 3, 8)


def train(_: argparse.Namespace) -> dict[str, Any]:
    """Train and evaluate all cases."""
    import mindnlp_dp as dp

    group = dp.init_process_group()
    from token_losses import HEADS, together_and_alone

    class ByRows(dp.DataParallelTrainer):
        def loss_weight(self, inputs: Any) -> float:
            return float(len(inputs["input_ids"]))

    trainings: list[tuple[str, int, str, dict[str, Any]]] = [(name, 1, "SGD", {}) for name in HEADS]
    trainings += [(name, 3, "SGD", {}) for name in HEADS]
    trainings += [(name, 2, "AdamW", ADAMW) for name in ("LlamaForCausalLM", "BertForMaskedLM")]
    rows = []
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, accumulation, optimizer, more in trainings:
            by_default, by_rows = (
                together_and_alone(group, Path(folder), name, accumulation, kind, **more)[0] for kind in (None, ByRows)
            )
            rows.append([name, accumulation, optimizer, by_default, by_rows])
        losses = [[size, evaluation_loss(dp, Path(folder), size)] for size in BATCH_SIZES]
    return {"rows": rows, "losses": losses}


def evaluation_loss(dp: Any, folder: Path, batch_size: int) -> float:
    from small_models import build, find, samples

    model_class = find("GPT2LMHeadModel")
    model = build(model_class)
    args = dp.DataParallelArguments(str(folder), per_device_eval_batch_size=batch_size, disable_tqdm=True)
    trainer = dp.DataParallelTrainer(model, args, eval_dataset=samples(model_class, model, 13))
    return trainer.evaluate()["eval_loss"]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    found = {ranks: run_job(job_of(__file__, "train", ranks)) for ranks in args.ranks}
    print(machine())
    rows = [
        [name, optimizer, ranks, accumulation, f"{by_default:.1e}", f"{by_rows:.1e}"]
        for ranks, numbers in found.items()
        for name, accumulation, optimizer, by_default, by_rows in numbers["rows"]
        if ranks * accumulation > 1
    ]
    print_table(["model", "optimizer", "ranks", "micro-batches", "by default", "by rows"], rows)
    print()
    losses = {ranks: [f"{loss:.6f}" for _, loss in numbers["losses"]] for ranks, numbers in found.items()}
    print_table(
        ["eval_loss, batch size", *map(str, BATCH_SIZES)], [[f"{ranks} ranks", *row] for ranks, row in losses.items()]
    )
    return {"ranks": found}


if __name__ == "__main__":
    ranks = {"type": int, "nargs": "+", "default": [1, 2, 3], "help": "numbers of ranks"}
    run_benchmark(__doc__, measure, {"train": train}, ranks=ranks)
