#!/usr/bin/env python3
"""Time and memory of a language model's output layer and loss, forward and backward: whole, fused, and PyTorch's.

    python benchmarks/bench_head_loss.py --json outputs/bench_head_loss.json

The output layer has 150,000 words and 1,024 inputs, as in Qwen2; the batch has 1,024 tokens. "whole" computes all
logits and then the loss, "fused" both in chunks of tokens, as dp.fuse_cross_entropy does. With frozen weights, as with
LoRA, only the inputs have a gradient. Memory is the growth of the process's peak by the pass, gradients included; the
weights are 614 MB. Every process has one core; jobs run in turns, and medians are printed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from common import (
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

WORDS, WIDTH, TOKENS = 150_000, 1_024, 1_024
WAYS = ("whole", "fused", "whole, frozen weights", "fused, frozen weights")


def measure_pass(make: Callable[[int, int], Callable[[], Any]], words: int, tokens: int) -> dict[str, float]:
    """Return how much the pass ``make(words, tokens)`` adds to the memory at its peak, and a second one's seconds."""
    # A small one, to load all code.
    make(100, 2)()
    run = make(words, tokens)
    before = resident_bytes()
    reset_peak()
    run()
    grown = peak_bytes() - before
    began = time.perf_counter()
    run()
    return {"seconds": time.perf_counter() - began, "bytes": grown}


def of_way(args: argparse.Namespace) -> dict[str, float]:
    """Measure one of the ways with our kernels."""
    import mindspore

    import mindnlp_dp as dp
    from mindnlp_dp.kernels import functions

    dp.init_process_group()

    def make(words: int, tokens: int) -> Callable[[], Any]:
        rng = np.random.default_rng(0)
        x, weight = (mindspore.Tensor(rng.standard_normal((n, WIDTH), np.float32) / 32) for n in (tokens, words))
        classes = rng.integers(0, words, tokens)

        def loss_of(x: Any, weight: Any) -> Any:
            if args.way.startswith("fused"):
                return functions.linear_cross_entropy(x, weight, None, classes, is_frozen="frozen" in args.way)
            return functions.cross_entropy(functions.linear(x, weight), classes, -100, "mean")

        gradient = mindspore.value_and_grad(loss_of, 0 if "frozen" in args.way else (0, 1))
        return lambda: float(gradient(x, weight)[0].asnumpy())

    return measure_pass(make, args.words, args.tokens)


def run_all(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all ways, and print a table."""
    sizes = ["--words", args.words, "--tokens", args.tokens]
    jobs: dict[str, Job] = {
        way: ([*on_one_core(), *job_of(__file__, "of_way", 1, "--way", way, *sizes)[1:]], {}) for way in WAYS
    }
    if args.torch_python:
        jobs["PyTorch, whole"] = (gloo(args.torch_python, "head loss", 1), {})
    results = in_turns(jobs, args.repeats)
    found = {name: {key: [run[key] for run in runs] for key in ("seconds", "bytes")} for name, runs in results.items()}
    print(f"{machine()}; {args.words} words, {args.tokens} tokens, width {WIDTH}; one core, {args.repeats} jobs each")
    print_table(
        ["", "seconds", "peak, MB"],
        [
            [name, f"{statistics.median(of['seconds']):.2f}", f"{statistics.median(of['bytes']) / 1e6:.0f}"]
            for name, of in found.items()
        ],
    )
    ratios = {
        f"fused_over_whole_{key}{kind.replace(', ', '_').replace(' ', '_')}": median_ratio(
            found[f"fused{kind}"][key], found[f"whole{kind}"][key]
        )
        for kind in ("", ", frozen weights")
        for key in ("seconds", "bytes")
    }
    return {"runs": found, "ratios": ratios}


if __name__ == "__main__":
    run_benchmark(
        __doc__, run_all, {"of_way": of_way}, repeats=3, torch=True, way={"choices": WAYS},
        words={"type": int, "default": WORDS, "help": "size of the vocabulary"},
        tokens={"type": int, "default": TOKENS, "help": "tokens of the batch"},
    )  # fmt: skip
