"""Run a module that measures something under mpirun, and return its numbers; for the commands that measure.

The module gets ``--write FILE`` after its other flags, and writes its numbers to that file.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindnlp_dp.launch.run import run_job
from mindnlp_dp.launch.watch import JobOptions


def run_measurement(module: str, world_size: int, flags: Sequence[str]) -> Any:
    """Run ``module`` on ``world_size`` ranks and return the JSON that it wrote.

    Raises:
        RuntimeError: the job failed; it has printed the reason.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "measured.json")
        command = ["-m", module, *flags, "--write", str(file)]
        options = JobOptions(tee="none")
        if run_job(world_size, command, backend="mpi", log_dir=Path(folder, "logs"), options=options) != 0:
            raise RuntimeError(f"the job with {world_size} ranks failed; its message stands above")
        return json.loads(file.read_text())
