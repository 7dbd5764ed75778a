"""This module runs ``mindnlp-dp scaling``: it measures one rank and several, and prints and plots the laws' fit."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

from mindnlp_dp.launch.run import run_measurement
from mindnlp_dp.report.outputs import write_outputs

# The laws of Amdahl and Gustafson say what N devices gain when a fraction p of the work can be divided among them.
# Amdahl keeps the work fixed: the global batch is constant, and each device gets less of it. Gustafson lets the work
# grow: the batch of each device is constant.
#
# Amdahl, "Validity of the single processor approach to achieving large scale computing capabilities", AFIPS 1967.
# Gustafson, "Reevaluating Amdahl's law", Communications of the ACM 31(5), 1988.


def amdahl_speedup(num_devices: float, fraction: float) -> float:
    """Return how many times faster the same work is done: ``1 / ((1 - p) + p / N)``.

    >>> amdahl_speedup(4, 1.0), amdahl_speedup(4, 0.0), round(amdahl_speedup(1_000_000, 0.9), 2)
    (4.0, 1.0, 10.0)
    """
    _check(num_devices, fraction)
    return 1 / ((1 - fraction) + fraction / num_devices)


def gustafson_speedup(num_devices: float, fraction: float) -> float:
    """Return how many times more work is done in the same time: ``(1 - p) + p N``.

    >>> gustafson_speedup(4, 1.0), gustafson_speedup(4, 0.0), gustafson_speedup(10, 0.5)
    (4.0, 1.0, 5.5)
    """
    _check(num_devices, fraction)
    return (1 - fraction) + fraction * num_devices


def parallel_fraction(num_devices: float, speedup: float, law: str = "amdahl") -> float:
    """Return the fraction for which a law gives this speed-up; above 1 if the speed-up exceeds the number of devices.

    >>> parallel_fraction(2, amdahl_speedup(2, 0.8)), parallel_fraction(8, gustafson_speedup(8, 0.75), "gustafson")
    (0.8, 0.75)
    """
    if num_devices <= 1 or speedup <= 0:
        raise ValueError(f"a fraction needs 2 devices or more and a speed-up, got {num_devices} and {speedup}")
    if law == "amdahl":
        return (1 - 1 / speedup) / (1 - 1 / num_devices)
    if law == "gustafson":
        return (speedup - 1) / (num_devices - 1)
    raise ValueError(f'law must be "amdahl" or "gustafson", got {law!r}')


def throughput(rate_of_one: float, num_devices: float, efficiency: float) -> float:
    """Return samples per second: the rate of one device, times the number of devices, times the efficiency.

    >>> throughput(400, 2, 0.95)
    760.0
    """
    return rate_of_one * num_devices * efficiency


def _check(num_devices: float, fraction: float) -> None:
    if num_devices < 1 or not 0 <= fraction <= 1:
        raise ValueError(f"expected 1 device or more and a fraction from 0 to 1, got {num_devices} and {fraction}")


_PREDICTED = (2, 4, 8, 16, 32, 64)

LAWS = {
    "amdahl": ("global batch stays", amdahl_speedup),
    "gustafson": ("rank's batch stays", gustafson_speedup),
}


def measure(world_sizes: Sequence[int], batch: int, num_updates: int) -> dict[int, dict[str, float]]:
    """Measure samples per second for each number of ranks, for both kinds of batch; run one job after another.

    Raises:
        RuntimeError: a job failed.
    """
    flags = ["--batch", str(batch), "--updates", str(num_updates)]
    return {
        world_size: run_measurement("mindnlp_dp.commands.scaling.throughput_job", world_size, flags)[
            "samples_per_second"
        ]
        for world_size in world_sizes
    }


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
        print(f"\n{law.capitalize()}: the {way}; parallel fraction {found['fraction']:.4f}")
        predicted: Sequence[int] = _PREDICTED
        if not found["fits"]:
            predicted = ()
            how = "slower than one" if found["fraction"] == 0.0 else "faster than as many of one"
            print(f"note: {max(found['speedups'])} ranks are {how}, which no fraction explains; nothing is predicted")
        print(f"{'ranks':>7}{'rate of one':>14}{'efficiency':>12}{'samples/s':>12}{'speed-up':>10}{'the law says':>14}")
        for world_size in sorted({*found["speedups"], *predicted}):
            law_says = speedup_of(world_size, found["fraction"])
            measured = found["speedups"].get(world_size)
            efficiency = (law_says if measured is None else measured) / world_size
            rate = throughput(found["one"], world_size, efficiency)
            shown = "" if measured is None else f"{measured:.2f}"
            print(f"{world_size:7}{found['one']:14.0f}{efficiency:12.3f}{rate:12.0f}{shown:>10}{law_says:14.2f}")
    print("\nA row without a speed-up is the law's prediction: rate of one x ranks x efficiency.")


def plot(fitted: dict[str, dict[str, Any]], path: Path) -> None:
    """Plot the measured and predicted speed-ups over the number of ranks, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4.2), layout="constrained")
    ranks = [1, *_PREDICTED]
    axes.plot(ranks, ranks, ":", color="grey", label="every rank counts in full")
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


def run(
    nproc: Sequence[int], batch: int, num_updates: int, plot_file: Optional[Path], json_file: Optional[Path]
) -> int:
    """Measure, print the report, write the requested files, and return the exit code."""
    world_sizes = sorted({1, *nproc})
    if len(world_sizes) < 2:
        raise ValueError("scaling compares one rank with several; --nproc needs a number of at least 2")
    cores = len(os.sched_getaffinity(0))
    if max(world_sizes) > cores:
        print(f"note: {max(world_sizes)} ranks share {cores} cores, and so cannot scale beyond them")
    fitted = fit(measure(world_sizes, batch, num_updates))
    print(f"{cores} cores; a RoBERTa of two layers, {batch} samples of one rank alone, {num_updates} updates")
    print_report(fitted)
    numbers = {"cores": cores, "batch": batch, "laws": fitted}
    return 0 if write_outputs(numbers, json_file, lambda path: plot(fitted, path), plot_file) else 1
