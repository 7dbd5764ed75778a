"""Measure how training scales on this host, and fit the laws of Amdahl and Gustafson to it.

    python homework/scaling.py --plot outputs/scaling.png              (needs MPI: pip install "mindnlp-dp[mpi]")

It trains a small RoBERTa with one rank and with several, once with a constant global batch (Amdahl) and once with a
constant batch of each rank (Gustafson), fits the parallel fraction, and prints what the laws predict for more ranks.
docs/scaling.md explains the numbers.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from algorithms import at_least
from mindnlp_dp.launch.errors import LaunchError
from mindnlp_dp.launch.run import run_measurement
from mindnlp_dp.report.outputs import write_outputs
from theory.speedup import amdahl_speedup, gustafson_speedup, parallel_fraction, throughput

JOB = str(Path(__file__).with_name("scaling_job.py"))
_PREDICTED = (2, 4, 8, 16, 32, 64)

LAWS = {
    "amdahl": ("global batch stays", amdahl_speedup),
    "gustafson": ("rank's batch stays", gustafson_speedup),
}


def measure(world_sizes: Sequence[int], batch: int, num_updates: int) -> dict[int, dict[str, float]]:
    """Measure samples per second for each number of ranks, for both kinds of batch; run one job after another.

    Raises:
        LaunchError: a job could not start.
        RuntimeError: a job failed.
    """
    command = [JOB, "--batch", str(batch), "--updates", str(num_updates)]
    return {world_size: run_measurement(command, world_size)["samples_per_second"] for world_size in world_sizes}


def fit(rates: dict[int, dict[str, float]]) -> dict[str, dict[str, Any]]:
    """Return for each law: the rate of one rank, the speed-ups, and the fraction fitted at the most ranks."""
    largest, fitted = max(rates), {}
    for law, (way, _) in LAWS.items():
        one = rates[1][way]
        speedups = {world_size: rate[way] / one for world_size, rate in rates.items()}
        fraction = parallel_fraction(largest, speedups[largest], law)
        fits = 0.0 <= fraction <= 1.0
        fitted[law] = {"one": one, "speedups": speedups, "fraction": min(max(fraction, 0.0), 1.0), "fits": fits}
    return fitted


def print_report(fitted: dict[str, dict[str, Any]]) -> None:
    """Print the measured throughput, the fitted fractions and the predictions."""
    for law, (way, speedup_of) in LAWS.items():
        found = fitted[law]
        largest = max(found["speedups"])
        fraction = f"parallel fraction {100 * found['fraction']:.2f} %, fitted at {largest} ranks"
        print(f"\n{law.capitalize()}: the {way}; {fraction}")
        predicted: Sequence[int] = _PREDICTED
        if not found["fits"]:
            predicted = ()
            how = "slower than one" if found["fraction"] == 0.0 else "faster than their number allows"
            print(f"note: {largest} ranks are {how}, so no parallel fraction fits, and no prediction is made")
        print(f"{'ranks':>7}{'measured':>17}{'speed-up':>11}{'efficiency':>12}{'the law says':>27}")
        for world_size in sorted({*found["speedups"], *predicted}):
            law_says = speedup_of(world_size, found["fraction"])
            shown = f"{_rate(found['one'], law_says, world_size):>18}{law_says:9.2f} x"
            measured = found["speedups"].get(world_size)
            if measured is None:
                print(f"{world_size:7}{'-':>17}{'-':>11}{'-':>12}{shown}")
                continue
            rate, efficiency = _rate(found["one"], measured, world_size), f"{100 * measured / world_size:.1f} %"
            print(f"{world_size:7}{rate:>17}{measured:9.2f} x{efficiency:>12}{shown}")
    print("\nspeed-up: times the samples/s of one rank; efficiency: the speed-up divided by the number of ranks")


def _rate(rate_of_one: float, speedup: float, world_size: int) -> str:
    return f"{throughput(rate_of_one, world_size, speedup / world_size):.0f} samples/s"


def plot(fitted: dict[str, dict[str, Any]], path: Path) -> None:
    """Plot the measured and predicted speed-ups over the number of ranks, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4.2), layout="constrained")
    ranks = [1, *_PREDICTED]
    axes.plot(ranks, ranks, ":", color="gray", label="every rank counts in full")
    for number, (law, (way, speedup_of)) in enumerate(LAWS.items()):
        found, color = fitted[law], f"C{number}"
        label = f"{law.capitalize()}: the {way}, p = {found['fraction']:.3f}"
        axes.plot(ranks, [speedup_of(n, found["fraction"]) for n in ranks], color=color, label=label)
        axes.plot(list(found["speedups"]), list(found["speedups"].values()), "o", color=color)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.set(xlabel="ranks", ylabel="speed-up", title="dots are measured, lines are the laws")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=120, format="png")
    pyplot.close(figure)


def main() -> int:
    """Measure, print the report, write the requested files, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--nproc", type=at_least(2), nargs="+", default=[2], metavar="N",
        help="numbers of ranks, besides a single one (default: 2)",
    )  # fmt: skip
    parser.add_argument(
        "--batch", type=at_least(1), default=64, metavar="B", help="samples of a single rank (default: 64)"
    )
    parser.add_argument("--updates", type=at_least(1), default=30, metavar="U", help="measured updates (default: 30)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a PNG")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to this file")
    args = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    if max(args.nproc) > cores:
        print(f"note: {max(args.nproc)} ranks share {cores} cores, and so cannot scale beyond them")
    try:
        fitted = fit(measure(sorted({1, *args.nproc}), args.batch, args.updates))
    except (LaunchError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    print(f"{cores} cores; a RoBERTa of two layers, {args.batch} samples of one rank alone, {args.updates} updates")
    print_report(fitted)
    numbers = {"cores": cores, "batch": args.batch, "laws": fitted}
    return 0 if write_outputs(numbers, args.json, lambda path: plot(fitted, path), args.plot) else 1


if __name__ == "__main__":
    sys.exit(main())
