"""Test ``mindnlp-dp doctor --devices`` with two CPU ranks: it finds the errors that tests put in, and no others."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from conftest import ROOT, TIMEOUT_SECONDS
from mindnlp_dp.commands.doctor import device_report

# Python imports such a module from PYTHONPATH when it starts, in every rank.
WRONG_MINIMUM = """
import numpy as np
from mindnlp_dp.communication.process_group import ProcessGroup

right = ProcessGroup.all_reduce

def all_reduce(self, x, op="sum", **options):
    result = right(self, x, op, **options)
    return result + 1 if op == "min" and self.rank == 1 and x.dtype == np.float32 else result

ProcessGroup.all_reduce = all_reduce
"""
WRONG_WEIGHT = """
from mindnlp_dp.data_parallel.accumulation import BufferedAccumulator

right = BufferedAccumulator.accumulate

def accumulate(self, gradients, weight=1.0, *rest, **options):
    return right(self, gradients, 3 * weight if self.group.rank == 1 else weight, *rest, **options)

BufferedAccumulator.accumulate = accumulate
"""


@pytest.fixture
def inject(tmp_path, monkeypatch):
    """Return a function that makes every new Python process run some code when it starts."""

    def run(code):
        (tmp_path / "injected").mkdir()
        (tmp_path / "injected/sitecustomize.py").write_text(code)
        path = [str(tmp_path / "injected"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))

    return run


@pytest.mark.core
def test_a_wrong_collective_is_found_on_the_rank_that_has_it(tmp_path, inject, monkeypatch, capsys):
    inject(WRONG_MINIMUM)
    monkeypatch.setattr(device_report, "checks_for", lambda _: [("collectives", device_report.check_collectives)])
    assert device_report.run_device_report([0, 1], tmp_path / "report.md") == 1
    said = "all_reduce, min of float32: rank 1: 12 of 12 elements differ; at (0, 0): 1.0 instead of 0.0"
    assert f"FAIL collectives: {said}" in capsys.readouterr().out
    assert "| collectives | **fails** | " in (tmp_path / "report.md").read_text()


@pytest.mark.slow
def test_wrong_gradients_are_found(tmp_path, inject, monkeypatch, capsys):
    inject(WRONG_WEIGHT)
    checks = [("equivalence with one process", device_report.check_equivalence)]
    monkeypatch.setattr(device_report, "checks_for", lambda _: checks)
    assert device_report.run_device_report([0, 1], tmp_path / "report.md") == 1
    assert "FAIL equivalence with one process: the losses differ by " in capsys.readouterr().out


def test_a_job_that_fails_is_shown(tmp_path, inject, monkeypatch):
    inject("import sys\nif 'worker' in ' '.join(sys.orig_argv):\n    sys.exit('the driver is not loaded')\n")
    monkeypatch.setattr(device_report, "checks_for", lambda _: [("collectives", device_report.check_collectives)])
    assert device_report.run_device_report([0, 1], tmp_path / "report.md") == 1
    text = (tmp_path / "report.md").read_text()
    assert "## The end of the output of: collectives" in text
    assert "exit code" in text


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_whole_report(tmp_path):
    (tmp_path / "scratch").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "mindnlp_dp", "doctor", "--devices", "0,1", "--report", "out/report.md"], cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path / "scratch")}, capture_output=True, text=True,
        timeout=3 * TIMEOUT_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = (tmp_path / "out/report.md").read_text()
    num_checks = len(list(device_report.checks_for(2)))
    assert report.count("| holds |") == num_checks == done.stdout.count("  ok   ")
    # Nothing is left, and nothing was written elsewhere.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "scratch"]
    assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.parametrize("devices", [[0], [1, 1], []])
def test_devices_that_cannot_be(tmp_path, devices):
    with pytest.raises(ValueError, match="--devices takes two different numbers or more, such as 0,1; got"):
        device_report.run_device_report(devices, tmp_path / "report.md")
    assert not (tmp_path / "report.md").exists()
