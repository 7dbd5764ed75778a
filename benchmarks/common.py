"""This module runs jobs, reads their results and computes medians; all benchmarks call it."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Callable, Optional, Union

# A command, and its additional environment variables.
Job = tuple[list[str], Mapping[str, str]]
MINDSPORES_KERNELS = {"MINDNLP_DP_KERNELS": "mindspore"}
TORCH_HINT = 'PyTorch is not here; pip install "mindnlp-dp[compare]", or --torch-python /path/to/python that has it'


def machine() -> str:
    # Imported here, because gloo.py may run with a Python without mindnlp_dp.
    from mindnlp_dp.runtime.devices import machine as describe

    return describe()


def launched(backend: str, num_ranks: int = 2) -> list[str]:
    """Return the command that launches a script on several ranks; the script's path follows it."""
    return [sys.executable, "-m", "mindnlp_dp", "run", "--nproc", str(num_ranks), "--backend", backend]


def has_torch(python: str) -> bool:
    return subprocess.run([python, "-c", "import torch"], capture_output=True).returncode == 0


def run_job(command: list[str], environment: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """Run a command with ``--write FILE`` appended, and return the JSON that it wrote to the file.

    ``environment`` is added to its environment variables.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "result.json")
        log = ["--log-dir", f"{folder}/logs"]
        at = command.index("run") + 1 if "mindnlp_dp" in command else 0
        full = [*command[:at], *log, *command[at:]] if at else command
        done = subprocess.run(
            [*full, "--write", str(file)], capture_output=True, text=True, env={**os.environ, **environment}
        )
        if done.returncode != 0 or not file.exists():
            sys.exit(f"{' '.join(full)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        return json.loads(file.read_text())


def median_seconds(barrier: Callable[[], Any], function: Callable[[], Any], repeats: int) -> float:
    """Return the median time of a call that all ranks begin together; the first two calls do not count."""
    import time

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


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Return the median of the ratios of jobs that ran in the same round, not the ratio of the medians."""
    return round(statistics.median(a / b for a, b in zip(above, below)), 3)


def write_json(path: Optional[Path], numbers: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(numbers, indent=2) + "\n")
