"""Compare four algorithms of all-reduce on this host, or print the messages of one of them, step by step.

    python homework/algorithms.py --explain ring --nproc 4
    python homework/algorithms.py --plot outputs/algorithms.png        (needs MPI: pip install "mindnlp-dp[mpi]")

The algorithms are Reduce + Broadcast, DataParallel, a parameter server and the ring; theory/all_reduce.py has them. For
each, the table has the bytes and messages of the rank that sends most, compares those of all ranks with the formulas,
and compares the time of an all-reduce with the prediction of a cost model. docs/all_reduce.md explains them.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mindnlp_dp.launch.errors import LaunchError
from mindnlp_dp.launch.run import run_measurement
from mindnlp_dp.report.outputs import write_outputs
from theory.all_reduce import ALGORITHMS
from theory.costs import CostModel, traffic
from theory.explain import explain

JOB = str(Path(__file__).with_name("algorithms_job.py"))

# The fitted cost model of an algorithm; the default is "one at a time".
_PATTERN = {"ring": "all at once"}


def measure(world_sizes: Sequence[int], sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Run one job after another, one for each number of ranks; return what each of them has measured.

    Raises:
        LaunchError: a job could not start.
        RuntimeError: a job failed.
    """
    command = [JOB, "--bytes", *map(str, sizes)]
    return [run_measurement(command, world_size) for world_size in world_sizes]


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
    """Print one line for each algorithm, number of ranks and size of the array."""
    print("sent and messages: of the rank that sends most; formula: whether those of all ranks equal theory/costs.py")
    print(
        f"\n{'ranks':>5}  {'algorithm':18}{'array':>10}{'sent':>13}{'messages':>10}{'formula':>9}"
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


def print_models(jobs: Sequence[dict[str, Any]]) -> None:
    """Print the fitted cost models, by which the times are predicted."""
    print("\nA message of n bytes is predicted to take latency + n / bandwidth, and an addition n / its own rate:")
    for job in jobs:
        for pattern, model in job["models"].items():
            latency, *per_byte = model
            bandwidth, adding = (f"{1e-9 / each:.2f} GB/s" if each else "not limited" for each in per_byte)
            ranks = f"{job['world_size']:5} ranks, {pattern + ':':15}"
            print(f"{ranks} latency {1e6 * latency:.1f} us, bandwidth {bandwidth}, adding {adding}")


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


def at_least(least: int) -> Callable[[str], int]:
    """Return argparse's type for a number of at least ``least``."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a number of at least {least}, got {text}")
        return int(text)

    return number


def main() -> int:
    """Explain an algorithm, or measure all and print the table; return 1 if a file or a formula is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--explain", choices=ALGORITHMS, help="print the messages of this algorithm instead; needs no MPI"
    )
    parser.add_argument(
        "--nproc", type=at_least(2), nargs="+", default=[2, 4, 8], metavar="N", help="numbers of ranks (default: 2 4 8)"
    )
    parser.add_argument(
        "--bytes", type=at_least(4), nargs="+", default=[4096, 1 << 20, 1 << 24], metavar="B",
        help="sizes of the array of float32 (default: 4 KiB, 1 MiB, 16 MiB)",
    )  # fmt: skip
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a PNG")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to this file")
    args = parser.parse_args()
    if args.explain:
        # A reader that ends early (head, a pager) ends this process, without a traceback.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        print("\n\n".join(explain(args.explain, world_size) for world_size in args.nproc))
        return 0
    cores = len(os.sched_getaffinity(0))
    if max(args.nproc) > cores:
        print(f"note: {max(args.nproc)} ranks share {cores} cores: their times are not those of ranks with a core each")
    try:
        jobs = measure(args.nproc, args.bytes)
    except (LaunchError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    rows = [row for job in jobs for row in table_rows(job)]
    print(f"{cores} cores; all-reduce of float32; times are medians, of the slowest rank")
    print_table(rows)
    print_models(jobs)
    models = {job["world_size"]: job["models"] for job in jobs}
    numbers = {"cores": cores, "rows": rows, "models": models}
    is_written = write_outputs(numbers, args.json, lambda path: plot(rows, path), args.plot)
    return 0 if is_written and all(row["equals_formula"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
