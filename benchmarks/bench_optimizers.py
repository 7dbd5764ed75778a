#!/usr/bin/env python3
"""Train the language recipe's small Llama from random weights with AdamW and with Muon, and print loss against updates.

    python benchmarks/bench_optimizers.py --json outputs/bench_optimizers.json

Both see the same samples in the same order, at the recipe's learning rate, in one process. The loss is that of the rows
that are held out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import ROOT, machine, print_table, run_benchmark


def losses(optimizer: str, updates: int, every: int) -> dict[int, float]:
    """Return the loss of the held-out rows by number of updates."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "scripts/finetune_llm.py", "--optimizer", optimizer, "--max-steps", updates, "--eval-steps",
            every, "--output-dir", folder,
        ]  # fmt: skip
        subprocess.run([str(part) for part in command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        history = json.loads((Path(folder) / "report.json").read_text())["history"]
    return {entry["step"]: entry["eval_loss"] for entry in history if "eval_loss" in entry}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    found = {optimizer: losses(optimizer, args.updates, args.every) for optimizer in ("adamw", "muon")}
    print(machine())
    rows = [[step, *(f"{of[step]:.3f}" for of in found.values())] for step in found["adamw"]]
    print_table(["updates", *found], rows)
    return {"losses": found}


if __name__ == "__main__":
    run_benchmark(
        __doc__, measure, {},
        updates={"type": int, "default": 120, "help": "updates of each run"},
        every={"type": int, "default": 20, "help": "updates between two evaluations"},
    )  # fmt: skip
