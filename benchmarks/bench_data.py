#!/usr/bin/env python3
"""Time and memory of the language recipe's data on two ranks: 10 million tokens, from a file to rows on both ranks.

    python benchmarks/bench_data.py --json outputs/bench_data.json
    python benchmarks/bench_data.py --before FOLDER

The file has prompts and completions of random words, the same on each machine, and its tokenizer is trained on the
first of them. A job reads the file, tokenizes, packs rows of 512 tokens, brings them to both ranks, copies the data
sets as MindNLP's Trainer does, and reads each row once on each rank. "first run" has an empty cache, "second run" the
cache of the first. With --before, the same job is also run with the code in FOLDER, such as that of an earlier version.
Memory is the sum of both ranks' PSS beyond what they had before the job; memory that they share is counted once.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from common import Job, in_turns, job_of, print_table, proportional_bytes, run_benchmark

MAX_LENGTH = 512
SAMPLE = 2_000
SYLLABLES = [f"{consonant}{vowel}" for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]


def texts() -> Iterator[str]:
    """Yield texts of 20 to 300 words, whose frequencies follow Zipf's law."""
    rng = np.random.default_rng(0)
    words = np.array(["".join(rng.choice(SYLLABLES, rng.integers(1, 5))) for _ in range(20_000)])
    frequencies = 1 / np.arange(1, len(words) + 1)
    frequencies /= frequencies.sum()
    while True:
        lengths = rng.integers(20, 300, SAMPLE)
        drawn = iter(words[rng.choice(len(words), lengths.sum(), p=frequencies)])
        for length in lengths:
            yield " ".join(next(drawn) for _ in range(length))


def write_files(folder: Path, num_tokens: int) -> None:
    """Write the tokenizer, and training and held-out texts, of which the former have about so many tokens."""
    from mindnlp_dp.finetuning.tokenizers import as_pretrained
    from mindnlp_dp.language_modeling.tokenize_conversations import train_tokenizer

    all_texts = texts()
    sample = [next(all_texts) for _ in range(SAMPLE)]
    tokenizer = train_tokenizer(sample, 8_000)
    as_pretrained(tokenizer.to_str(), 2 * MAX_LENGTH, eos_token="</s>", pad_token="<pad>").save_pretrained(str(folder))
    per_text = statistics.mean(len(encoding.ids) for encoding in tokenizer.encode_batch(sample))
    for name, count in (("train", round(num_tokens / per_text)), ("test", 100)):
        with open(folder / f"{name}.jsonl", "w") as file:
            for _ in range(count):
                prompt, _, completion = next(all_texts).partition(" ")
                print(json.dumps({"prompt": prompt, "completion": f" {completion}"}), file=file)


class PeakMemory(threading.Thread):
    """Watches the sum of some processes' memory; ``peak`` is its maximum, in bytes, beyond that at the start."""

    def __init__(self, pids: list[int]) -> None:
        super().__init__(daemon=True)
        self.pids, self.before, self.peak = pids, 0, 0
        self.before = self.now()

    def now(self) -> int:
        return sum(map(proportional_bytes, self.pids)) - self.before

    def run(self) -> None:
        while True:
            self.peak = max(self.peak, self.now())
            time.sleep(0.05)


def timed(module: Any, name: str, seconds: dict[str, float], key: str) -> None:
    """Replace a function or a generator of a module by one that adds its time to ``seconds[key]``."""
    function: Callable[..., Any] = getattr(module, name)

    def call(*args: Any, **keywords: Any) -> Any:
        began = time.perf_counter()
        found = function(*args, **keywords)
        seconds[key] += time.perf_counter() - began
        return steps(found) if isinstance(found, Iterator) else found

    def steps(found: Iterator[Any]) -> Iterator[Any]:
        while True:
            began = time.perf_counter()
            each = next(found, None)
            seconds[key] += time.perf_counter() - began
            if each is None:
                return
            yield each

    setattr(module, name, call)


def of_job(args: argparse.Namespace) -> dict[str, float]:
    """Prepare the data on each rank as the recipe does; return seconds and bytes."""
    import mindnlp_dp as dp
    from mindnlp_dp.runtime.mindnlp_api import transformers_api

    # With --before, this runs with earlier code, whose files have shorter names.
    try:
        names = ("finetune_language_model", "language_modeling_task", "language_modeling_config")
        finetune, task, settings = (import_module(f"mindnlp_dp.language_modeling.{name}") for name in names)
    except ModuleNotFoundError:
        names = ("finetune", "task", "config")
        finetune, task, settings = (import_module(f"mindnlp_dp.language_modeling.{name}") for name in names)
    group = dp.init_process_group()
    seconds = {"tokenize": 0.0, "pack": 0.0}
    timed(task, "encode_all" if hasattr(task, "encode_all") else "encode", seconds, "tokenize")
    timed(task, "pack", seconds, "pack")
    config = settings.LanguageModelingConfig(
        model=str(args.folder), packing=True, max_length=MAX_LENGTH, num_samples=0,
        train_file=str(args.folder / "train.jsonl"), test_file=str(args.folder / "test.jsonl"),
    )  # fmt: skip
    if args.cache:
        config = dataclasses.replace(config, cache_dir=str(args.cache))
    # Imports of the library do not count.
    transformers_api().AutoTokenizer.from_pretrained(str(args.folder))
    pids = group.all_gather_object(os.getpid())
    memory = PeakMemory(pids if group.is_main else [])
    group.barrier()
    memory.start()
    began = time.perf_counter()
    if hasattr(finetune, "prepared"):
        data = finetune.prepared(config, None, group)
    else:
        data = group.run_on_rank0(lambda: task.prepare_task(config), "preparing the data")
    held = copy.deepcopy([data.train, data.test])
    group.barrier()
    prepared = time.perf_counter()
    tokens = sum(len(held[0][number]["input_ids"]) for number in range(len(held[0])))
    group.barrier()
    return {
        **seconds, "prepare": prepared - began, "read": time.perf_counter() - prepared, "peak": memory.peak,
        "held": memory.now(), "tokens": tokens, "rows": len(held[0]),
        "file": sum(file.stat().st_size for file in args.cache.glob("*")) if args.cache else 0,
    }  # fmt: skip


def first_run(args: argparse.Namespace) -> dict[str, float]:
    """Prepare the data with an empty cache."""
    import mindnlp_dp as dp

    dp.init_process_group().run_on_rank0(lambda: shutil.rmtree(args.cache, ignore_errors=True), "emptying the cache")
    return of_job(args)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run all jobs, and print a table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(folder, args.tokens)
        flags = ["--folder", folder, "--cache", folder / "cache"]
        jobs: dict[str, Job] = {}
        script = str(Path(__file__).resolve())
        if args.before:
            before = args.before.resolve()
            # The launcher and its ranks import the package from the current folder, or from PYTHONPATH.
            jobs["before"] = (
                ["env", "-C", str(before), *job_of(script, "data", 2, "--folder", folder)],
                {"PYTHONPATH": str(before)},
            )
        jobs["first run"] = job_of(script, "first", 2, *flags), {}
        jobs["second run"] = job_of(script, "data", 2, *flags), {}
        found = in_turns(jobs, args.repeats)
    medians = {
        name: {key: statistics.median(result[key] for result in results) for key in results[0]}
        for name, results in found.items()
    }
    print(f"{medians['first run']['tokens']:,} tokens in {medians['first run']['rows']:,} rows")
    print_table(
        ["", *medians],
        [
            *([f"seconds to {key}", *(f"{each[key]:.1f}" for each in medians.values())]
              for key in ("prepare", "tokenize", "pack", "read")),
            *([f"memory, {text}, MB", *(f"{each[key] / 1e6:.0f}" for each in medians.values())]
              for text, key in (("peak", "peak"), ("afterwards", "held"))),
            ["file, MB", *(f"{each['file'] / 1e6:.0f}" for each in medians.values())],
        ],
    )  # fmt: skip
    return {name: {"median": medians[name], "jobs": found[name]} for name in found}


if __name__ == "__main__":
    run_benchmark(
        __doc__, measure, {"first": first_run, "data": of_job}, repeats=1,
        tokens={"type": int, "default": 10_000_000, "help": "tokens of the file"},
        before={"type": Path, "metavar": "FOLDER", "help": "a checkout of earlier code, which is measured, too"},
        folder={"type": Path}, cache={"type": Path},
    )  # fmt: skip
