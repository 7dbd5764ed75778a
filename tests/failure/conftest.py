"""Jobs that must die well: an exit code, one message that names the rank, no process left, nothing half-written."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
TIMEOUT_SECONDS = 120
BACKENDS = ("mpi", "mindspore")


@dataclass
class Job:
    exit_code: int
    output: str
    log_dir: Path


def processes_of(log_dir: Path) -> list[psutil.Process]:
    """Every process of a job: its log folder stands in the command of each."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(log_dir) in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            pass
    return found


@pytest.fixture
def launch(tmp_path):
    """Run a script (its text, or a path) as ``mindnlp-dp run`` does, and wait; no process may be left."""

    def run(script, *args, nproc=2, backend="mpi", **environ) -> Job:
        if "\n" in str(script):
            path = tmp_path / "script.py"
            path.write_text(textwrap.dedent(script))
            script = path
        log_dir = tmp_path / "logs"
        command = [sys.executable, "-m", "mindnlp_dp", "run", "--nproc", str(nproc), "--backend", backend]
        done = subprocess.run(
            [*command, "--log-dir", str(log_dir), str(script), *map(str, args)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=tmp_path,
            env={**os.environ, **environ},
            timeout=TIMEOUT_SECONDS,
        )
        left = processes_of(log_dir)
        assert not left, f"still running: {left}"
        return Job(done.returncode, done.stdout, log_dir)

    return run
