#!/usr/bin/env python3
"""Tokens per second and peak memory of a Llama with 50 million parameters, full and with LoRA: ours, MindNLP, PyTorch.

    python benchmarks/bench_llm.py --json outputs/bench_llm.json

Every rank trains 4 sequences of 128 tokens per update: loss of all tokens, clipping, AdamW. "MindNLP" is its own
Trainer in one process, with kernels of MindSpore; it cannot train on several ranks. "ours" is DataParallelTrainer.
PyTorch trains a Llama of the same sizes, from its own RMSNorm, attention and fused AdamW, over gloo:
DistributedDataParallel. LoRA has rank 8, in all linear layers but the output layer.

Every rank has one core; "MindNLP, two cores" is one process that may use both. Peak memory is that of the rank that
needs most, without what it had before the model was built; the estimate is that of mindnlp-dp estimate. Ranks of one
host share their weights (zero_stage="auto" is 2), and a page that they share counts on each. Jobs run in turns; medians
are printed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from typing import Any

import numpy as np
from common import (
    MINDSPORES_KERNELS,
    Job,
    gloo,
    in_turns,
    job_of,
    machine,
    median_ratio,
    on_one_core,
    peak_bytes,
    print_table,
    reset_peak,
    resident_bytes,
    run_benchmark,
)

SIZES = {"vocab_size": 12_000, "hidden_size": 512, "num_hidden_layers": 12, "num_attention_heads": 8}
INNER = 1_376
BATCH, LENGTH, LORA_RANK = 4, 128, 8
LEARNING_RATE, MAX_NORM = 1e-4, 1.0
# Updates before the measured ones, in which overlap="auto" is decided; and of MindNLP, whose updates take 12 s.
WARM_UP, MINDNLP_STEPS = 5, (1, 3)
# The linear layers of a Llama that have adapters.
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_llama(is_lora: bool) -> Any:
    """Return MindNLP's Llama with random weights, with adapters if ``is_lora``."""
    import mindnlp_dp  # noqa: F401, I001
    from mindnlp.peft import LoraConfig, get_peft_model
    from mindnlp.transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(**SIZES, intermediate_size=INNER, num_key_value_heads=SIZES["num_attention_heads"])
    )
    if not is_lora:
        return model
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=LORA_RANK, target_modules=list(TARGETS)))


def train(args: argparse.Namespace) -> dict[str, float]:
    """Train with a Trainer, and return the median seconds of an update and the growth of the process's peak memory."""
    import mindnlp_dp as dp

    group = None if args.trainer == "mindnlp" else dp.init_process_group()
    from mindnlp.engine import Trainer, TrainerCallback, TrainingArguments
    from mindspore.dataset import NumpySlicesDataset

    # Of all code that training needs, most is loaded by then.
    make_llama(is_lora=args.lora)
    before = resident_bytes()
    reset_peak()
    num_ranks = group.world_size if group else 1
    warm_up, measured_steps = MINDNLP_STEPS if group is None else (WARM_UP, args.steps)
    num_steps = warm_up + measured_steps
    ids = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (num_ranks * num_steps * BATCH, LENGTH))
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {
            "output_dir": folder, "per_device_train_batch_size": BATCH, "max_steps": num_steps,
            "learning_rate": LEARNING_RATE, "max_grad_norm": MAX_NORM, "save_strategy": "no", "disable_tqdm": True,
            "logging_steps": 10**6,
        }  # fmt: skip
        columns = {"input_ids": ids, "attention_mask": np.ones_like(ids), "labels": ids}
        model = make_llama(is_lora=args.lora)
        if group is None:
            dataset = NumpySlicesDataset(columns, shuffle=True)
            # Its clipping fails for a Llama with MindSpore 2.10: gradients are transposed views, which it assigns to.
            settings["max_grad_norm"] = 0.0
            trainer = Trainer(model, TrainingArguments(**settings), train_dataset=dataset, callbacks=[Clock()])
        else:
            rows = NumpySlicesDataset(columns, shuffle=False)
            trainer = dp.DataParallelTrainer(
                model, dp.DataParallelArguments(**settings), train_dataset=rows, callbacks=[Clock()]
            )
        trainer.train()
    measured = np.array([statistics.median(np.diff(ends[warm_up - 1 :])), peak_bytes() - before])
    slowest = group.all_reduce(measured, op="max") if group else measured
    return {"seconds": float(slowest[0]), "bytes": float(slowest[1])}


def estimated_bytes(is_lora: bool, num_ranks: int) -> float:
    """Return the memory that the planner expects of a device."""
    from mindnlp_dp.planner import load_model
    from mindnlp_dp.planner.estimate_memory import estimate

    config = {
        **SIZES, "model_type": "llama", "intermediate_size": INNER, "max_position_embeddings": LENGTH,
        "num_key_value_heads": SIZES["num_attention_heads"], "tie_word_embeddings": False,
    }  # fmt: skip
    model = load_model(config, lora_rank=LORA_RANK if is_lora else None)
    zero_stage = 2 if num_ranks > 1 else 0
    return estimate(model, BATCH * num_ranks, {"dp": num_ranks}, zero_stage=zero_stage).total


def jobs_of(args: argparse.Namespace) -> dict[str, Job]:
    jobs: dict[str, Job] = {}
    for kind in ("full", "LoRA"):
        flags = ["--steps", args.steps, *(["--lora"] if kind == "LoRA" else [])]

        def ours(trainer: str, num_ranks: int, flags: list[Any] = flags) -> list[str]:
            command = job_of(__file__, "train", num_ranks, "--trainer", trainer, *flags)
            return command if num_ranks > 1 else [*on_one_core(), *command[1:]]

        jobs[f"{kind}: MindNLP"] = (ours("mindnlp", 1), MINDSPORES_KERNELS)
        jobs[f"{kind}: MindNLP, two cores"] = ([sys.executable, *ours("mindnlp", 1)[4:]], MINDSPORES_KERNELS)
        jobs[f"{kind}: ours"] = (ours("ours", 1), {})
        jobs[f"{kind}: ours, two ranks"] = (ours("ours", 2), {})
        if args.torch_python:
            name = "llama lora" if kind == "LoRA" else "llama"
            jobs[f"{kind}: PyTorch"] = (gloo(args.torch_python, name, 1), {})
            jobs[f"{kind}: PyTorch, two ranks"] = (gloo(args.torch_python, name), {})
    return jobs


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run all jobs, and print a table of them."""
    found = in_turns(jobs_of(args), args.repeats)
    seconds = {name: [run["seconds"] for run in runs] for name, runs in found.items()}
    print(f"{machine()}; Llama, {BATCH} x {LENGTH} tokens per rank, medians of {args.repeats} jobs")
    print("x MindNLP: tokens per second, over those of MindNLP on one core")
    rows, ratios = [], {}
    for name, runs in found.items():
        kind = name.partition(":")[0]
        num_ranks = 2 if name.endswith("two ranks") else 1
        peak = statistics.median(run["bytes"] for run in runs) / 1e6
        speed = [num_ranks * own / taken for own, taken in zip(seconds[f"{kind}: MindNLP"], seconds[name])]
        estimated = f"{estimated_bytes(kind == 'LoRA', num_ranks) / 1e6:.0f}" if "ours" in name else ""
        rows.append([
            name, f"{num_ranks * BATCH * LENGTH / statistics.median(seconds[name]):.0f}",
            f"{statistics.median(speed):.2f}", f"{peak:.0f}", estimated,
        ])  # fmt: skip
    print_table(["", "tokens/s", "x MindNLP", "peak, MB", "estimate, MB"], rows)
    for kind in ("full", "LoRA"):
        two = seconds[f"{kind}: ours, two ranks"]
        ratios[f"{kind}_two_ranks_over_mindnlp"] = 2 * median_ratio(seconds[f"{kind}: MindNLP"], two)
        ratios[f"{kind}_scaling_efficiency"] = median_ratio(seconds[f"{kind}: ours"], two)
        if f"{kind}: PyTorch" in seconds:
            ratios[f"{kind}_two_ranks_over_ddp"] = median_ratio(seconds[f"{kind}: PyTorch, two ranks"], two)
            ratios[f"{kind}_one_rank_over_pytorch"] = median_ratio(
                seconds[f"{kind}: PyTorch"], seconds[f"{kind}: ours"]
            )
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.2f}")
    return {"runs": found, "ratios": ratios}


if __name__ == "__main__":
    run_benchmark(
        __doc__, measure, {"train": train}, repeats=3, torch=True,
        steps={"type": int, "default": 8, "help": "measured updates of a job"},
        trainer={"choices": ("mindnlp", "ours")}, lora={"action": "store_true"},
    )  # fmt: skip
