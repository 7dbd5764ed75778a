"""Test ``mindnlp-dp doctor --devices`` with two ranks: it finds the errors that tests put in, and no others.

The ranks are those of a CPU, and those of a host with NPUs: over MCCL, but with the updaters and checks of devices.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from npu_host import ACCEPTS_NPUS, EXCHANGES_AS_ON_A_DEVICE, NpuHost

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
from mindnlp_dp.data_parallel.synchronizer_base import BufferedSynchronizer

right = BufferedSynchronizer.accumulate

def accumulate(self, gradients, weight=1.0, *rest, **options):
    return right(self, gradients, 3 * weight if self.group.rank == 1 else weight, *rest, **options)

BufferedSynchronizer.accumulate = accumulate
"""
# A device may sum in another order in each job and in each kind of collective: last bits differ, the same on all ranks.
ROUNDS_OTHERWISE = """
import os
import sys

if "mindnlp_dp.launch.processes.worker" in sys.orig_argv:
    right_reduce, right_scatter = MindSporeChannel.all_reduce_async, MindSporeChannel.reduce_scatter_async
    job = int(os.environ["MINDNLP_DP_JOB"], 16)

    def rounded(self, x):
        out, handle = right_reduce(self, x)
        return out * (1 + job % 4 * 2.0**-22), handle

    def scattered(self, x):
        out, handle = right_scatter(self, x)
        return out * (1 + 5 * 2.0**-22), handle

    MindSporeChannel.all_reduce_async, MindSporeChannel.reduce_scatter_async = rounded, scattered
"""
# Errors that only a part of the report can find.
OTHER_SAMPLES = """
from mindnlp_dp.data.sampler import GlobalBatchSampler

right_positions = GlobalBatchSampler.shard_positions

def shard_positions(self, num_samples, rank):
    return right_positions(self, num_samples, 0)

GlobalBatchSampler.shard_positions = shard_positions
"""
SLICES_THAT_ARE_NOT_UPDATED = """
from mindnlp_dp.optim.zero.device_updater import DeviceUpdater

right_update = DeviceUpdater.update

def update(self, gradients):
    slices, used = gradients
    if self._group.rank == 1:
        slices = {number: part * 0 for number, part in slices.items()}
    right_update(self, (slices, used))

DeviceUpdater.update = update
"""
RANKS_THAT_DRIFT_APART = """
from mindnlp_dp.optim.zero.device_updater import DeviceUpdater

right_publish = DeviceUpdater._publish

def publish(self, number, used):
    if self._group.rank == 0 or number:
        return right_publish(self, number, used)
    before = [p.copy() for p in self.parameters]
    right_publish(self, number, used)
    self.parameters[0].assign_value(before[0])

DeviceUpdater._publish = publish
"""
WITHOUT_STATE = """
from mindnlp_dp.optim.updater import MindNLPUpdater

right_load = MindNLPUpdater.load_optimizer_state

def load_optimizer_state(self, saved):
    right_load(self, {**saved, "state": {}})

MindNLPUpdater.load_optimizer_state = load_optimizer_state
"""
AFTER_ANOTHER_BATCH = """
from mindnlp_dp.data.sampler import GlobalBatchSampler

right_batches = GlobalBatchSampler.global_batches

def global_batches(self, epoch, start=0, offset=0):
    return right_batches(self, epoch, start + 1 if start else 0, offset)

GlobalBatchSampler.global_batches = global_batches
"""


@pytest.fixture
def npus(tmp_path, monkeypatch):
    """Return a host with NPUs, whose jobs run over MCCL."""
    host = NpuHost(tmp_path / "host", monkeypatch)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.environ["PYTHONPATH"], str(ROOT)]))
    host.inject(ACCEPTS_NPUS)
    host.inject(EXCHANGES_AS_ON_A_DEVICE)
    return host


def only(monkeypatch, *names):
    """Let the report consist of these checks."""
    everything = dict(device_report.checks_for(2))
    monkeypatch.setattr(device_report, "checks_for", lambda _: [(name, everything[name]) for name in names])


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
def test_the_device_report_finds_a_wrong_collective_and_its_rank(tmp_path, inject, monkeypatch, capsys):
    inject(WRONG_MINIMUM)
    monkeypatch.setattr(device_report, "checks_for", lambda _: [("collectives", device_report.check_collectives)])
    assert device_report.run_device_report([0, 1], tmp_path / "report.md") == 1
    said = "all_reduce, min of float32: rank 1: 12 of 12 elements differ; at (0, 0): 1.0 instead of 0.0"
    assert f"FAIL collectives: {said}" in capsys.readouterr().out
    assert "| collectives | **fails** | " in (tmp_path / "report.md").read_text()


@pytest.mark.slow
def test_the_device_report_finds_wrong_gradients(tmp_path, inject, monkeypatch, capsys):
    inject(WRONG_WEIGHT)
    checks = [("equivalence with one process", device_report.check_equivalence)]
    monkeypatch.setattr(device_report, "checks_for", lambda _: checks)
    assert device_report.run_device_report([0, 1], tmp_path / "report.md") == 1
    assert "FAIL equivalence with one process: the losses differ by " in capsys.readouterr().out


def test_the_device_report_shows_the_output_of_a_failed_job(tmp_path, inject, monkeypatch):
    inject("import sys\nif 'worker' in ' '.join(sys.orig_argv):\n    sys.exit('the driver is not loaded')\n")
    monkeypatch.setattr(device_report, "checks_for", lambda _: [("collectives", device_report.check_collectives)])
    assert device_report.run_device_report([0, 1], tmp_path / "report.md") == 1
    text = (tmp_path / "report.md").read_text()
    assert "## The end of the output of: collectives" in text
    assert "exit code" in text


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_device_report_passes_all_checks_on_a_cpu_and_leaves_no_files(tmp_path):
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


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_device_report_passes_all_checks_on_npus_that_round_differently(tmp_path, npus, capsys):
    """ZeRO's stages and a resumed run need not end with equal bits, because a device may round in another way."""
    npus.inject(ROUNDS_OTHERWISE)
    assert device_report.run_device_report([1, 0], tmp_path / "report.md") == 0
    said, report = capsys.readouterr().out, (tmp_path / "report.md").read_text()
    assert report.count("| holds |") == len(list(device_report.checks_for(2))) == said.count("  ok   ")
    assert said.count("(for information: the weights ") == 3
    assert "differ in bits)" in next(line for line in said.splitlines() if "ZeRO stage 2" in line)
    assert "# mindnlp_dp on 2 devices: Ascend\n" in report
    assert "- devices 0, 1\n" in report
    required = (
        "ZeRO's stages and a resumed run train what stage 0 does (losses within 0.0002, gradient norms within 0.1%)"
    )
    assert required in report


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("error", "found"),
    [
        (WRONG_MINIMUM, ("collectives", "all_reduce, min of float32: rank 1: 12 of 12 elements differ")),
        (WRONG_WEIGHT, ("equivalence with one process", "the losses differ by ")),
        (OTHER_SAMPLES, ("equivalence with one process", "the losses differ by ")),
        (SLICES_THAT_ARE_NOT_UPDATED, ("ZeRO stage 1", "the losses differ by ")),
        (SLICES_THAT_ARE_NOT_UPDATED, ("ZeRO stage 2", "the losses differ by ")),
        (RANKS_THAT_DRIFT_APART, ("ZeRO stage 2", "")),
        (WITHOUT_STATE, ("killed and resumed", "the losses differ by ")),
        (AFTER_ANOTHER_BATCH, ("killed and resumed", "the losses differ by ")),
    ],
    ids=[
        "a collective", "gradients", "samples", "slices of stage 1", "slices of stage 2", "replicas", "optimizer state",
        "position in the data",
    ],
)  # fmt: skip
def test_the_device_report_finds_injected_errors_on_npus(tmp_path, npus, monkeypatch, error, found):
    check, said = found
    npus.inject(error)
    only(monkeypatch, check)
    assert device_report.run_device_report([0, 1], tmp_path / "report.md") == 1
    row = next(line for line in (tmp_path / "report.md").read_text().splitlines() if line.startswith(f"| {check} |"))
    assert "**fails**" in row
    assert said in row


@pytest.mark.parametrize(
    ("visible", "devices", "said"),
    [
        ("4,5", [0, 1], "--devices names 0, 1, but the visible ones are 4, 5"),
        ("4,5", [4, 6], "--devices names 6, but the visible ones are 4, 5"),
        ("5,4", [4, 5], "is not a list for CANN: it takes ascending ids"),
    ],
)
def test_the_device_report_refuses_devices_that_are_not_visible(tmp_path, monkeypatch, visible, devices, said):
    NpuHost(tmp_path / "host", monkeypatch)
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", visible)
    with pytest.raises(ValueError, match=said):
        device_report.run_device_report(devices, tmp_path / "report.md")


def test_the_device_report_gives_jobs_their_devices_in_ascending_order(tmp_path, monkeypatch):
    """CANN takes no other order."""
    NpuHost(tmp_path / "host", monkeypatch)
    seen = []
    monkeypatch.setattr(device_report, "checks_for", lambda _: [("x", lambda jobs: seen.append(jobs) or "")])
    assert device_report.run_device_report([3, 1, 10], tmp_path / "report.md") == 0
    environ = seen[0].environment(3)
    assert (environ["DEVICE_TARGET"], environ["ASCEND_RT_VISIBLE_DEVICES"]) == ("Ascend", "1,3,10")


@pytest.mark.parametrize("devices", [[0], [1, 1], []])
def test_the_device_report_refuses_fewer_than_two_different_devices(tmp_path, devices):
    with pytest.raises(ValueError, match="--devices takes two or more different numbers, such as 0,1; got"):
        device_report.run_device_report(devices, tmp_path / "report.md")
    assert not (tmp_path / "report.md").exists()
