"""Start jobs for the failure tests, and check how they end: exit code, message, no process left, no partial file.

All tests of this folder use these helpers and fixtures.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import NamedTuple, Optional

import psutil
import pytest

from mindnlp_dp.launch.processes.run_module import PYTHON_VARIABLE

ROOT = Path(__file__).resolve().parent.parent.parent
# A job takes one or two seconds, and ten if it imports MindSpore itself. If other jobs keep the cores busy, three ranks
# on two cores wait for each other for seconds in each update.
TIMEOUT_SECONDS = 500
# The time that a fork server gives its ranks after their proxies were killed, and a margin.
FORKED_RANKS_SECONDS = 10.0
BACKENDS = ("mpi", "mindspore")
core, slow = pytest.mark.core, pytest.mark.slow
# For tests for which one backend is enough in the shorter suites; core tests among them.
MPI_FIRST = ("mpi", pytest.param("mindspore", marks=slow))
CORE_UNDER_MPI = (pytest.param("mpi", marks=core), pytest.param("mindspore", marks=slow))
ONE_AFTER_ANOTHER = Path(__file__).with_name("one_after_another.py")
# The fork server of this suite: its children are the ranks of the jobs.
fork_server: Optional[subprocess.Popen] = None


class Job(NamedTuple):
    """Holds a job's exit code and the output of its launcher."""

    exit_code: int
    output: str


@pytest.fixture(scope="session", autouse=True)
def _shared_fork_server():
    """Fork the ranks of all jobs from a process that has imported MindSpore and MindNLP."""
    global fork_server
    # Scripts import the shared test modules. A fork server only serves jobs whose PYTHONPATH equals its own.
    os.environ["PYTHONPATH"] = f"{ROOT / 'tests'}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    with tempfile.TemporaryDirectory(prefix="mindnlp-dp-") as folder:
        fork_server = subprocess.Popen(
            [sys.executable, ROOT / "tests/forked_ranks.py", folder], stdout=subprocess.PIPE, text=True,
            env={**os.environ, "GLOG_v": "3"},
        )  # fmt: skip
        assert any("ready" in line for line in fork_server.stdout)
        os.environ[PYTHON_VARIABLE] = os.path.join(folder, "python")
        yield
        del os.environ[PYTHON_VARIABLE]
        fork_server.kill()
        fork_server.wait()


@pytest.fixture
def own_imports(monkeypatch):
    """Let ranks import MindSpore and MindNLP themselves, as a user's ranks do."""
    monkeypatch.delenv(PYTHON_VARIABLE)


def _is_forked(process: psutil.Process) -> bool:
    return fork_server is not None and process.ppid() == fork_server.pid


def processes_of(folder: Path) -> list[psutil.Process]:
    """Return every process of a job: its command contains the log folder, or the shared fork server started it."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(folder) in " ".join(process.cmdline()) or _is_forked(process):
                found.append(process)
        except psutil.Error:
            pass
    return found


def assert_nothing_is_left(folder: Path, *, soon: bool = False) -> None:
    """Check that no process of the job with this log folder runs: now, or ``soon`` if its launcher did not wait.

    Ranks of the shared fork server always get the time that the server gives them.
    """
    found = processes_of(folder)
    if not soon:
        left = [process for process in found if not _is_forked(process)]
        assert not left, f"still running: {left}"
    _, left = psutil.wait_procs(found, timeout=FORKED_RANKS_SECONDS)
    assert not left, f"still running: {left}"


def job_command(folder: Path, *command, nproc=2, backend="mpi") -> list[str]:
    """Return ``mindnlp-dp run COMMAND`` with its log folder in ``folder``. A script may be given as its text.

    Without a ``backend``, the launcher chooses one.
    """
    command = list(command)
    for index, part in enumerate(command):
        if "\n" in str(part):
            command[index] = folder / "script.py"
            command[index].write_text(textwrap.dedent(part))
    run = [sys.executable, "-m", "mindnlp_dp", "run", "--nproc", nproc, *(["--backend", backend] if backend else [])]
    return [str(part) for part in (*run, "--log-dir", folder / "logs", *command)]


def run_job(folder: Path, *command, nproc=2, backend="mpi", **environ) -> Job:
    """Run ``mindnlp-dp run COMMAND`` in ``folder``, wait for it, and check that no process is left."""
    done = subprocess.run(
        job_command(folder, *command, nproc=nproc, backend=backend),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder, env={**os.environ, **environ},
        timeout=TIMEOUT_SECONDS,
    )  # fmt: skip
    # pytest shows this when a test fails.
    print(done.stdout)
    for log in sorted((folder / "logs").glob("latest/*.log")):
        print(f"--- {log.name}", log.read_text(errors="replace")[-5000:], sep="\n")
    assert_nothing_is_left(folder / "logs")
    return Job(done.returncode, done.stdout)


@pytest.fixture
def launch(tmp_path):
    return functools.partial(run_job, tmp_path)


def start_job(folder: Path, *command, nproc=2, backend="mpi", **options) -> subprocess.Popen:
    """Start a job and return its launcher. SIGINT, SIGHUP and SIGQUIT end it, as in a terminal."""

    def begin() -> None:
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)

    return subprocess.Popen(
        job_command(folder, *command, nproc=nproc, backend=backend), cwd=folder, text=True,
        preexec_fn=begin, **options,  # noqa: PLW1509
    )  # fmt: skip


def wait_for(condition, what: str) -> None:
    """Wait until ``condition()`` holds."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited {TIMEOUT_SECONDS} s for {what}"
        time.sleep(0.05)


def wait_for_files(folder: Path, pattern: str, count: int = 2) -> None:
    """Wait until ``count`` files match ``pattern``, for example one file for each rank."""
    wait_for(lambda: len(list(folder.glob(pattern))) >= count, f"{count} files {pattern}")


def run_one_after_another(folder: Path, runs: dict[str, list], *, nproc=2, **options) -> dict[str, list[Job]]:
    """Run several scripts in one job (one_after_another.py); return how each script ended on each rank."""
    (folder / "runs.json").write_text(json.dumps(runs, default=str))
    job = run_job(folder, ONE_AFTER_ANOTHER, "runs.json", nproc=nproc, **options)
    assert job.exit_code == 0, job.output
    ends = [json.loads((folder / f"runs_{rank}.json").read_text()) for rank in range(nproc)]
    return {name: [Job(**end[name]) for end in ends] for name in runs}
