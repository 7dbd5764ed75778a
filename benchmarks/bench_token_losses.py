#!/usr/bin/env python3
"""Measure how far N ranks end from one process if the loss is a mean over labels: by default and weighted by rows.

    python benchmarks/bench_token_losses.py --json outputs/bench_token_losses.json       (about five minutes)

The models are small, and the rows have 2 to 12 labels that count. Each number is the norm of the difference of the
final weights, divided by the norm of the change that one process with the full batch makes. The second table is the
evaluation loss of one model on one data set for several numbers of ranks and batch sizes; it should not depend on them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from common import launched, machine, run_job, write_json

ROOT = Path(__file__).resolve().parent.parent
# The small models are in the tests' folder.
sys.path.insert(0, str(ROOT / "tests"))
ADAMW = {"optim": "adamw", "learning_rate": 1e-3, "adam_epsilon": 1e-4}
BATCH_SIZES = (1, 3, 8)


def measure(write: Path) -> None:
    """Train and evaluate all cases of one job; rank 0 writes the results."""
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
    if group.is_main:
        write.write_text(json.dumps({"rows": rows, "losses": losses}))


def evaluation_loss(dp: Any, folder: Path, batch_size: int) -> float:
    from small_models import build, find, samples

    model_class = find("GPT2LMHeadModel")
    model = build(model_class)
    args = dp.DataParallelArguments(str(folder), per_device_eval_batch_size=batch_size, disable_tqdm=True)
    trainer = dp.DataParallelTrainer(model, args, eval_dataset=samples(model_class, model, 13))
    return trainer.evaluate()["eval_loss"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write:
        measure(args.write)
        return
    print(machine())
    found = {ranks: run_job([*launched("mpi", ranks), __file__]) for ranks in args.ranks}
    print(f"{'model':30}{'optimizer':>10}{'ranks':>7}{'micro-batches':>15}{'by default':>12}{'by rows':>10}")
    for ranks, numbers in found.items():
        for name, accumulation, optimizer, by_default, by_rows in numbers["rows"]:
            if ranks * accumulation > 1:
                print(f"{name:30}{optimizer:>10}{ranks:>7}{accumulation:>15}{by_default:>12.1e}{by_rows:>10.1e}")
    print(f"\n{'eval_loss, batch size':30}" + "".join(f"{size:>12}" for size in BATCH_SIZES))
    for ranks, numbers in found.items():
        print(f"{f'{ranks} ranks':30}" + "".join(f"{loss:>12.6f}" for _, loss in numbers["losses"]))
    write_json(args.json, {"machine": machine(), "ranks": found})


if __name__ == "__main__":
    main()
