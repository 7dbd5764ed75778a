"""Test what the batch scripts of scripts/slurm/ do when Slurm signals that a job's time limit is near.

Slurm's commands are stand-ins: srun runs the command on this host, scancel signals what srun has started, and scontrol
notes what there is when the job is requeued. The signals and the jobs are real.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT, TIMEOUT_SECONDS, assert_nothing_is_left, run_job, wait_for

ELASTIC = ROOT / "tests/failure/elastic.py"
COMMANDS = {
    "srun": """
        while [[ $1 == --* ]]; do shift; done
        "$@" &
        echo $! >"$STAND_INS/step"
        trap 'kill -KILL $!' TERM
        wait $!
        """,
    "scancel": """
        [ "$*" = "--signal=TERM 77" ] || exit 1
        kill -TERM "$(cat "$STAND_INS/step")"
        """,
    "scontrol": """
        kill -0 "$(cat "$STAND_INS/step")" 2>/dev/null && state=runs || state=ended
        cd "$STAND_INS/.."
        echo "$* $state" $(compgen -G "job/checkpoint-*") >>"$STAND_INS/requeued"
        """,
}
UPDATES = 12
TRAINING = (ELASTIC, "job", "--updates", UPDATES, "--save-steps", 1000, "--seconds", 0.2, "--resume")


@pytest.fixture
def batch(tmp_path):
    """Return a function that starts a batch script, as Slurm does on the first node of job 77."""
    commands = tmp_path / "commands"
    commands.mkdir()
    (tmp_path / "job").mkdir()
    for name, lines in COMMANDS.items():
        (commands / name).write_text(f"#!/usr/bin/env bash\n{lines}")
        (commands / name).chmod(0o755)
    started = []

    def start(script, *arguments, **more):
        slurm = {
            "SLURM_SUBMIT_DIR": ROOT, "SLURM_JOB_ID": 77, "SLURM_JOB_NUM_NODES": 1, "SLURM_NTASKS": 1,
            "SLURM_NODEID": 0, "SLURM_PROCID": 0, "SLURM_CPUS_PER_TASK": 2,
        }  # fmt: skip
        here = {"STAND_INS": commands, "VIRTUAL_ENV": sys.prefix, "NPROC_PER_NODE": 2, **slurm, **more}
        path = f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        environ = {**os.environ, "PATH": path, **{name: str(value) for name, value in here.items()}}
        command = ["bash", str(ROOT / "scripts/slurm" / script), *map(str, arguments)]
        with open(tmp_path / "out", "a") as out:
            started.append(subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=out, stderr=out))
        return started[-1]

    yield start
    for process in started:
        process.kill()
    print((tmp_path / "out").read_text())


def requeued(folder):
    file = folder / "commands/requeued"
    return file.read_text().splitlines() if file.exists() else []


def updates(folder):
    sizes = folder / "job/sizes"
    return len(sizes.read_text().splitlines()) if sizes.exists() else 0


@pytest.mark.core
def test_slurm_time_limit_signal_saves_a_checkpoint_and_the_requeued_job_resumes(tmp_path, batch):
    whole = tmp_path / "whole"
    whole.mkdir()
    assert run_job(whole, ELASTIC, whole, *TRAINING[2:]).exit_code == 0
    job = batch("launcher.sbatch", *TRAINING)
    wait_for(lambda: updates(tmp_path) >= 3, "three updates")
    # To the script only, as --signal=B:USR1 does.
    job.send_signal(signal.SIGUSR1)
    assert job.wait(TIMEOUT_SECONDS) == 143
    [checkpoint] = (tmp_path / "job").glob("checkpoint-*")
    assert requeued(tmp_path) == [f"requeue 77 ended job/{checkpoint.name}"]
    assert_nothing_is_left(tmp_path / "logs", soon=True)
    assert updates(tmp_path) < UPDATES
    again = batch("launcher.sbatch", *TRAINING, SLURM_RESTART_COUNT=1)
    assert again.wait(TIMEOUT_SECONDS) == 0
    assert len(requeued(tmp_path)) == 1
    digests = [json.loads((folder / "result.json").read_text())["digest"] for folder in (whole, tmp_path / "job")]
    assert digests[0] == digests[1]
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["slurm-77-0", "slurm-77-1"]


ENDS = """
import time
import mindnlp_dp as dp
from mindnlp_dp.runtime import heartbeat
group = dp.init_process_group()
for step in range(150):
    heartbeat.finish_update(step + 1, [])
    time.sleep(0.02)
    if step == 100 and group.is_main:
        open("began", "w").close()
"""


def test_a_slurm_job_that_ends_before_saving_is_not_requeued(tmp_path, batch):
    (tmp_path / "ends.py").write_text(ENDS)
    job = batch("launcher.sbatch", "ends.py", RUN_OPTIONS="--backend mpi --max-restarts 0")
    wait_for((tmp_path / "began").exists, "updates")
    job.send_signal(signal.SIGUSR1)
    assert job.wait(TIMEOUT_SECONDS) == 0
    assert requeued(tmp_path) == []


def test_a_slurm_job_without_our_launcher_is_requeued_at_once(tmp_path, batch):
    (tmp_path / "waits.py").write_text("import time\nopen('began', 'w').close()\ntime.sleep(3)\n")
    job = batch("srun.sbatch", "waits.py")
    wait_for((tmp_path / "began").exists, "the script")
    job.send_signal(signal.SIGUSR1)
    wait_for(lambda: requeued(tmp_path), "the job to be requeued")
    assert requeued(tmp_path) == ["requeue 77 runs"]
    assert job.wait(TIMEOUT_SECONDS) == 0
    assert len(requeued(tmp_path)) == 1
