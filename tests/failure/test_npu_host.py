"""Test the launcher on a simulated host with eight NPUs: files replace /dev/davinci*, and the ranks do not use them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from npu_host import NpuHost

from conftest import TIMEOUT_SECONDS, job_command, run_job, wait_for_files
from mindnlp_dp.launch.processes.environment import free_port
from mindnlp_dp.launch.processes.spawn import GRACE_SECONDS

# Each rank writes what the launcher gave to it.
SAYS_ITS_DEVICE = """
import json
import os

names = ("DEVICE_TARGET", "DEVICE_ID")
rank = os.environ.get("RANK_ID") or os.environ["OMPI_COMM_WORLD_RANK"]
said = {name: os.environ.get(name) for name in names} | {"cores": sorted(os.sched_getaffinity(0))}
with open(f"rank_{rank}.json", "w") as file:
    json.dump(said, file)
"""
CORES = sorted(os.sched_getaffinity(0))


@pytest.fixture
def host(tmp_path, monkeypatch):
    return NpuHost(tmp_path / "host", monkeypatch)


def said_by_ranks(folder):
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank_*.json"))]


@pytest.mark.core
@pytest.mark.parametrize("backend", [None, "mindspore"])
def test_ranks_use_npus_with_and_without_backend_mindspore(tmp_path, host, backend):
    """A rank of an NPU is not bound to cores, which may be far from its card."""
    job = run_job(tmp_path, SAYS_ITS_DEVICE, backend=backend)
    assert job.exit_code == 0
    is_told = "this host has Ascend cards, and its ranks use them; DEVICE_TARGET=CPU trains on the CPU" in job.output
    assert is_told == (backend is None)
    assert said_by_ranks(tmp_path) == [
        {"DEVICE_TARGET": "Ascend", "DEVICE_ID": str(rank), "cores": CORES} for rank in range(2)
    ]


def test_the_mpi_backend_uses_the_cpu_on_a_host_with_npus(tmp_path, host):
    job = run_job(tmp_path, SAYS_ITS_DEVICE, backend="mpi")
    assert job.exit_code == 0
    assert "this host has Ascend cards, and --backend mpi trains on its CPU; --backend mindspore" in job.output
    said = said_by_ranks(tmp_path)
    assert [rank["DEVICE_TARGET"] for rank in said] == ["CPU", "CPU"]
    if len(CORES) > 1:
        assert said[0]["cores"] != said[1]["cores"]


@pytest.mark.parametrize("backend", ["mindspore", "mpi"])
def test_the_device_target_of_the_user_is_kept(tmp_path, host, backend):
    job = run_job(tmp_path, SAYS_ITS_DEVICE, backend=backend, DEVICE_TARGET="Ascend" if backend == "mpi" else "CPU")
    assert job.exit_code == 0
    assert {rank["DEVICE_TARGET"] for rank in said_by_ranks(tmp_path)} == {"Ascend" if backend == "mpi" else "CPU"}
    assert "this host has" not in job.output


@pytest.mark.parametrize(
    ("nproc", "environ", "message"),
    [
        (16, {}, "16 workers, but this host has 8 Ascend devices to use; start at most 8"),
        (3, {"ASCEND_RT_VISIBLE_DEVICES": "4,5"}, "3 workers, but this host has 2 Ascend devices to use"),
        (
            3, {"ASCEND_RT_VISIBLE_DEVICES": "1, 2,3"},
            "ASCEND_RT_VISIBLE_DEVICES='1, 2,3' is not a list for CANN: it reads 1, and stops at any character that is "
            "neither a digit nor a comma; write, for example, ASCEND_RT_VISIBLE_DEVICES=1,2,3",
        ),
        (
            2, {"ASCEND_RT_VISIBLE_DEVICES": "1,0"},
            "ASCEND_RT_VISIBLE_DEVICES='1,0' is not a list for CANN: it takes ascending ids, each once; write, for "
            "example, ASCEND_RT_VISIBLE_DEVICES=0,1",
        ),
        (2, {"DEVICE_TARGET": "npu"}, "DEVICE_TARGET is npu, expected CPU, Ascend or GPU"),
    ],
)  # fmt: skip
def test_too_few_npus_and_invalid_device_variables_are_refused(tmp_path, host, nproc, environ, message):
    job = run_job(tmp_path, SAYS_ITS_DEVICE, nproc=nproc, backend="mindspore", **environ)
    assert (job.exit_code, said_by_ranks(tmp_path)) == (2, [])
    assert f"mindnlp-dp run: {message}" in job.output


def launchers_of_two_hosts(folder, **environ_of_the_second):
    """Start a job of two hosts, which are both this one, and return its launchers."""
    (folder / "script.py").write_text(SAYS_ITS_DEVICE)
    endpoint, environ = f"127.0.0.1:{free_port()}", {**os.environ, "MINDNLP_DP_RDZV_TOKEN": "for this test only"}
    launchers = []
    for number, more in enumerate(({}, environ_of_the_second)):
        options = ["--nproc", "1", "--nnodes", "2", "--rdzv-endpoint", endpoint, "--node-rank", str(number)]
        options += ["--rdzv-conf", "join_timeout=20", "--backend", "mindspore", "--log-dir", str(folder / "logs")]
        launchers.append(
            subprocess.Popen(
                [sys.executable, "-m", "mindnlp_dp", "run", *options, "script.py"], cwd=folder, env={**environ, **more},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
        )  # fmt: skip
    return launchers


def test_ranks_of_two_hosts_use_their_npus(tmp_path, host):
    for launcher in launchers_of_two_hosts(tmp_path):
        output, _ = launcher.communicate(timeout=TIMEOUT_SECONDS)
        assert launcher.returncode == 0, output
    # Each rank has the first card of its host.
    assert said_by_ranks(tmp_path) == [{"DEVICE_TARGET": "Ascend", "DEVICE_ID": "0", "cores": CORES}] * 2


def test_the_rendezvous_refuses_hosts_with_different_devices(tmp_path, host):
    first, second = launchers_of_two_hosts(tmp_path, DEVICE_TARGET="CPU")
    said = "its ranks would use CPU, and those of the endpoint's host Ascend; set the same DEVICE_TARGET on every host"
    assert said in second.communicate(timeout=TIMEOUT_SECONDS)[0]
    first.communicate(timeout=TIMEOUT_SECONDS)
    assert (first.returncode, second.returncode, said_by_ranks(tmp_path)) == (75, 2, [])


def test_ranks_on_npus_get_a_longer_grace_period_after_sigterm(tmp_path, host):
    """HCCL closes its links at exit; a rank that is killed meanwhile may leave its card unusable."""
    takes = GRACE_SECONDS + 2
    script = f"""
import signal, sys, time, pathlib

def end(*_):
    time.sleep({takes})
    pathlib.Path("ended_well").touch()
    sys.exit(0)

signal.signal(signal.SIGTERM, end)
pathlib.Path("began_0").touch()
time.sleep(600)
"""
    launcher = subprocess.Popen(job_command(tmp_path, script, nproc=1, backend="mindspore"), cwd=tmp_path)
    wait_for_files(tmp_path, "began_*", 1)
    began = time.monotonic()
    launcher.send_signal(signal.SIGTERM)
    launcher.wait()
    assert time.monotonic() - began >= takes
    assert (tmp_path / "ended_well").exists()
