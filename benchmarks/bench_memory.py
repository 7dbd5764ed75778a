#!/usr/bin/env python3
"""Measure the memory of weights, gradients and optimizer state on 1, 2 and 4 ranks of a host, summed over the ranks.

    python benchmarks/bench_memory.py --json outputs/bench_memory.json
    python benchmarks/bench_memory.py --large --json outputs/bench_memory_large.json     (a RoBERTa-large, 20 GiB)
    python benchmarks/bench_memory.py --recompute --json outputs/bench_recompute.json
    python benchmarks/bench_memory.py --estimate --json outputs/bench_estimate.json
    python benchmarks/bench_memory.py --sequence --json outputs/bench_sequence.json
    python benchmarks/bench_memory.py --zero3 --json outputs/bench_zero3.json

Memory is Linux's proportional set size (PSS), which counts memory that ranks share once; the resident set size would
count it on every rank. Each rank first imports all libraries and trains a tiny model, so that everything is loaded and
compiled; its PSS is then read, right before the weights are created. The growth of the PSS in training is weights,
gradients (of the backward pass and of the exchange), optimizer state and little else: the batch is one sequence of 16
tokens, whose activations are negligible. All ranks read their PSS at the same time after every stage of the last update
(backward pass, exchange, clipping, AdamW, end); the stage with the largest sum counts. Memory that a stage allocates
and frees again is not seen.

The model is a BERT with 22.7 million parameters, 91 MB of float32, with AdamW and clipping. It trains by
dp.make_train_step with the defaults and with zero_stage=0 and 3. For comparison, PyTorch trains a model with the same
layers with DistributedDataParallel over gloo, with its own AdamW and with ZeroRedundancyOptimizer.

With --large, a RoBERTa with 355 million parameters and random weights trains three updates on four ranks. Another
process adds up their total PSS, including libraries, every 0.2 seconds; the peak is printed. Whether the model fits
into memory with zero_stage=0 is computed; if it does not, that run is skipped. --layers and --width make the model
smaller.

With --recompute, a BERT of 12 layers trains on four sequences of 512 tokens, in one process on one core: with all
activations, with those of every layer or of every second layer recomputed, and with MindSpore's kernels; and PyTorch's
BERT, with its checkpoint() for every layer. The activations are the growth of the peak of the resident memory over
that of updates with one sequence of 16 tokens.

With --estimate, one process trains three models, with and without recomputation; the growth of its resident memory from
before the weights are created to the peak of an update is compared with the estimate.

With --sequence, a small Llama trains on rows of 512 to 4,096 tokens with one rank, by sequence parallelism on 2 and 4
ranks, and by data parallelism on 2. The growth of a rank's peak resident memory over that of an update of 16 tokens is
of updates with one row (one for each rank of data parallelism); the time is of updates with as many rows as ranks, in
which every rank computes as many tokens.

With --zero3, the growth of a rank's peak resident memory by the BERT with zero_stage=3, which no rank ever has in full,
is compared with the sum of its parts: shards (of weights, two copies of gradients, two moments), the weights in no
layer and their gradients, and two layers. Then the BERT trains with zero_stage=2 and 3, in turns in one job of 2 ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Callable, Union

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
    proportional_bytes,
    reset_peak,
    resident_bytes,
    run_benchmark,
    run_job,
)
from train_bert import LABELS, LEARNING_RATE, MAX_NORM, make_bert

RANKS = (1, 2, 4)
LENGTH = 16
# The layers of the BERT for --recompute, and its sequences: their number and length.
DEPTH, LONG = 12, (4, 512)
# The models for --estimate: configuration, sequences, length.
ESTIMATED: dict[str, tuple[dict[str, Any], int, int]] = {
    "BERT, 12 layers": (
        {"model_type": "bert", "hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 12,
         "intermediate_size": 1536}, 4, 512,
    ),
    "GPT-2, 6 layers": ({"model_type": "gpt2", "n_embd": 512, "n_layer": 6, "n_head": 8, "pad_token_id": 0}, 8, 256),
    "RoBERTa-base": ({"model_type": "roberta", "vocab_size": 50265, "max_position_embeddings": 514}, 16, 128),
}  # fmt: skip
# The Llama for --sequence, and the lengths of its rows.
LLAMA = {
    "vocab_size": 2000, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 688, "max_position_embeddings": 4096, "use_cache": False,
}  # fmt: skip
LENGTHS = (512, 1024, 2048, 4096)
SEQUENCE_MESHES = ({"sp": 1}, {"sp": 2}, {"sp": 4}, {"dp": 2})
CLASSES = {
    "bert": ("BertForSequenceClassification", "BertConfig"),
    "gpt2": ("GPT2ForSequenceClassification", "GPT2Config"),
    "roberta": ("RobertaForSequenceClassification", "RobertaConfig"),
}
# The sizes of the tiny model for the warm-up.
SMALL = {"vocab_size": 100, "width": 64, "num_layers": 2, "num_heads": 2, "inner": 128}
SAMPLE_SECONDS = 0.2
GIB = 2**30


def memory_now(barrier: Callable[[], Any], measure: Callable[[], int]) -> int:
    """Return this rank's memory, measured while all ranks wait at a barrier."""
    barrier()
    num_bytes = measure()
    barrier()
    return num_bytes


# The functions below run on every rank.


def make_roberta(num_layers: int, width: int) -> Any:
    from mindnlp.transformers import RobertaConfig, RobertaForSequenceClassification

    config = RobertaConfig(
        vocab_size=50265, hidden_size=width, num_hidden_layers=num_layers, num_attention_heads=max(1, width // 64),
        intermediate_size=4 * width, max_position_embeddings=514, type_vocab_size=1, num_labels=LABELS,
    )  # fmt: skip
    return RobertaForSequenceClassification(config)


def training(
    make_model: Callable[[], Any], zero_stage: Any, *, recompute: Union[bool, int] = False, weights: str = ""
) -> tuple[Any, Callable[..., Any]]:
    """Return a step of make_train_step, and a function that does one update on sequences of this rank, by default one.

    Its arguments are the number of sequences and their length. With a folder of ``weights``, no rank has all of them.
    """
    from mindnlp.core import optim

    import mindnlp_dp as dp

    with dp.empty_weights() if weights else contextlib.nullcontext():
        model = make_model()
    if zero_stage == 3 and dp.get_process_group().world_size > 1:
        dp.fully_shard(model, weights=weights or None)
    dp.enable_recompute(model, recompute)
    model.set_train(True)
    parameters = list(model.parameters())

    def loss(input_ids: Any, labels: Any) -> Any:
        return model(input_ids, labels=labels).loss

    step = dp.make_train_step(
        loss, optim.AdamW(parameters, lr=LEARNING_RATE), parameters, model=model, max_grad_norm=MAX_NORM,
        zero_stage=zero_stage,
    )  # fmt: skip

    def update(rows: int = 1, length: int = LENGTH) -> Any:
        rng = np.random.default_rng(dp.get_process_group().rank)
        ids = rng.integers(3, SMALL["vocab_size"], (rows, length))
        return step({"input_ids": ids, "labels": rng.integers(0, LABELS, rows)})

    return step, update


def grown(args: argparse.Namespace) -> dict[str, Any]:
    """Return the growth of memory after every stage of an update, in bytes, summed over the ranks."""
    import mindnlp_dp as dp
    from mindnlp_dp.data_parallel.overlap import TRIAL_PAIRS

    group = dp.init_process_group()
    zero_stage = args.zero_stage if args.zero_stage == "auto" else int(args.zero_stage)
    # Two updates, because the optimizer creates its state in the first.
    _, update = training(lambda: make_bert(pretrained=None, **SMALL), zero_stage)
    update()
    update()
    before = memory_now(group.barrier, proportional_bytes)
    step, update = training(make_bert, zero_stage)
    # After these updates "auto" has decided whether the exchange overlaps.
    for _ in range(2 + 2 * TRIAL_PAIRS):
        update()
    moments: dict[str, int] = {}
    watch_stages(step, lambda stage: moments.update({stage: memory_now(group.barrier, proportional_bytes) - before}))
    update()
    total = group.all_reduce(np.array(list(moments.values()), np.int64))
    return {"moments": dict(zip(moments, total.tolist()))}


def step_times(args: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of updates on rows of 128 tokens with zero_stage=2 and 3, in turns."""
    import mindnlp_dp as dp

    group = dp.init_process_group()
    updates = {stage: training(make_bert, stage)[1] for stage in (2, 3)}
    seconds: dict[str, list[float]] = {str(stage): [] for stage in updates}
    for number in range(args.updates + 3):
        for stage, update in updates.items():
            group.barrier()
            began = time.perf_counter()
            update(args.rows, 128)
            group.barrier()
            if number >= 3:
                seconds[str(stage)].append(time.perf_counter() - began)
    return seconds


def save_bert(args: argparse.Namespace) -> None:
    import mindnlp_dp as dp

    dp.init_process_group()
    make_bert().save_pretrained(args.model)


def peak_of_shards(args: argparse.Namespace) -> dict[str, float]:
    """Return the growth of a rank's peak memory in an update with zero_stage=3, and what it must have, in bytes."""
    import mindnlp_dp as dp

    group = dp.init_process_group()
    _, update = training(lambda: make_bert(pretrained=None, **SMALL), 3)
    update()
    update()
    before = resident_bytes()
    step, update = training(make_bert, 3, weights=args.model)
    for _ in range(3):
        update()
    reset_peak()
    update()
    peak = max(group.all_gather_object(peak_bytes() - before))
    units = step.synchronizer.parameters[0].parallel.units.by_name
    sizes = {name: sum(4 * math.prod(weight.shape) for weight in unit.weights) for name, unit in units.items()}
    # Weights, gradients as they come and as they are added up, and two moments.
    shards, root = 5 * sum(sizes.values()) / group.world_size, sizes.pop("")
    return {"peak": peak, "shards": shards, "root": 2 * root, "layers": 2 * max(sizes.values())}


def watch_stages(step: Any, done: Callable[[str], Any]) -> None:
    """Call ``done`` with the name of each stage of an update as it ends: backward pass, exchange, updater."""

    def watch(owner: Any, name: str) -> None:
        stage = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            if name == "reduce":
                done("backward")
            result = stage(*arguments, **options)
            done(name)
            return result

        setattr(owner, name, call)

    watch(step.synchronizer, "reduce")
    for name in ("clip", "update", "finish"):
        watch(step.train_step.updater, name)


def activations(args: argparse.Namespace) -> dict[str, Any]:
    """Return the activations of a BERT's update in bytes, and its seconds."""
    import mindnlp_dp as dp

    dp.init_process_group()
    recompute = {"none": False, "every": True, "second": 2}[args.layers_recomputed]
    training(lambda: make_bert(pretrained=None, **SMALL), 0, recompute=recompute)[1]()
    return measure_activations(training(lambda: make_bert(num_layers=DEPTH), 0, recompute=recompute)[1])


def measure_activations(update: Callable[[int, int], Any]) -> dict[str, Any]:
    """Return how much an update of long sequences exceeds the peak memory of one of a short sequence, and its time."""
    for _ in range(2):
        update(1, LENGTH)
    reset_peak()
    update(1, LENGTH)
    before = peak_bytes()
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        update(*LONG)
        seconds.append(time.perf_counter() - began)
    return {"activations": peak_bytes() - before, "seconds": statistics.median(seconds), "before": before}


def grown_by_training(args: argparse.Namespace) -> dict[str, Any]:
    """Return the peak memory of training a model of ``ESTIMATED``, above that before its weights were created."""
    import mindnlp_dp as dp
    from mindnlp_dp.runtime.mindnlp_api import transformers_api

    dp.init_process_group()
    models = transformers_api()
    training(lambda: make_bert(pretrained=None, **SMALL), 0)[1]()
    config, rows, length = ESTIMATED[args.model]
    class_name, config_name = CLASSES[config["model_type"]]

    def make_model() -> Any:
        return getattr(models, class_name)(getattr(models, config_name)(**config, num_labels=LABELS))

    before = resident_bytes()
    _, update = training(make_model, 0, recompute=args.layers_recomputed == "every")
    for _ in range(2):
        update(1, LENGTH)
    reset_peak()
    for _ in range(2):
        update(rows, length)
    return {"bytes": peak_bytes() - before}


def of_long_rows(args: argparse.Namespace) -> dict[str, Any]:
    """Return, by length of a row, the growth of a rank's peak memory and the seconds of an update."""
    from mindnlp.core import optim
    from mindnlp.transformers import LlamaConfig, LlamaForCausalLM

    import mindnlp_dp as dp
    from mindnlp_dp.runtime.mesh_spec import parse_mesh

    group = dp.init_process_group()
    mesh = dp.init_device_mesh(parse_mesh(args.mesh))
    model = dp.parallelize(LlamaForCausalLM(LlamaConfig(**LLAMA)), mesh)
    model.set_train(True)
    parameters = list(model.parameters())
    step = dp.make_train_step(
        lambda **columns: model(**columns).loss, optim.AdamW(parameters, lr=LEARNING_RATE), parameters, model=model,
        max_grad_norm=MAX_NORM, zero_stage=0,
    )  # fmt: skip
    sharers = group.world_size // mesh.dp_group.world_size

    def update(length: int, rows: int = 1) -> float:
        ids = np.random.default_rng(mesh.dp_group.rank).integers(3, LLAMA["vocab_size"], (rows, length))
        began = time.perf_counter()
        step({"input_ids": ids, "labels": ids})
        return time.perf_counter() - began

    update(LENGTH)
    update(LENGTH)
    reset_peak()
    update(LENGTH)
    # The memory of a longer row is kept for the next one, so every length is compared with the beginning.
    before = peak_bytes()
    grown = {}
    for length in LENGTHS:
        update(length)
        update(length)
        grown[length] = int(group.all_reduce(np.array([peak_bytes() - before]), op="max")[0])
    found = {}
    for length in LENGTHS:
        seconds = [update(length, sharers) for _ in range(4)][1:]
        found[str(length)] = {"bytes": grown[length], "seconds": statistics.median(seconds)}
    return found


def train_large(args: argparse.Namespace) -> dict[str, Any]:
    import mindnlp_dp as dp

    (args.ids / str(os.getpid())).touch()
    dp.init_process_group()
    zero_stage = args.zero_stage if args.zero_stage == "auto" else int(args.zero_stage)
    _, update = training(lambda: make_roberta(args.layers, args.width), zero_stage)
    return {"losses": [update() for _ in range(args.updates)]}


# The functions below start the jobs.


class PeakMemory:
    """Adds up the memory of the processes whose ids are file names in a folder, and keeps the peak; for --large."""

    def __init__(self, folder: Path) -> None:
        self.bytes = 0
        self._folder = folder
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(SAMPLE_SECONDS):
            self.bytes = max(self.bytes, sum(self._of(file.name) for file in self._folder.iterdir()))

    @staticmethod
    def _of(pid: str) -> int:
        try:
            return proportional_bytes(pid)
        except (OSError, StopIteration):
            # It has ended.
            return 0


def num_roberta_parameters(num_layers: int, width: int) -> int:
    matrices, vectors = num_layers * 12 + 1, num_layers * 13 + 3
    return (50265 + 514 + 1 + LABELS) * width + matrices * width**2 + vectors * width + LABELS


def available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))


def run_large(args: argparse.Namespace) -> dict[str, Any]:
    num_ranks, num_parameters = args.ranks[-1], num_roberta_parameters(args.layers, args.width)
    print(f"{machine()}; RoBERTa, {num_parameters / 1e6:.1f} million parameters, {num_ranks} ranks")
    # Gradients twice on every rank, the backward pass's and the exchange's; weights and two moments on every rank, too,
    # or once.
    unit, available = 4 * num_parameters, available_bytes()
    needed, divided = num_ranks * 5 * unit, (num_ranks * 2 + 3) * unit
    fits = needed <= available
    print(f"weights, gradients twice and two moments are {divided / GIB:.1f} GiB in all where ranks divide the update,")
    print(f"{needed / GIB:.1f} GiB with zero_stage=0; {available / GIB:.1f} GiB are available")
    if not fits:
        print("zero_stage=0 does not fit, and is not tried")
    large: dict[str, Any] = {"parameters": num_parameters, "ranks": num_ranks, "updates": args.updates}
    large["zero_stage_0"] = {"needed_bytes": needed, "available_bytes": available, "fits": fits}
    shape = ["--layers", args.layers, "--width", args.width, "--updates", args.updates]
    for zero_stage, name in [("auto", "ours")] + [("0", "zero_stage_0")] * fits:
        with tempfile.TemporaryDirectory() as ids, PeakMemory(Path(ids)) as peak:
            job = job_of(__file__, "large", num_ranks, *shape, "--zero-stage", zero_stage, "--ids", ids)
            losses = run_job(job)["losses"]
        large.setdefault(name, {}).update(peak_bytes=peak.bytes, losses=losses)
        shown = ", ".join(f"{loss:.3f}" for loss in losses)
        peak_gib = f"{peak.bytes / GIB:.1f} GiB"
        print(f"zero_stage={zero_stage}: {args.updates} updates, rank 0's losses {shown}; all ranks at most {peak_gib}")
    return {"large": large}


def run_estimate(args: argparse.Namespace) -> dict[str, Any]:
    """Compare the peak memory of three models with what ``mindnlp-dp estimate`` says."""
    from mindnlp_dp.planner import load_model
    from mindnlp_dp.planner.estimate_memory import estimate

    print(f"{machine()}; growth of the peak memory of one process by training, MB")
    cells, numbers = [], {}
    for name, (config, rows, length) in ESTIMATED.items():
        model = load_model(
            {**config, "num_labels": LABELS, "architectures": [CLASSES[config["model_type"]][0]]}, sequence=length
        )
        for layers, recompute in (("none", False), ("every", True)):
            job = job_of(__file__, "grown_by_training", 1, "--model", name, "--layers-recomputed", layers)
            measured = run_job(job)["bytes"]
            estimated = estimate(model, rows, {"dp": 1}, recompute=recompute).total
            shown = f"{name}, {rows} x {length}" + ", recomputed" * recompute
            numbers[shown] = {"measured": measured, "estimated": estimated}
            cells.append([shown, f"{measured / 1e6:.0f}", f"{estimated / 1e6:.0f}", f"{estimated / measured:.2f}"])
    print_table(["", "measured", "estimated", "x"], cells)
    return {"estimate": numbers}


def run_sequence(args: argparse.Namespace) -> dict[str, Any]:
    """Measure rows of several lengths with one rank, sequence parallelism and data parallelism."""
    # Not above: PyTorch's own Python, which has no mindnlp_dp, imports this file.
    from mindnlp_dp.runtime.mesh_spec import mesh_name

    names = {mesh_name(mesh): math.prod(mesh.values()) for mesh in SEQUENCE_MESHES}
    jobs: dict[str, Job] = {
        name: (job_of(__file__, "of_long_rows", num_ranks, "--mesh", name), {}) for name, num_ranks in names.items()
    }
    results = in_turns(jobs, args.repeats)
    print(f"{machine()}; a Llama of 4 layers, medians of {args.repeats} jobs")
    cells = []
    for length in map(str, LENGTHS):
        row, one = [length], [done[length]["bytes"] for done in results["sp=1"]]
        dp = [done[length]["seconds"] for done in results["dp=2"]]
        for name, done in results.items():
            grown, seconds = ([each[length][what] for each in done] for what in ("bytes", "seconds"))
            row += [f"{statistics.median(grown) / 1e6:.0f}", f"{statistics.median(seconds):.2f}"]
            if name == "sp=2":
                row += [f"{median_ratio(grown, one):.2f}", f"{median_ratio(seconds, dp):.2f}"]
        cells.append(row)
    header = [
        title for name in names for title in (f"{name}: MB", "s", *(["x MB of sp=1", "x s of dp=2"] * (name == "sp=2")))
    ]
    print_table(["length", *header], cells)
    return {"sequence": results}


def run_zero3(args: argparse.Namespace) -> dict[str, Any]:
    cells, memory = [], {}
    with tempfile.TemporaryDirectory() as folder:
        run_job(job_of(__file__, "save_bert", 1, "--model", folder))
        for num_ranks in args.ranks[1:]:
            found = memory[num_ranks] = run_job(job_of(__file__, "peak_of_shards", num_ranks, "--model", folder))
            expected = sum(found[part] for part in ("shards", "root", "layers"))
            cells.append(
                [num_ranks, *(f"{found[part] / 1e6:.0f}" for part in found), f"{expected / 1e6:.0f}",
                 f"{found['peak'] / expected:.2f}"]
            )  # fmt: skip
    print(f"{machine()}; BERT, 22.7 million parameters, zero_stage=3, MB of the rank that needs most")
    print_table(["ranks", "peak", "shards", "in no layer, twice", "two layers", "sum", "peak / sum"], cells)
    seconds = run_job(job_of(__file__, "step_times", 2, "--updates", 10 * args.updates, "--rows", args.rows))
    ratio = median_ratio(seconds["3"], seconds["2"])
    medians = {stage: statistics.median(times) for stage, times in seconds.items()}
    print(
        f"{machine()}; BERT, 22.7 million parameters, 2 ranks, {128 * args.rows} tokens a rank, "
        f"{len(seconds['2'])} updates in turns"
    )
    print_table(
        ["zero_stage", "s an update", "x"], [["2", f"{medians['2']:.2f}", ""], ["3", f"{medians['3']:.2f}", ratio]]
    )
    return {"zero3": {"memory": memory, "seconds": seconds, "ratio": ratio}}


def run_recompute(args: argparse.Namespace) -> dict[str, Any]:
    layers = {"all kept": "none", "every layer recomputed": "every", "every second layer": "second"}
    jobs: dict[str, Job] = {}
    for kernels, environment in (("ours", {}), ("MindSpore's kernels", MINDSPORES_KERNELS)):
        for name, value in layers.items():
            command = [*on_one_core(), *job_of(__file__, "activations", 1, "--layers-recomputed", value)[1:]]
            if value != "second" or not environment:
                jobs[f"{kernels}, {name}"] = (command, environment)
    if args.torch_python:
        jobs["PyTorch, all kept"] = (gloo(args.torch_python, "activations", 1), {})
        jobs["PyTorch, every layer recomputed"] = (gloo(args.torch_python, "activations recomputed", 1), {})
    results = in_turns(jobs, args.repeats)

    def ratio(name: str, what: str) -> float:
        kept = f"{name.partition(',')[0]}, all kept"
        return median_ratio([done[what] for done in results[name]], [done[what] for done in results[kept]])

    rows, length = LONG
    print(f"{machine()}; BERT of {DEPTH} layers, {rows} x {length} tokens, one core, medians of {args.repeats} jobs")
    cells = []
    for name, done in results.items():
        medians = {what: statistics.median(each[what] for each in done) for what in ("activations", "seconds")}
        mb, seconds = f"{medians['activations'] / 1e6:.0f}", f"{medians['seconds']:.2f}"
        cells.append([name, mb, f"{ratio(name, 'activations'):.2f}", seconds, f"{ratio(name, 'seconds'):.2f}"])
    print_table(["", "activations, MB", "x", "s an update", "x"], cells)
    return {"recompute": {name: {**done[0], "ratios": [ratio(name, "activations"), ratio(name, "seconds")]}
                          for name, done in results.items()}}  # fmt: skip


def run_all(args: argparse.Namespace) -> dict[str, Any]:
    rows: dict[str, Callable[[int], list[str]]] = {
        "ours": lambda num_ranks: job_of(__file__, "grown", num_ranks, "--zero-stage", "auto"),
        "ours, zero_stage=0": lambda num_ranks: job_of(__file__, "grown", num_ranks, "--zero-stage", "0"),
        "ours, zero_stage=3": lambda num_ranks: job_of(__file__, "grown", num_ranks, "--zero-stage", "3"),
    }
    if args.torch_python:
        rows["PyTorch, DDP"] = lambda num_ranks: gloo(args.torch_python, "memory", num_ranks)
        rows["PyTorch, DDP and ZeroRedundancyOptimizer"] = lambda n: gloo(args.torch_python, "memory zero", n)
    jobs: dict[str, Job] = {f"{row}, {n}": (command(n), {}) for n in args.ranks for row, command in rows.items()}
    moments = {name: [done["moments"] for done in results] for name, results in in_turns(jobs, args.repeats).items()}
    peaks = {row: {n: [max(run.values()) for run in moments[f"{row}, {n}"]] for n in args.ranks} for row in rows}

    def ratio(row: str, num_ranks: int) -> float:
        return median_ratio(peaks[row][num_ranks], peaks[row][args.ranks[0]])

    print(f"{machine()}; BERT, 22.7 million parameters, MB over all ranks, medians of {args.repeats} jobs")
    cells = [
        [row, *(x for n in args.ranks for x in (f"{statistics.median(taken[n]) / 1e6:.0f}", f"{ratio(row, n):.2f}"))]
        for row, taken in peaks.items()
    ]
    header = [title for n in args.ranks for title in (f"{n} ranks" if n > 1 else "1 rank", "x")]
    print_table(["", *header], cells)
    names = {
        "ours": "",
        "ours, zero_stage=0": "zero_stage_0_",
        "ours, zero_stage=3": "zero_stage_3_",
        "PyTorch, DDP": "ddp_",
    }
    words = {2: "two_ranks_over_one", 4: "four_ranks_over_one"}
    ratios = {
        names.get(row, "zero_redundancy_") + words[n]: ratio(row, n) for row in rows for n in args.ranks if n in words
    }
    return {"bytes": peaks, "moments": moments, "ratios": ratios}


CHOICES = {
    "large": run_large, "recompute": run_recompute, "estimate": run_estimate, "sequence": run_sequence,
    "zero3": run_zero3, "all": run_all,
}  # fmt: skip

if __name__ == "__main__":
    run_benchmark(
        __doc__,
        lambda args: CHOICES[next((name for name in CHOICES if getattr(args, name, False)), "all")](args),
        {
            "grown": grown, "large": train_large, "activations": activations, "grown_by_training": grown_by_training,
            "of_long_rows": of_long_rows, "step_times": step_times, "peak_of_shards": peak_of_shards,
            "save_bert": save_bert,
        },
        repeats=3, torch=True, zero_stage={}, ids={"type": Path}, layers_recomputed={},
        ranks={"type": int, "nargs": "+", "default": RANKS, "help": "the last one is that of --large"},
        large={"action": "store_true", "help": "a RoBERTa-large on four ranks instead"},
        recompute={"action": "store_true", "help": "activations of a BERT, and recomputation, instead"},
        estimate={"action": "store_true", "help": "what mindnlp-dp estimate says of three models, instead"}, model={},
        sequence={"action": "store_true", "help": "rows of several lengths by sequence parallelism, instead"}, mesh={},
        zero3={"action": "store_true", "help": "the memory of zero_stage=3, and its time and that of 2, instead"},
        rows={"type": int, "default": 4, "help": "of 128 tokens on each rank, for --zero3"},
        layers={"type": int, "default": 24, "help": "of the RoBERTa"},
        width={"type": int, "default": 1024, "help": "of the RoBERTa"},
        updates={"type": int, "default": 3, "help": "of the RoBERTa; a tenth of those of --zero3"},
    )  # fmt: skip
