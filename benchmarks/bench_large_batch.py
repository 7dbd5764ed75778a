#!/usr/bin/env python3
"""Train the quickstart with 1, 8 and 32 times its batch size, with AdamW, LAMB and LARS, on the same samples.

    python benchmarks/bench_large_batch.py --json outputs/bench_large_batch.json       (about half an hour)

Every run sees the same samples in the same order; only the number of samples per update differs, and so the number of
updates. For a larger batch the learning rate is multiplied by the factor (linear) or by its square root (sqrt); both
are shown. The warm-up is the same share of the updates, as in the config.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from common import launched, machine, write_json

from mindnlp_dp.optim.learning_rate import scaled_learning_rate

ROOT = Path(__file__).resolve().parent.parent
# The best of several rates tried for one epoch with the config's batch size. (LARS learned nothing at any of three.)
LEARNING_RATES = {"adamw": 2e-3, "lamb": 0.02, "lars": 10.0}
RULES = ("sqrt", "linear")


def train(**settings: Any) -> dict[str, Any]:
    """Run scripts/finetune.py with these settings and return its report."""
    flags = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    with tempfile.TemporaryDirectory() as folder:
        command = [*launched("mpi"), str(ROOT / "scripts/finetune.py"), *flags, "--output-dir", folder]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        return json.loads(Path(folder, "report.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=ROOT / "configs/quickstart_cpu.yaml")
    parser.add_argument("--factors", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--optimizers", nargs="+", choices=list(LEARNING_RATES), default=list(LEARNING_RATES))
    parser.add_argument("--rules", nargs="+", choices=RULES, default=RULES, help="for learning rates of larger batches")
    parser.add_argument("--num-epochs", type=float, help="the config's, if not given")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    args = parser.parse_args()
    batch_size = yaml.safe_load(args.config.read_text())["global_batch_size"]
    more = {} if args.num_epochs is None else {"num_epochs": args.num_epochs}

    print(machine())
    print(f"{'optimizer':10}{'samples an update':>18}{'updates':>9}{'learning rate':>22}{'accuracy':>10}{'loss':>8}")
    runs = []
    for factor in args.factors:
        for optimizer in args.optimizers:
            for rule in args.rules if factor > 1 else args.rules[:1]:
                rate = scaled_learning_rate(LEARNING_RATES[optimizer], batch_size, factor * batch_size, rule)
                report = train(
                    config=args.config, optimizer=optimizer, learning_rate=rate,
                    global_batch_size=factor * batch_size, micro_batch_size=batch_size // 2, **more,
                )  # fmt: skip
                shown = f"{rate:.4g}" + (f" ({rule})" if factor > 1 else "")
                accuracy, loss = report["eval_accuracy"], report["eval_loss"]
                print(
                    f"{optimizer:10}{factor * batch_size:18}{report['steps']:9}{shown:>22}{accuracy:10.4f}{loss:8.4f}",
                    flush=True,
                )
                runs.append({
                    "optimizer": optimizer, "factor": factor, "rule": rule, "learning_rate": rate,
                    "updates": report["steps"], "accuracy": accuracy, "loss": loss,
                })  # fmt: skip
    best = {
        f"{optimizer}_x{factor}": max(
            run["accuracy"] for run in runs if run["optimizer"] == optimizer and run["factor"] == factor
        )
        for factor in args.factors
        for optimizer in args.optimizers
    }
    write_json(args.json, {"machine": machine(), "runs": runs, "best_accuracy": best})


if __name__ == "__main__":
    main()
