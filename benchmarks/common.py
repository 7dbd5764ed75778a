"""This module has what all benchmarks share: their flags, jobs on several ranks, medians and tables."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Callable, Optional, Union

ROOT = Path(__file__).resolve().parent.parent
# A command, and its additional environment variables.
Job = tuple[Sequence[str], Mapping[str, str]]
MINDSPORES_KERNELS = {"MINDNLP_DP_KERNELS": "mindspore"}
TORCH_HINT = 'PyTorch is not here; pip install "mindnlp-dp[compare]", or --torch-python /path/to/python that has it'


def run_benchmark(
    doc: Optional[str],
    measure: Callable[[argparse.Namespace], Mapping[str, Any]],
    jobs: Mapping[str, Callable[[argparse.Namespace], Any]],
    *,
    repeats: int = 0,
    torch: bool = False,
    **flags: Mapping[str, Any],
) -> None:
    """Parse the flags of a benchmark's script, and run the whole benchmark, or one of its ``jobs`` on this rank.

    ``measure`` runs the benchmark, prints its table and returns numbers for ``--json``. It starts this script again as
    a job, by :func:`job_of`; rank 0 writes what the job returns.

    Args:
        repeats: The default of ``--repeats``; 0: there is no such flag.
        torch: Whether PyTorch is measured, too: ``torch_python`` is None if it is not installed.
        flags: Further flags, with the arguments of ``add_argument``; those without help are for jobs only.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if repeats:
        parser.add_argument("--repeats", type=int, default=repeats, help="jobs of every kind")
    if torch:
        parser.add_argument("--torch-python", default=sys.executable, help="a Python that has PyTorch")
    for name, options in flags.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **{"help": argparse.SUPPRESS, **options})
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--job", choices=jobs, help=argparse.SUPPRESS)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        numbers = jobs[args.job](args)
        from mindnlp_dp.communication.default_group import current_group

        group = current_group()
        if group is None or group.is_main:
            args.write.write_text(json.dumps(numbers))
        return
    if torch and not has_torch(args.torch_python):
        print(TORCH_HINT)
        args.torch_python = None
    write_json(args.json, {"machine": machine(), **measure(args)})


def machine() -> str:
    # Imported here, because gloo.py may run with a Python without mindnlp_dp.
    from mindnlp_dp.runtime.devices import machine as describe

    return describe()


def has_torch(python: str) -> bool:
    return subprocess.run([python, "-c", "import torch"], capture_output=True).returncode == 0


def launched(backend: str, num_ranks: int = 2) -> list[str]:
    """Return the command that launches a script on several ranks; the script's path follows it."""
    return [sys.executable, "-m", "mindnlp_dp", "run", "--nproc", str(num_ranks), "--backend", backend]


def on_one_core(python: str = sys.executable) -> list[str]:
    """Return the command that runs a script in one process on one core."""
    return ["taskset", "-c", str(min(os.sched_getaffinity(0))), python]


def job_of(script: str, kind: str, num_ranks: int = 2, *flags: Any, backend: str = "mpi") -> list[str]:
    """Return the command that runs a job of a benchmark's script on several ranks, or in one process."""
    front = launched(backend, num_ranks) if num_ranks > 1 else [sys.executable]
    return [*front, script, "--job", kind, *map(str, flags)]


def gloo(python: str, kind: str, num_ranks: int = 2) -> list[str]:
    """Return the command that measures PyTorch."""
    return [python, str(ROOT / "benchmarks/gloo.py"), "--kind", kind, "--nproc", str(num_ranks)]


def run_job(command: Sequence[str], environment: Mapping[str, str] = {}) -> Any:
    """Run a command with ``--write FILE`` appended, and return the JSON that it wrote to the file.

    ``environment`` is added to its environment variables.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "result.json")
        run_command([*command, "--write", str(file)], environment)
        if not file.exists():
            sys.exit(f"{' '.join(command)} has ended without a result")
        return json.loads(file.read_text())


def run_finetune(command: Sequence[str], **settings: Any) -> dict[str, Any]:
    """Run scripts/finetune.py by a command with these settings, and return its report."""
    flags = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    with tempfile.TemporaryDirectory() as folder:
        run_command([*command, str(ROOT / "scripts/finetune.py"), *flags, "--output-dir", folder])
        return json.loads(Path(folder, "report.json").read_text())


def run_command(command: Sequence[str], environment: Mapping[str, str] = {}) -> None:
    """Run a command without its output, with logs in a folder that is removed; end this script if it fails."""
    with tempfile.TemporaryDirectory() as logs:
        at = command.index("run") + 1 if "mindnlp_dp" in command else 0
        full = [*command[:at], *(["--log-dir", f"{logs}/logs"] if at else []), *command[at:]]
        done = subprocess.run(full, capture_output=True, text=True, env={**os.environ, **environment})
        if done.returncode != 0:
            sys.exit(f"{' '.join(full)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")


def in_turns(jobs: Mapping[str, Job], repeats: int) -> dict[str, list[Any]]:
    """Return the results of jobs that run in turns, ``repeats`` times each; stderr names the one that runs."""
    results: dict[str, list[Any]] = {name: [] for name in jobs}
    for repeat in range(repeats):
        for number, (name, job) in enumerate(jobs.items(), start=repeat * len(jobs) + 1):
            print(f"job {number} of {repeats * len(jobs)}: {name}", file=sys.stderr, flush=True)
            results[name].append(run_job(*job))
    return results


def median_seconds(barrier: Callable[[], Any], function: Callable[[], Any], repeats: int) -> float:
    """Return the median time of a call that all ranks begin together; the first two calls do not count."""
    times = []
    for number in range(repeats + 2):
        barrier()
        began = time.perf_counter()
        function()
        if number >= 2:
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def proportional_bytes(pid: Union[int, str] = "self") -> int:
    """Return the memory of a process as Linux's PSS, which splits memory equally among the processes that share it."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def peak_bytes() -> int:
    """Return the largest resident memory of this process since :func:`reset_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Return the median of the ratios of jobs that ran in the same round, not the ratio of the medians."""
    return round(statistics.median(a / b for a, b in zip(above, below)), 3)


def print_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print rows of cells under a header, the first column at the left margin and the others at their right."""
    lines = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    for first, *others in lines:
        print(first.ljust(widths[0]) + "".join(cell.rjust(2 + width) for cell, width in zip(others, widths[1:])))


def write_json(path: Optional[Path], numbers: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(numbers, indent=2) + "\n")
