"""Test SIGTERM, which Kubernetes, Slurm and systemd send to a job before they end it."""

from __future__ import annotations

import json
import signal
import subprocess
import time

import pytest

from conftest import ROOT, TIMEOUT_SECONDS, assert_nothing_is_left, run_job, start_job, wait_for

ELASTIC = ROOT / "tests/failure/elastic.py"
# Makes updates, and never saves.
NEVER_SAVES = """
import signal, time
from pathlib import Path
import mindnlp_dp as dp
from mindnlp_dp.runtime import heartbeat
group = dp.init_process_group()
for step in range(10_000):
    heartbeat.finish_update(step + 1, [])
    time.sleep(0.02)
    if step == 100:
        open("updates", "w").close()
"""


def updates(folder):
    try:
        return len((folder / "sizes").read_text().splitlines())
    except OSError:
        return 0


@pytest.mark.parametrize(
    "flags", [pytest.param((), marks=pytest.mark.core), pytest.param(("--async-save",), marks=pytest.mark.slow)]
)
def test_sigterm_saves_a_checkpoint_and_the_job_resumes_with_equal_weights(tmp_path, flags):
    whole, ended = tmp_path / "whole", tmp_path / "ended"
    for folder in (whole, ended):
        folder.mkdir()
    how = ("--updates", 12, "--save-steps", 1000, "--seconds", 0.2, *flags)
    assert run_job(whole, ELASTIC, whole, *how).exit_code == 0
    with open(tmp_path / "output", "w") as output:
        launcher = start_job(ended, ELASTIC, ended, *how, stdout=output)
    wait_for(lambda: updates(ended) >= 3, "three updates")
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(TIMEOUT_SECONDS) == 143
    assert_nothing_is_left(ended / "logs", soon=True)
    [checkpoint] = ended.glob("checkpoint-*")
    saved = int(checkpoint.name.partition("-")[2])
    said = (
        f"wrote {checkpoint}, as the launcher asked; to resume from there add --resume to a recipe's command, or call "
    )
    assert said in (tmp_path / "output").read_text()
    # The job saves after the next update or the one after it, so that less than a second of training is lost.
    assert 3 <= saved <= updates(ended) <= saved + 3
    job = run_job(ended, ELASTIC, ended, *how, "--resume")
    assert job.exit_code == 0, job.output
    assert digest(ended) == digest(whole)


def digest(folder):
    return json.loads((folder / "result.json").read_text())["digest"]


@pytest.mark.parametrize(("seconds", "least"), [(4, 4), (0, 0)])
def test_sigterm_ends_a_job_that_does_not_save_after_its_grace_period(tmp_path, seconds, least):
    launcher = start_job(tmp_path, "--grace-period", seconds, NEVER_SAVES, stdout=subprocess.DEVNULL)
    wait_for((tmp_path / "updates").exists, "updates")
    began = time.monotonic()
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(TIMEOUT_SECONDS) == 143
    # Ending the ranks takes some more seconds.
    assert least <= time.monotonic() - began < least + 20
    assert_nothing_is_left(tmp_path / "logs", soon=True)


def test_a_second_sigterm_ends_the_job_at_once(tmp_path):
    launcher = start_job(tmp_path, "--grace-period", 300, NEVER_SAVES, stdout=subprocess.DEVNULL)
    wait_for((tmp_path / "updates").exists, "updates")
    launcher.send_signal(signal.SIGTERM)
    time.sleep(1)
    assert launcher.poll() is None
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(60) == 143


# A closed connection sends SIGHUP once or twice; systemd sends it after SIGTERM.
@pytest.mark.parametrize("signals", [["SIGTERM"], ["SIGHUP", "SIGHUP"], ["SIGTERM", "SIGHUP"]])
def test_a_job_that_finishes_within_its_grace_period_exits_with_0(tmp_path, signals):
    script = NEVER_SAVES.replace("10_000", "200")
    launcher = start_job(tmp_path, "--grace-period", 300, script, stdout=subprocess.DEVNULL)
    wait_for((tmp_path / "updates").exists, "updates")
    for name in signals:
        launcher.send_signal(getattr(signal, name))
        time.sleep(0.3)
    assert launcher.wait(TIMEOUT_SECONDS) == 0


def test_sighup_gives_a_job_its_grace_period(tmp_path):
    launcher = start_job(tmp_path, "--grace-period", 3, NEVER_SAVES, stdout=subprocess.DEVNULL)
    wait_for((tmp_path / "updates").exists, "updates")
    began = time.monotonic()
    launcher.send_signal(signal.SIGHUP)
    assert launcher.wait(TIMEOUT_SECONDS) == 129
    assert time.monotonic() - began >= 3


def test_a_job_that_fails_after_sigterm_is_not_restarted(tmp_path):
    script = NEVER_SAVES + "    assert not Path('fail').exists()\n"
    how = ("--grace-period", 300, "--max-restarts", 5)
    launcher = start_job(tmp_path, *how, script, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    wait_for((tmp_path / "updates").exists, "updates")
    launcher.send_signal(signal.SIGTERM)
    time.sleep(1)
    (tmp_path / "fail").touch()
    said = launcher.communicate(timeout=TIMEOUT_SECONDS)[1]
    assert launcher.returncode == 143
    assert "restart" not in said
    assert "of 2 failed with exit code 1" in said


def test_ranks_that_ignore_sigterm_are_ended(tmp_path):
    """The ranks ignore SIGTERM, and the user sends it several times."""
    script = NEVER_SAVES.replace("group =", "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ngroup =")
    launcher = start_job(tmp_path, script, backend="mindspore", stdout=subprocess.DEVNULL)
    wait_for((tmp_path / "updates").exists, "updates")
    for _ in range(6):
        if launcher.poll() is None:
            launcher.send_signal(signal.SIGTERM)
        time.sleep(0.5)
    assert launcher.wait(TIMEOUT_SECONDS) == 143
    assert_nothing_is_left(tmp_path / "logs", soon=True)
