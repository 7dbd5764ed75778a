#!/usr/bin/env python3
"""Train the quickstart with 1, 8 and 32 times its batch size, with AdamW, LAMB and LARS, on the same samples.

    python benchmarks/bench_large_batch.py --json outputs/bench_large_batch.json       (about half an hour)

Every run sees the same samples in the same order; only the number of samples per update differs, and so the number of
updates. For a larger batch the learning rate is multiplied by the factor (linear) or by its square root (sqrt); both
are shown. The warm-up is the same share of the updates, as in the config.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import yaml
from common import ROOT, launched, machine, print_table, run_benchmark, run_finetune

from mindnlp_dp.optim.learning_rate import scaled_learning_rate

# The best of several rates tried for one epoch with the config's batch size. (LARS learned nothing at any of three.)
LEARNING_RATES = {"adamw": 2e-3, "lamb": 0.02, "lars": 10.0}
RULES = ("sqrt", "linear")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    batch_size = yaml.safe_load(args.config.read_text())["global_batch_size"]
    more = {} if args.num_epochs is None else {"num_epochs": args.num_epochs}
    runs = []
    for factor in args.factors:
        for optimizer in args.optimizers:
            for rule in args.rules if factor > 1 else args.rules[:1]:
                rate = scaled_learning_rate(LEARNING_RATES[optimizer], batch_size, factor * batch_size, rule)
                report = run_finetune(
                    launched("mpi"), config=args.config, optimizer=optimizer, learning_rate=rate,
                    global_batch_size=factor * batch_size, micro_batch_size=batch_size // 2, **more,
                )  # fmt: skip
                runs.append({
                    "optimizer": optimizer, "factor": factor, "rule": rule, "learning_rate": rate,
                    "updates": report["steps"], "accuracy": report["eval_accuracy"], "loss": report["eval_loss"],
                })  # fmt: skip
    print(machine())
    rows = [
        [
            run["optimizer"], run["factor"] * batch_size, run["updates"],
            f"{run['learning_rate']:.4g}" + f" ({run['rule']})" * (run["factor"] > 1),
            f"{run['accuracy']:.4f}", f"{run['loss']:.4f}",
        ]
        for run in runs
    ]  # fmt: skip
    print_table(["optimizer", "samples per update", "updates", "learning rate", "accuracy", "loss"], rows)
    best: dict[str, float] = {}
    for run in runs:
        name = f"{run['optimizer']}_x{run['factor']}"
        best[name] = max(best.get(name, 0.0), run["accuracy"])
    return {"runs": runs, "best_accuracy": best}


if __name__ == "__main__":
    optimizers = list(LEARNING_RATES)
    run_benchmark(
        __doc__, measure, {},
        config={"type": Path, "default": ROOT / "configs/quickstart_cpu.yaml", "help": "of the quickstart"},
        factors={"type": int, "nargs": "+", "default": [1, 8, 32], "help": "of the config's batch size"},
        optimizers={"nargs": "+", "choices": optimizers, "default": optimizers, "help": "which to train with"},
        rules={"nargs": "+", "choices": RULES, "default": RULES, "help": "for learning rates of larger batches"},
        num_epochs={"type": float, "help": "the config's, if not given"},
    )  # fmt: skip
