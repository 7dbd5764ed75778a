#!/usr/bin/env python3
"""Measure how long the planner takes and how well it predicts this machine.

    python benchmarks/bench_planner.py --json outputs/bench_planner.json

* slicing: 48 and 96 layers onto 64 devices, 11 submeshes, 4 configurations, random costs that grow with the layers.
* integer programs: 384 nodes with 9 strategies in a chain with shortcuts; also with a memory limit that restricts the
  solution, to within 2 % of the optimum.
* complete plan: a GPT-3 with 175 billion parameters on 64 A100, and how much slower the best uniform grid (dp, tp, pp)
  with even stages is by the same simulator; and on 1,024 A100, with 1,536 samples per update.
* machine: this machine is measured with two ranks; then the update time of every mesh of two ranks is predicted and
  measured for both models of bench_parallel.py, with one core per rank.
"""

from __future__ import annotations

import argparse
import itertools
import time
from typing import Any, Callable

import bench_parallel
import numpy as np
from common import machine, print_table, run_benchmark

from mindnlp_dp.commands.calibrate.fit import measure_cluster
from mindnlp_dp.pipeline_schedules.schedules import SCHEDULES
from mindnlp_dp.planner import choose_strategies, load_cluster, load_model, plan, predict, slice_stages

MESHES: tuple[dict[str, int], ...] = ({"dp": 2}, {"tp": 2}, {"pp": 2}, {"sp": 2})


def seconds_of(function: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = function()
    return time.perf_counter() - began, result


def slicing(num_layers: int) -> float:
    rng = np.random.default_rng(0)
    sizes = [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    layers = np.cumsum(1 + rng.random(num_layers))
    first, last = np.indices((num_layers, num_layers))
    work = np.maximum(layers[last] - layers[first] + 1, 0.1)[:, :, None, None]
    # More devices are faster, but the gain from each device shrinks.
    speed = np.array(sizes)[:, None] ** (0.8 + 0.15 * rng.random((len(sizes), 4)))
    cost = work / speed * (1 + 0.05 * rng.random((num_layers, num_layers, len(sizes), 4)))
    memory = work / np.array(sizes)[:, None]
    allowed = np.broadcast_to(np.floor(0.25 * num_layers / memory).astype(int) - 1, cost.shape)
    return seconds_of(lambda: slice_stages(cost, allowed, sizes, 64, 64))[0]


def integer_program(*, has_limit: bool) -> float:
    rng = np.random.default_rng(1)
    num, k = 384, 9
    costs = [rng.random(k) for _ in range(num)]
    edges = [(v, v + 1, rng.random((k, k))) for v in range(num - 1)]
    edges += [(v, v + 3, rng.random((k, k))) for v in range(0, num - 3, 4)]
    memory: dict[str, Any] = {}
    if has_limit:
        usages = [rng.random(k) for _ in range(num)]
        memory = {"usages": usages, "lifetimes": [(v, v + 8) for v in range(num)], "limit": 5.0}
    gap = 0.02 if has_limit else 1e-4
    return seconds_of(lambda: choose_strategies(costs, edges, gap=gap, **memory))[0]


def whole_plan() -> dict[str, float]:
    model, batch = load_model("gpt3-175b"), 1024
    cluster = load_cluster("a100-80gb-8").resized(64)
    seconds, plans = seconds_of(lambda: plan(model, cluster, batch))
    grid = min(uniform_grid(model, cluster, batch))
    large, _ = seconds_of(lambda: plan(load_model("gpt3-175b"), cluster.resized(1024), 1536))
    return {
        "seconds": seconds,
        "seconds_1024": large,
        "update": plans[0].seconds,
        "uniform": grid,
        "uniform_over_plan": grid / plans[0].seconds,
    }


def uniform_grid(model: Any, cluster: Any, batch: int) -> list[float]:
    """Return the simulated seconds of every grid with even stages that fits into 0.9 of the memory."""
    found = []
    n = cluster.num_devices
    powers = [2**i for i in range(n.bit_length())]
    for tp, pp in itertools.product(powers, powers):
        if tp * pp > n or 96 % tp or pp > 96:
            continue
        dp = n // tp // pp
        for micro_batch, schedule, recompute in itertools.product((1, 2, 4), SCHEDULES, (False, True)):
            if batch % (dp * micro_batch) or (pp == 1 and (recompute or schedule != "1f1b")):
                continue
            mesh = {"pp": pp, "dp": dp, "tp": tp}
            grid = predict(
                model, cluster, batch, mesh, micro_batch, schedule=schedule, recompute=recompute, zero_stage=int(dp > 1)
            )
            if grid.margin >= 0.1:
                found.append(grid.seconds)
    return found


def this_machine(steps: int) -> list[dict[str, Any]]:
    keys = measure_cluster(2)
    cluster = load_cluster(keys)
    rows = []
    for name, sizes in bench_parallel.MODELS.items():
        model = load_model(config_of(sizes), sequence=bench_parallel.LENGTH)
        for mesh in MESHES:
            per_rank = bench_parallel.ROWS // bench_parallel.MICRO_STEPS // mesh.get("dp", 1)
            predicted = predict(model, cluster, bench_parallel.ROWS, mesh, per_rank)
            text = ",".join(f"{axis}={size}" for axis, size in mesh.items())
            measured = bench_parallel.run(name, text, "step", steps)[0]["seconds"]
            rows.append({"model": name, "mesh": text, "predicted": predicted.seconds, "measured": measured})
    return rows


def config_of(sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of the model that bench_parallel.py builds from these sizes."""
    return {
        "model_type": "bert", "vocab_size": sizes["vocab_size"], "hidden_size": sizes["hidden_size"],
        "num_hidden_layers": sizes["num_layers"], "num_attention_heads": bench_parallel.HEADS,
        "intermediate_size": sizes["intermediate_size"], "max_position_embeddings": 64, "num_labels": 8,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
        "architectures": ["BertForSequenceClassification" if sizes["kind"] == "classifier" else "BertForMaskedLM"],
    }  # fmt: skip


def in_order(rows: list[dict[str, Any]]) -> bool:
    """Return whether predictions are in the order of the measured times wherever these differ by more than 15 %."""
    pairs = [(a, b) for a, b in itertools.permutations(rows, 2) if a["model"] == b["model"]]
    return all(a["predicted"] < b["predicted"] for a, b in pairs if 1.15 * a["measured"] < b["measured"])


def measure(args: argparse.Namespace) -> dict[str, Any]:
    slicings = {layers: slicing(layers) for layers in (48, 96)}
    programs = {str(has_limit): integer_program(has_limit=has_limit) for has_limit in (False, True)}
    whole = whole_plan()
    rows = this_machine(args.steps)
    print(machine())
    for layers, seconds in slicings.items():
        print(f"slicing {layers} layers onto 64 devices: {seconds:.1f} s")
    print(
        f"integer program of 384 nodes, 9 strategies: {programs['False']:.2f} s, "
        f"to within 2 % where memory binds: {programs['True']:.1f} s"
    )
    print(f"whole plan of GPT-3 on 1,024 devices: {whole['seconds_1024']:.1f} s")
    print(f"whole plan of GPT-3 on 64 devices: {whole['seconds']:.1f} s; the best even grid is "
          f"{whole['uniform_over_plan']:.3f} times as slow as the plan")  # fmt: skip
    errors = [row["predicted"] / row["measured"] - 1 for row in rows]
    cells = [
        [row["model"], row["mesh"], *(f"{1e3 * row[key]:.0f} ms" for key in ("measured", "predicted")), f"{error:+.0%}"]
        for row, error in zip(rows, errors)
    ]
    print_table(["model", "mesh", "measured", "predicted", "error"], cells)
    worst = max(map(abs, errors))
    print(f"largest error {worst:.0%}; in the measured order: {'yes' if in_order(rows) else 'no'}")
    ratios = {"largest_error": worst, "in_order": in_order(rows), "uniform_over_plan": whole["uniform_over_plan"]}
    return {"slicing": slicings, "programs": programs, "whole": whole, "predictions": rows, "ratios": ratios}


if __name__ == "__main__":
    steps = {"type": int, "default": 15, "help": "measured updates of every mesh"}
    run_benchmark(__doc__, measure, {}, steps=steps)
