"""This module runs ``mindnlp-dp algorithms``: every algorithm at every number of ranks, as a table and a plot.

For each algorithm it compares the counted bytes and messages of the rank that sends most with the formula, and the
measured time of an all-reduce with the cost model's prediction.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

from mindnlp_dp.commands.algorithms.costs import CostModel, traffic
from mindnlp_dp.launch.run import run_measurement
from mindnlp_dp.report.outputs import write_outputs

# The fitted cost model of an algorithm; the default is "one at a time".
_PATTERN = {"ring": "all at once"}


def measure(world_sizes: Sequence[int], sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Run one mpirun job after another, one for each number of ranks; return a row for each algorithm and size.

    Raises:
        RuntimeError: a job failed.
    """
    flags = ["--bytes", *map(str, sizes)]
    jobs = [
        run_measurement("mindnlp_dp.commands.algorithms.timing_job", world_size, flags) for world_size in world_sizes
    ]
    return [row for job in jobs for row in table_rows(job)]


def table_rows(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the table rows of a job: its measurements, with formulas and predictions."""
    rows, world_size = [], job["world_size"]
    for algorithm, measured in job["algorithms"].items():
        model = CostModel(*job["models"][_PATTERN.get(algorithm, "one at a time")])
        for one in measured:
            formulas = [traffic(algorithm, rank, world_size, one["bytes"] // 4) for rank in range(world_size)]
            counted = [tuple(sent) for sent in one["sent"]]
            rows.append(
                {
                    "algorithm": algorithm,
                    "world_size": world_size,
                    "bytes": one["bytes"],
                    "bytes_sent": max(num_bytes for _, num_bytes in counted),
                    "messages_sent": max(num_messages for num_messages, _ in counted),
                    "equals_formula": counted == [(each.num_messages, each.num_bytes) for each in formulas],
                    "seconds": one["seconds"],
                    "predicted_seconds": model.predict(algorithm, world_size, one["bytes"]),
                }
            )
    return rows


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Print one line for each algorithm and number of ranks."""
    print(
        f"{'ranks':>5}  {'algorithm':18}{'array':>10}{'sent, most':>13}{'messages':>10}{'formula':>9}"
        f"{'measured':>12}{'predicted':>12}"
    )
    previous = None
    for row in sorted(rows, key=lambda row: (row["world_size"], row["bytes"])):
        block = row["world_size"], row["bytes"]
        if previous not in (None, block):
            print()
        previous = block
        print(
            f"{row['world_size']:5}  {row['algorithm']:18}{_bytes(row['bytes']):>10}{_bytes(row['bytes_sent']):>13}"
            f"{row['messages_sent']:10}{'equal' if row['equals_formula'] else 'DIFFERS':>9}"
            f"{1e3 * row['seconds']:9.3f} ms{1e3 * row['predicted_seconds']:9.3f} ms"
        )


def _bytes(number: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.4g} {unit}"
        number /= 1024
    return f"{number:.4g} GiB"


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot the busiest rank's bytes, and the time for the largest array, over the number of ranks, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    largest = max(row["bytes"] for row in rows)
    chosen = [row for row in rows if row["bytes"] == largest]
    world_sizes = sorted({row["world_size"] for row in chosen})
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    algorithms = list(dict.fromkeys(row["algorithm"] for row in chosen))
    for number, name in enumerate(algorithms):
        mine = sorted((row for row in chosen if row["algorithm"] == name), key=lambda row: row["world_size"])
        color = f"C{number}"
        # Three algorithms send the same number of bytes; a small offset keeps their points apart.
        ranks = [row["world_size"] + 0.08 * (number - (len(algorithms) - 1) / 2) for row in mine]
        left.plot(ranks, [row["bytes_sent"] / largest for row in mine], "o-", color=color, label=name)
        right.plot(
            [row["world_size"] for row in mine], [1e3 * row["seconds"] for row in mine], "o-", color=color, label=name
        )
        right.plot(
            [row["world_size"] for row in mine], [1e3 * row["predicted_seconds"] for row in mine], "x:", color=color
        )
    left.set(title="what the busiest rank sends", xlabel="ranks", ylabel="times the array")
    right.set(title=f"time of an all-reduce of {_bytes(largest)}", xlabel="ranks", ylabel="ms (dotted: predicted)")
    for axes in (left, right):
        axes.set_ylim(0, None)
        axes.set_xticks(world_sizes)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False)
    figure.savefig(path, dpi=120, format="png")
    pyplot.close(figure)


def run(world_sizes: Sequence[int], sizes: Sequence[int], plot_file: Optional[Path], json_file: Optional[Path]) -> int:
    """Measure, print the table, write the requested files, and return the exit code."""
    cores = len(os.sched_getaffinity(0))
    rows = measure(world_sizes, sizes)
    print(f"{cores} cores; all-reduce of float32; times are medians, of the slowest rank")
    print_table(rows)
    is_written = write_outputs({"cores": cores, "rows": rows}, json_file, lambda path: plot(rows, path), plot_file)
    return 0 if is_written and all(row["equals_formula"] for row in rows) else 1
