"""Jobs that must die well: an exit code, one message that names the rank, no process left, nothing half-written."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
# A job takes ten seconds; on a busy machine many times that.
TIMEOUT_SECONDS = 200
BACKENDS = ("mpi", "mindspore")
ONE_AFTER_ANOTHER = Path(__file__).with_name("one_after_another.py")


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


def run_job(folder: Path, script, *args, nproc=2, backend="mpi", **environ) -> Job:
    """Run a script (its text, or a path) in ``folder`` as ``mindnlp-dp run`` does, and wait; no process may be left."""
    if "\n" in str(script):
        path = folder / "script.py"
        path.write_text(textwrap.dedent(script))
        script = path
    log_dir = folder / "logs"
    command = [sys.executable, "-m", "mindnlp_dp", "run", "--nproc", str(nproc), "--backend", backend]
    done = subprocess.run(
        [*command, "--log-dir", str(log_dir), str(script), *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env={**os.environ, **environ},
        timeout=TIMEOUT_SECONDS,
    )
    # Seen where a test fails: what the job printed, and what each of its ranks did.
    print(done.stdout)
    for log in sorted(log_dir.glob("*.log")):
        print(f"--- {log.name}", log.read_text(errors="replace")[-5000:], sep="\n")
    left = processes_of(log_dir)
    assert not left, f"still running: {left}"
    return Job(done.returncode, done.stdout, log_dir)


@pytest.fixture
def launch(tmp_path):
    return functools.partial(run_job, tmp_path)


def run_one_after_another(folder: Path, runs: dict[str, list], *, nproc=2, **options) -> dict[str, list[Job]]:
    """Run several scripts in one job (one_after_another.py); returns how each ended, on each rank."""
    (folder / "runs.json").write_text(json.dumps(runs, default=str))
    job = run_job(folder, ONE_AFTER_ANOTHER, "runs.json", nproc=nproc, **options)
    assert job.exit_code == 0, job.output
    ends = [json.loads((folder / f"runs_{rank}.json").read_text()) for rank in range(nproc)]
    return {name: [Job(log_dir=job.log_dir, **end[name]) for end in ends] for name in runs}
