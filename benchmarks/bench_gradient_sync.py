#!/usr/bin/env python3
"""Time the exchange of a model's gradients between two ranks on one host: ours, simpler ways and other libraries.

    python benchmarks/bench_gradient_sync.py --json outputs/bench_gradient_sync.json

The model is ``--model bert`` (22.7 million parameters, six layers of width 384) or ``roberta-base``; only its shapes
are used. An exchange begins with gradients in each rank's private memory and ends with their mean there. Measured are:
naive (one all-reduce per parameter) over MCCL and over MPI; buckets through MPI's own Allreduce; ours, in shared
memory; and PyTorch's gloo on the same bytes in buckets of 25 MiB, as in DistributedDataParallel. For comparison, both
ranks copy everything in and out once at the same time: the minimum for an exchange through memory. The last row is the
extra cost of exchange during the backward pass: every gradient is checked in its hook and again after the pass, because
other code may have changed it. Jobs run in turns; medians are printed.

Below the table is the memory that our exchange keeps per rank, in multiples of the gradients. Memory that ranks share
counts once (Linux's proportional set size).
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import (
    Job,
    gloo,
    in_turns,
    job_of,
    machine,
    median_ratio,
    median_seconds,
    print_table,
    proportional_bytes,
    run_benchmark,
)

NAMES = {
    "copy": "one copy in, one out, both ranks",
    "ours": "ours: buckets in shared memory",
    "buckets_mpi": "buckets, MPI's Allreduce",
    "naive_mpi": "naive, MPI",
    "gloo": "buckets, PyTorch's gloo",
    "buckets_mccl": "buckets, MCCL",
    "naive_mccl": "naive, MCCL",
    "fingerprints": "a look at every gradient, twice",
}


def shapes_of(model: str) -> list[tuple[int, ...]]:
    """Return the shapes of an encoder's parameters, in the order of the model."""
    vocab, positions, width, inner, layers = {
        "bert": (30522, 512, 384, 1536, 6),
        "roberta-base": (50265, 514, 768, 3072, 12),
    }[model]
    norm: list[tuple[int, ...]] = [(width,), (width,)]
    layer: list[tuple[int, ...]] = [(width, width), (width,)] * 4
    layer += [*norm, (inner, width), (inner,), (width, inner), (width,), *norm]
    return [(vocab, width), (positions, width), (2, width), *norm, *(layer * layers), (width, width), (width,)]


def page_faults(function: Callable[[], Any], calls: int) -> float:
    """Return the page faults of a call."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(calls):
        function()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / calls


def exchanges(args: argparse.Namespace) -> dict[str, Any]:
    import mindspore

    import mindnlp_dp as dp
    from mindnlp_dp.communication.gradient_channel import open_gradient_channel
    from mindnlp_dp.communication.transports.mpi.mpi_transport import MPIChannel
    from mindnlp_dp.runtime.arrays import fingerprint

    backend = args.backend
    group = dp.init_process_group(backend)
    rng = np.random.default_rng(group.rank)
    arrays = [rng.random(shape, np.float32) for shape in shapes_of(args.model)]
    gradients = [mindspore.Tensor(array) for array in arrays]
    parameters = [mindspore.Tensor(array) for array in arrays]
    seconds = {}
    if backend == "mpi":
        shared, private = ([np.zeros_like(array) for array in arrays] for _ in range(2))

        def copies() -> None:
            for array, staged, result in zip(arrays, shared, private):
                np.copyto(staged, array)
                np.copyto(result, staged)

        seconds["copy"] = median_seconds(group.barrier, copies, 9)

        def look_twice() -> None:
            for array in arrays:
                fingerprint(array)
                fingerprint(array)

        seconds["fingerprints"] = median_seconds(group.barrier, look_twice, 9)
        before = proportional_bytes()
        ours = dp.GradientSynchronizer(parameters, group)
        seconds["ours"] = median_seconds(group.barrier, partial(ours, gradients), 9)
        seconds["page_faults"] = page_faults(partial(ours, gradients), 4)
        grown = group.all_reduce(np.array([proportional_bytes() - before], np.int64))
        seconds["memory"] = float(grown[0]) / group.world_size / sum(array.nbytes for array in arrays)
        del ours
        # From here on, use the fallback for a host without shared memory.
        channel = open_gradient_channel(group)
        assert isinstance(channel, MPIChannel)
        channel.memory.is_available = False
    buckets = dp.GradientSynchronizer(parameters, group)
    name = "mpi" if backend == "mpi" else "mccl"
    seconds[f"buckets_{name}"] = median_seconds(group.barrier, partial(buckets, gradients), 5)
    naive = dp.NaiveGradientSynchronizer(parameters, group)
    seconds[f"naive_{name}"] = median_seconds(group.barrier, partial(naive, gradients), 5)
    return seconds


def measure(args: argparse.Namespace) -> dict[str, Any]:
    jobs: dict[str, Job] = {
        kind: (job_of(__file__, "exchanges", 2, "--model", args.model, "--backend", kind, backend=kind), {})
        for kind in ("mpi", "mindspore")
    }
    runs: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        shapes = Path(folder, "shapes.json")
        shapes.write_text(json.dumps(shapes_of(args.model)))
        if args.torch_python:
            jobs["gloo"] = ([*gloo(args.torch_python, "gradients"), "--shapes", str(shapes)], {})
        for results in in_turns(jobs, args.repeats).values():
            for result in results:
                for name, seconds in result.items():
                    runs.setdefault(name, []).append(seconds)
    medians = {name: statistics.median(times) for name, times in runs.items()}

    def ratio(above: str, below: str) -> float:
        return median_ratio(runs[above], runs[below])

    million = sum(int(np.prod(shape)) for shape in shapes_of(args.model)) / 1e6
    print(f"{machine()}; {args.model}, {million:.1f} million parameters, 2 ranks, medians of {args.repeats} jobs")
    rows = [
        [NAMES[name], f"{1000 * medians[name]:.1f}", f"{ratio(name, 'copy'):.2f}", f"{ratio(name, 'ours'):.2f}"]
        for name in NAMES
        if name in medians
    ]
    print_table(["", "ms", "x one copy", "x ours"], rows)
    print(f"memory that ours keeps, a rank: {medians['memory']:.2f} x the gradients")
    print(f"page faults of a call of ours: {medians.pop('page_faults'):.0f}")
    ratios = {"naive_mccl_over_ours": ratio("naive_mccl", "ours"), "ours_over_copy": ratio("ours", "copy")}
    ratios["memory_over_gradients"] = round(medians.pop("memory"), 3)
    if "gloo" in runs:
        ratios["gloo_over_ours"] = ratio("gloo", "ours")
    return {"model": args.model, "runs": runs, "seconds": medians, "ratios": ratios}


if __name__ == "__main__":
    model = {"choices": ["bert", "roberta-base"], "default": "bert", "help": "whose gradients"}
    run_benchmark(__doc__, measure, {"exchanges": exchanges}, repeats=3, torch=True, model=model, backend={})
