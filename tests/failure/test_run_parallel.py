"""Test ``tests/run_parallel.py``, which runs the parallel suite: it leaves no ranks, and refuses to list tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

from conftest import ROOT, TIMEOUT_SECONDS, wait_for, wait_for_files

COMMAND = [sys.executable, str(ROOT / "tests/run_parallel.py"), "--launcher", "mpi", "--world-size", "2"]
WAITS = """
import os, signal, time

def test_waits(group):
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    open(f"{os.path.dirname(__file__)}/pid_{os.getpid()}", "w").close()
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_ranks_of_the_parallel_suite_and_removes_its_files(tmp_path, number):
    """The ranks ignore SIGTERM, as a rank does that waits inside a communication library."""
    (tmp_path / "scratch").mkdir()
    (tmp_path / "conftest.py").write_text("from parallel.conftest import *\n")
    (tmp_path / "test_waits.py").write_text(WAITS)
    environment = {**os.environ, "TMPDIR": str(tmp_path / "scratch")}
    with subprocess.Popen([*COMMAND, str(tmp_path / "test_waits.py")], env=environment) as suite:
        try:
            wait_for_files(tmp_path, "pid_*")
            ranks = [int(file.name.removeprefix("pid_")) for file in tmp_path.glob("pid_*")]
            suite.send_signal(number)
            assert suite.wait(TIMEOUT_SECONDS) == 128 + number
        finally:
            suite.kill()
    wait_for(lambda: not any(psutil.pid_exists(pid) for pid in ranks), "the end of the ranks")
    assert list((tmp_path / "scratch").glob("mindnlp-dp-parallel-*")) == []


@pytest.mark.parametrize("flag", ["--collect-only", "--co"])
def test_listing_the_tests_of_a_job_is_refused_with_the_command_that_lists_them(flag):
    done = subprocess.run([*COMMAND, flag], capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    assert done.returncode == 2
    assert "to list them, use: pytest --collect-only tests/parallel" in done.stderr
