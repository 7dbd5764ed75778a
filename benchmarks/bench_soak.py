"""Measure whether memory grows in a thousand updates with evaluations and checkpoints, in our and in MindNLP's Trainer.

    python benchmarks/bench_soak.py [--updates 1000] [--json FILE]

Each run trains a small RoBERTa with AdamW and a linear schedule, with an evaluation every 50 updates and a checkpoint
every 100. The result is the slope of the resident memory after the first fifth of the updates, in KB per update; it
hardly depends on the model's size. MindNLP's own AdamW is measured unpatched; ours also on two ranks. "operators alone"
runs only the model's forward and backward pass: memory that the kernels themselves keep.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from common import ROOT, job_of, machine, print_table, run_benchmark, run_job

KINDS = {
    "MindNLP's own Trainer": ("stock", 1),
    "ours, one process": ("ours", 1),
    "ours, two ranks": ("ours", 2),
    "ours, SGD": ("sgd", 1),
    "operators alone": ("operators", 1),
}
EVALUATE_EVERY, SAVE_EVERY = 50, 100


def measure(args: argparse.Namespace) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for name, (kind, num_ranks) in KINDS.items():
        memory = run_job(job_of(__file__, "train", num_ranks, "--kind", kind, "--updates", args.updates))
        table[name] = {"kb_an_update": slope(memory), "mb_at_the_end": memory[-1] / 1024, "kb": memory}
    print(f"{machine()}; {args.updates} updates")
    rows = [[name, f"{row['kb_an_update']:.1f}", f"{row['mb_at_the_end']:.0f} MB"] for name, row in table.items()]
    print_table(["", "KB per update", "at the end"], rows)
    return {"updates": args.updates, "table": table}


def slope(memory: list[float]) -> float:
    """Return the growth in KB per update by least squares, without the first fifth, which includes the set-up."""
    later = memory[len(memory) // 5 :]
    return float(np.polyfit(np.arange(len(later)), later, 1)[0])


def resident_kb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1024


def train(args: argparse.Namespace) -> list[float]:
    """Train one kind of run; return the resident memory in KB after every update."""
    import mindnlp_dp as dp

    dp.init_process_group()
    sys.path.insert(0, str(ROOT / "tests"))
    from models import Rows, tiny_roberta

    kind, rows, memory = args.kind, Rows(256), list[float]()
    model = tiny_roberta(num_layers=2, dropout=0.1)
    if kind == "operators":
        return operators_alone(model, rows, args.updates)
    from mindnlp.engine import TrainerCallback

    class MemoryRecorder(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            memory.append(resident_kb())

    settings: dict[str, Any] = {
        "max_steps": args.updates, "learning_rate": 1e-3, "per_device_train_batch_size": 8, "disable_tqdm": True,
        "evaluation_strategy": "steps", "eval_steps": EVALUATE_EVERY, "save_strategy": "steps",
        "save_steps": SAVE_EVERY, "save_total_limit": 1, "logging_steps": 100,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        if kind == "stock":
            train_stock(model, rows, Path(folder), settings, MemoryRecorder())
        else:
            arguments = dp.DataParallelArguments(folder, optim="sgd" if kind == "sgd" else "adamw", **settings)
            dp.DataParallelTrainer(
                model, arguments, train_dataset=rows, eval_dataset=Rows(16), callbacks=[MemoryRecorder()]
            ).train()
    return memory


def train_stock(model: Any, rows: Any, folder: Path, settings: dict[str, Any], watch: Any) -> None:
    """Train with MindNLP's Trainer and its AdamW, without our patch that turns AdamW's scalars into tensors."""
    from mindnlp.core import ops
    from mindnlp.engine import Trainer, TrainingArguments
    from mindspore.dataset import GeneratorDataset

    ops.optim.raw_adam = ops.optim.raw_adam.__wrapped__

    def pipeline(number: int) -> Any:
        source = [(rows.input_ids[i], rows.labels[i]) for i in range(number)]
        return GeneratorDataset(source, ["input_ids", "labels"], shuffle=False)

    arguments = TrainingArguments(str(folder), **settings)
    Trainer(model, arguments, train_dataset=pipeline(256), eval_dataset=pipeline(16), callbacks=[watch]).train()


def operators_alone(model: Any, rows: Any, num_updates: int) -> list[float]:
    import mindspore
    from mindnlp.core.autograd import value_and_grad

    model.set_train(True)
    ids, labels = mindspore.Tensor(rows.input_ids[:8]), mindspore.Tensor(rows.labels[:8])
    parameters = tuple(model.parameters())
    run = value_and_grad(lambda: model(input_ids=ids, labels=labels).loss, parameters, attach_grads=False)
    memory = []
    for _ in range(num_updates):
        run()
        memory.append(resident_kb())
    return memory


if __name__ == "__main__":
    run_benchmark(
        __doc__, measure, {"train": train}, updates={"type": int, "default": 1000, "help": "of each run"}, kind={}
    )
