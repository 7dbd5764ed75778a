"""Test what ``mindnlp-dp status`` prints of a log folder, also if its file is not as the launcher writes it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from mindnlp_dp.commands.main import main
from mindnlp_dp.launch.monitor.snapshot import JobSnapshot
from mindnlp_dp.launch.monitor.status import StatusFile, read_status, status_text
from mindnlp_dp.launch.processes.attempt import HostReport
from mindnlp_dp.runtime.heartbeat import RankHeartbeat
from mindnlp_dp.runtime.printable import printable

FAILURE = {"rank": 1, "what": "ended with exit code 3", "restart": 1, "update": 7, "exit_code": 3}


def rank(**values):
    return RankHeartbeat(changes=1, pid=7, changed=time.monotonic(), has_joined=True, **values)


def test_status_shows_the_state_of_each_rank(tmp_path, monkeypatch):
    waits = rank(blocked_in="all_reduce of 4 ranks", since=time.monotonic() - 5, loss=float("inf"))
    failed = RankHeartbeat(changes=1, exit_code=9, ended=1.0)
    ranks = [rank(update=3, speed={"mfu": 0.5}), rank(), waits, failed, RankHeartbeat()]
    snapshot = JobSnapshot(ranks, [HostReport(gone=[1])])
    failure = {"rank": 1, "what": "was killed", "restart": 1, "update": 2}
    failures = [failure]
    file = StatusFile(failures)
    file.write(tmp_path, snapshot)
    status = read_status(tmp_path)
    assert [entry["state"] for entry in status["ranks"]] == [
        "works", "gone", "waits", "failed with exit code 9", "not begun",
    ]  # fmt: skip
    assert (status["alive"], status["update"], status["exit_code"]) == (2, 3, None)
    assert status["ranks"][2]["loss"] is None
    assert status["ranks"][2]["waits_since"] == pytest.approx(5, abs=1)
    text = status_text(status)
    assert "waits in all_reduce of 4 ranks since 5." in text
    assert "MFU 50.0 %" in text
    assert "failed in update 2: rank 1 was killed; restart 1" in text
    assert "written" not in text
    with monkeypatch.context() as later:
        now = time.time()
        later.setattr(time, "time", lambda: now + 60)
        assert "written 60 s ago: since then its launcher was killed, or is stopped" in status_text(status)
    failures.append(failure)
    file.end(137)
    status = read_status(tmp_path)
    assert (status["alive"], status["exit_code"], len(status["failures"])) == (0, 137, 2)
    assert "the job has ended with exit code 137" in status_text(status)


@pytest.mark.parametrize("text", [None, "", "[]", "{", "3"])
def test_a_folder_without_a_status_is_refused(tmp_path, text, capsys):
    if text is not None:
        (tmp_path / "status.json").write_text(text)
    assert main(["status", str(tmp_path)]) == 2
    assert "is not a log folder of mindnlp-dp run" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change", [{"ranks": 3}, {"ranks": [{}]}, {"failures": [[]]}, {"speed": {"mfu": "x"}}, {"time": None}]
)
def test_an_invalid_status_file_is_refused(tmp_path, change, capsys):
    StatusFile([]).write(tmp_path, JobSnapshot([rank()]))
    path = tmp_path / "status.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert main(["status", str(tmp_path)]) == 2
    assert "has a status file that was not written by a launcher" in capsys.readouterr().err


@pytest.fixture
def log_dir(tmp_path):
    StatusFile([]).write(tmp_path, JobSnapshot([rank(), rank()]))
    return tmp_path


@pytest.mark.core
def test_control_characters_in_a_status_are_escaped(tmp_path, capsys):
    clears = "\x1b[2J\x1b]0;title\x07"
    failure = {**FAILURE, "what": f"killed{clears}\nrank 0 is fine\r\x9b1m\u202e"}
    ranks = [rank(blocked_in=f"all_reduce{clears}"), rank()]
    StatusFile([failure]).write(tmp_path, JobSnapshot(ranks))
    assert main(["status", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    # One line each for the job, both ranks and the failure, and none of the file's own.
    assert len(said.splitlines()) == 4
    assert all(line.isprintable() for line in said.splitlines())
    assert r"in all_reduce\x1b[2J\x1b]0;title\x07 since" in said
    assert r"rank 1 killed\x1b[2J\x1b]0;title\x07\nrank 0 is fine\r\x9b1m\u202e; restart 1" in said


def test_control_characters_in_folder_names_are_escaped(tmp_path, capsys):
    folder = tmp_path / "a\x1b[31mb"
    folder.mkdir()
    assert main(["status", str(folder)]) == 2
    assert main(["report", str(folder)]) == 2
    said = capsys.readouterr().err
    assert "\x1b" not in said
    assert said.count(r"a\x1b[31mb") == 2
    StatusFile([]).write(folder, JobSnapshot([rank()]))
    assert main(["status", str(folder)]) == 0
    assert r"a\x1b[31mb: update 0" in capsys.readouterr().out


@pytest.mark.parametrize("environ", [{}, {"PYTHONUNBUFFERED": "1"}])
def test_a_closed_output_pipe_ends_status_without_a_traceback(tmp_path, environ):
    StatusFile([]).write(tmp_path, JobSnapshot([RankHeartbeat()] * 10_000))
    command = [sys.executable, "-m", "mindnlp_dp", "status", str(tmp_path)]
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**clean, **environ}) as status:
        assert b"0 of 10000 ranks alive" in status.stdout.readline()
        status.stdout.close()
        assert status.stderr.read() == b""
    assert status.returncode == 141


@pytest.mark.parametrize(
    "command", [["status", "."], ["status", ".", "--json"], ["estimate", "--model", "roberta-base", "--batch", "8"]]
)
def test_output_to_a_full_disk_gives_an_error_without_a_traceback(log_dir, command):
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "mindnlp_dp", *command], cwd=log_dir, stdout=full, stderr=subprocess.PIPE, text=True,
            timeout=100,
        )  # fmt: skip
    assert done.returncode != 0
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_text_in_any_language_is_printable():
    assert printable("损失 é ½ 🙂") == "损失 é ½ 🙂"
    assert printable("\udcff\x00\t\x7f\u2028") == r"\udcff\x00\t\x7f\u2028"
