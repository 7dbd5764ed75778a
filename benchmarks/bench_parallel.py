#!/usr/bin/env python3
"""Measure time, bytes and memory of each kind of model parallelism, for every mesh of two ranks and some of four.

    python benchmarks/bench_parallel.py --json outputs/bench_parallel.json

Two models with random weights train by dp.make_train_step with AdamW and clipping, 32 sequences of 32 tokens per update
in four micro-batches: "bert", a BERT classifier with 4 equal layers and a small vocabulary, and "vocabulary", a masked
language model with two narrow layers and 60,000 words. Each rank has one core.

* step: the median time of an update, and its ratio to one process with one core.
* sent: the bytes per update that a rank hands to the all-reduces of tensor parallelism, to the next and the previous
  stage, and to the gradient exchange; and their ratio to the formula.
* memory: the growth of a rank's own memory (PSS) by weights (read from a file into an empty model), gradients and
  optimizer state, after the backward pass of one short sequence; and its ratio to mindnlp_dp.parallel.model_memory.
* bubble: the bubble of GPipe and 1F1B with two equal stages and 8 micro-batches, from the trace, over (S-1)/(B+S-1).
* operator: the time of an all-reduce of 64 KiB as an operator in a model, and by the transport alone.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import job_of, machine, on_one_core, print_table, proportional_bytes, run_benchmark, run_job

MODELS: dict[str, dict[str, Any]] = {
    "bert": {"vocab_size": 1000, "hidden_size": 512, "num_layers": 4, "intermediate_size": 2048, "kind": "classifier"},
    "vocabulary": {
        "vocab_size": 60000, "hidden_size": 256, "num_layers": 2, "intermediate_size": 512, "kind": "masked",
    },
}  # fmt: skip
MESHES = ("dp=1", "dp=2", "tp=2", "pp=2")
OF_FOUR = ("dp=2,tp=2", "pp=2,tp=2", "tp=4")
ROWS, LENGTH, MICRO_STEPS, HEADS = 32, 32, 4, 4


# The functions below run on every rank.


def build(name: str) -> Any:
    from mindnlp.transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification

    sizes = dict(MODELS[name])
    kind, layers = sizes.pop("kind"), sizes.pop("num_layers")
    config = BertConfig(
        **sizes, num_hidden_layers=layers, num_attention_heads=HEADS, max_position_embeddings=64, num_labels=8,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return (BertForSequenceClassification if kind == "classifier" else BertForMaskedLM)(config)


def make_batch(name: str, num_rows: int, length: int = LENGTH) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    ids = rng.integers(5, MODELS[name]["vocab_size"], (num_rows, length))
    labels = rng.integers(0, 8, num_rows) if MODELS[name]["kind"] == "classifier" else ids
    return {"input_ids": ids, "labels": labels}


def of_all_ranks(args: argparse.Namespace) -> list[dict[str, Any]]:
    import mindnlp_dp as dp

    numbers = job(args)
    return dp.get_process_group().all_gather_object(numbers)


def job(args: argparse.Namespace) -> dict[str, Any]:
    import mindnlp_dp as dp

    world = dp.init_process_group()
    if args.job == "operator":
        return operator_cost(dp, world)
    if args.job == "save":
        build(args.model).save_pretrained(args.weights)
        return {}
    from mindnlp_dp.runtime.mesh_spec import parse_mesh

    mesh = dp.init_device_mesh(parse_mesh(args.mesh))
    if args.job == "memory":
        return memory(dp, world, args)
    model = dp.parallelize(build(args.model), mesh, schedule=args.schedule)
    parameters = list(model.parameters())
    model.set_train(True)

    rows = ROWS // args.micro_steps // mesh.dp_group.world_size
    micro_batches = [make_batch(args.model, rows)] * args.micro_steps
    step = make_step(dp, model, args.micro_steps)
    counts = {"tensor": 0}
    count_all_reduces(mesh.group("tp"), counts)
    for _ in range(2):
        step(micro_batches)
    counts["tensor"], sent, gradients = 0, wire_bytes(model), step.synchronizer.num_bytes
    times, bubbles = [], []
    for _ in range(args.steps):
        spans: list[tuple[str, float, float]] = []
        trace_passes(model, spans)
        world.barrier()
        began = time.perf_counter()
        step(micro_batches)
        times.append(time.perf_counter() - began)
        if spans:
            bubbles.append(bubble_of(mesh.group("pp"), spans))
    return {
        "seconds": statistics.median(times),
        "tensor": counts["tensor"] / args.steps,
        "pipeline": (wire_bytes(model) - sent) / args.steps,
        "gradients": (step.synchronizer.num_bytes - gradients) / args.steps,
        "bubble": statistics.median(bubbles) if bubbles else None,
        "formula": formulas(args, mesh, parameters),
    }


def make_step(dp: Any, model: Any, num_micro_steps: int) -> Any:
    from mindnlp.core import optim

    parameters = list(model.parameters())
    model.set_train(True)
    return dp.make_train_step(
        lambda **inputs: model(**inputs)[0], optim.AdamW(parameters, lr=1e-4), parameters, model=model,
        accumulation_steps=num_micro_steps, max_grad_norm=1.0, zero_stage=0, overlap=False,
    )  # fmt: skip


def formulas(args: argparse.Namespace, mesh: Any, parameters: Any) -> dict[str, float]:
    """Return the bytes per update that this rank should send, by the formulas."""
    sizes = MODELS[args.model]
    hidden = 4 * (ROWS // mesh.dp_group.world_size) * LENGTH * sizes["hidden_size"]
    layers, stages = sizes["num_layers"], mesh.sizes["pp"]
    # Each layer of this stage has two all-reduces in each pass; the embedding has one, in the forward pass. The output
    # layer of a masked language model has one more, for the gradient of its input.
    tensor = 4 * layers / stages + mesh.is_first_stage + (sizes["kind"] == "masked" and mesh.is_last_stage)
    boundaries = (not mesh.is_first_stage) + (not mesh.is_last_stage)
    return {
        "tensor": hidden * tensor * (mesh.sizes["tp"] > 1),
        "pipeline": hidden * boundaries,
        "gradients": 4.0 * sum(p.size for p in parameters),
    }


def count_all_reduces(group: Any, counts: dict[str, int]) -> None:
    """Make a group's all_reduce count the bytes of the hidden states that it sums."""
    all_reduce = group.all_reduce

    def counted(x: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(x, "ndim", 0) == 3:
            counts["tensor"] += 4 * x.size
        return all_reduce(x, *args, **kwargs)

    group.all_reduce = counted


def wire_bytes(model: Any) -> int:
    parallel = getattr(model, "parallel", None)
    return 0 if parallel is None or parallel.pipeline is None else parallel.pipeline.messages.p2p.bytes_sent


def trace_passes(model: Any, spans: list[tuple[str, float, float]]) -> None:
    """Record the begin and end of each pass of the next update in ``spans``."""
    import contextlib

    parallel = getattr(model, "parallel", None)
    if parallel is None or parallel.pipeline is None:
        return

    @contextlib.contextmanager
    def span(name: str, **details: Any) -> Any:
        began = time.perf_counter()
        yield
        if name != "wait":
            spans.append((name, began, time.perf_counter()))

    pipeline = parallel.pipeline
    pipeline.run = lambda batches, parameters, *_: type(pipeline).run(pipeline, batches, parameters, span)


def bubble_of(group: Any, spans: list[tuple[str, float, float]]) -> float:
    everyone = group.all_gather_object(spans)
    flat = [span for theirs in everyone for span in theirs]
    length = max(end for _, _, end in flat) - min(begin for _, begin, _ in flat)
    return 1 - sum(end - begin for _, begin, end in flat) / (group.world_size * length)


def memory(dp: Any, world: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Return the growth of a rank's memory until the gradients have been exchanged, and the predicted bytes."""
    from mindnlp_dp.parallel.model_memory import memory_of

    # A tiny model trains first, so that everything is loaded and compiled before the measurement.
    MODELS["tiny"] = {**MODELS["bert"], "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32}
    step = make_step(dp, dp.parallelize(build("tiny")), 1)
    for _ in range(3):
        step(make_batch("tiny", 1, 8))
    world.barrier()
    before = proportional_bytes()
    with dp.empty_weights():
        model = build(args.model)
    model = dp.parallelize(model, weights=args.weights)
    step, peak, batch = make_step(dp, model, 1), 0, make_batch(args.model, 1, 8)

    def watched(function: Any) -> Any:
        def call(*args: Any) -> Any:
            nonlocal peak
            result = function(*args)
            peak = max(peak, proportional_bytes())
            return result

        return call

    # Measure after the backward pass, when its gradients have been added to the sums, and after the exchange.
    step.synchronizer.accumulate = watched(step.synchronizer.accumulate)
    step.train_step.updater.clip = watched(step.train_step.updater.clip)
    for _ in range(3):
        step(batch)
    world.barrier()
    return {"grown": peak - before, "counted": memory_of(model).total}


def operator_cost(dp: Any, world: Any) -> dict[str, Any]:
    """Return the microseconds of an all-reduce of 64 KiB as an operator and by the transport."""
    import mindspore

    from mindnlp_dp.communication.autograd_ops import reduce_from

    x = mindspore.Tensor(np.ones((128, 128), np.float32))
    array, transport = x.asnumpy(), world._transport

    def microseconds(function: Any) -> float:
        times = []
        for _ in range(7):
            world.barrier()
            began = time.perf_counter()
            for _ in range(200):
                function()
            times.append(1e6 * (time.perf_counter() - began) / 200)
        return statistics.median(times)

    both = {"operator": lambda: reduce_from(x, world), "transport": lambda: transport.all_reduce(array, "sum")}
    return {name: microseconds(function) for name, function in both.items()}


# The functions below start the jobs.


def run(model: str, mesh: str, kind: str, steps: int, *, schedule: str = "1f1b", micro_steps: int = MICRO_STEPS) -> Any:
    num_ranks = int(np.prod([int(part.split("=")[1]) for part in mesh.split(",")]))
    options = ["--model", model, "--mesh", mesh, "--steps", steps, "--schedule", schedule, "--micro-steps", micro_steps]
    command = job_of(__file__, kind, num_ranks, *options, "--weights", Path(tempfile.gettempdir(), f"bench_{model}"))
    return run_job(command if num_ranks > 1 else [*on_one_core(), *command[1:]])


def measure(args: argparse.Namespace) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for model in MODELS:
        run(model, "dp=1", "save", 1)
        for mesh in (*MESHES, *OF_FOUR):
            entry = table[f"{model}, {mesh}"] = {"memory": run(model, mesh, "memory", 1)}
            if mesh in MESHES:
                entry["step"] = run(model, mesh, "step", args.steps)
    bubbles = {
        s: run("bert", "pp=2", "step", args.steps, schedule=s, micro_steps=8)[0]["bubble"] for s in ("gpipe", "1f1b")
    }
    operator = run("bert", "dp=2", "operator", 1)[0]
    print(machine())
    rows = []
    for name, entry in table.items():
        cells = [name, *[""] * 5]
        if "step" in entry:
            ranks, one = entry["step"], table[f"{name.split(',')[0]}, dp=1"]["step"][0]["seconds"]
            cells[1:3] = f"{1e3 * ranks[0]['seconds']:.0f} ms", f"{ranks[0]['seconds'] / one:.2f}"
            for column, kind in enumerate(("tensor", "pipeline", "gradients"), 3):
                sent, formula = (sum(r[kind] for r in ranks), sum(r["formula"][kind] for r in ranks))
                cells[column] = f"{sent / 1e6:.2f} MB x{sent / formula:5.3f}" if formula else "-"
        worst = max((r["grown"] / r["counted"] for r in entry["memory"]), key=lambda ratio: abs(ratio - 1))
        rows.append([*cells, f"{max(r['grown'] for r in entry['memory']) / 2**20:.0f} MiB x{worst:6.3f}"])
    print_table(["", "step", "to one", "tensor", "pipeline", "gradients", "memory a rank"], rows)
    ideal = 1 / 9
    for schedule, found in bubbles.items():
        print(f"bubble of {schedule}: {100 * found:.1f} %, the formula's is {100 * ideal:.1f} %")
    print(f"operator: {operator['operator']:.0f} us, transport {operator['transport']:.0f} us")
    ratios = {
        "bubbles": {schedule: found / ideal for schedule, found in bubbles.items()},
        "operator_overhead_us": operator["operator"] - operator["transport"],
        "memory": {name: [r["grown"] / r["counted"] for r in entry["memory"]] for name, entry in table.items()},
    }
    return {"table": table, "bubbles": bubbles, "operator": operator, "ratios": ratios}


if __name__ == "__main__":
    run_benchmark(
        __doc__, measure, dict.fromkeys(("step", "memory", "operator", "save"), of_all_ranks),
        steps={"type": int, "default": 15, "help": "measured updates of every mesh"}, model={"default": "bert"},
        mesh={"default": "dp=1"}, schedule={"default": "1f1b"}, weights={},
        micro_steps={"type": int, "default": MICRO_STEPS},
    )  # fmt: skip
