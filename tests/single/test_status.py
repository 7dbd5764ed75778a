"""Test what ``mindnlp-dp status`` prints of a log folder whose files are not as the launcher writes them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from mindnlp_dp.commands.main import main
from mindnlp_dp.runtime import heartbeat
from mindnlp_dp.runtime.printable import printable

FAILURE = {"rank": 1, "what": "ended with exit code 3", "restart": 1, "update": 7, "exit_code": 3}


@pytest.fixture
def log_dir(tmp_path):
    heartbeat.create(tmp_path / "progress", 2)
    return tmp_path


def record(log_dir, *lines):
    (log_dir / "failures.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


@pytest.mark.core
def test_control_characters_of_files_do_not_reach_the_terminal(log_dir, capsys):
    clears = "\x1b[2J\x1b]0;title\x07"
    record(log_dir, {**FAILURE, "what": f"killed{clears}\nrank 0 is fine\r\x9b1m\u202e"})
    writer = heartbeat.HeartbeatWriter(log_dir / "progress", 0)
    writer.mark_joined()
    writer.begin_to_wait(f"all_reduce{clears}")
    assert main(["status", str(log_dir)]) == 0
    said = capsys.readouterr().out
    # One line each for the job, both ranks and the failure, and none of the file's own.
    assert len(said.splitlines()) == 4
    assert all(line.isprintable() for line in said.splitlines())
    assert r"in all_reduce\x1b[2J\x1b]0;title\x07 since" in said
    assert r"rank 1 killed\x1b[2J\x1b]0;title\x07\nrank 0 is fine\r\x9b1m\u202e; restart 1" in said


def test_names_of_folders_are_printable_in_both_outputs(tmp_path, capsys):
    folder = tmp_path / "a\x1b[31mb"
    folder.mkdir()
    assert main(["status", str(folder)]) == 2
    assert main(["report", str(folder)]) == 2
    said = capsys.readouterr().err
    assert "\x1b" not in said
    assert said.count(r"a\x1b[31mb") == 2
    heartbeat.create(folder / "progress", 1)
    assert main(["status", str(folder)]) == 0
    assert r"a\x1b[31mb: update 0" in capsys.readouterr().out


@pytest.mark.parametrize("line", [[], [1], {}, 3, None, "text", {"rank": 0}, {**FAILURE, "what": [{}]}])
def test_lines_that_are_not_failures_are_counted(log_dir, line, capsys):
    record(log_dir, FAILURE, line, {**FAILURE, "rank": None, "what": "", "restart": None})
    assert main(["status", str(log_dir)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert "  failed in update 7: rank 1 ended with exit code 3; restart 1" in said
    assert "  failed in update 7: before its ranks started; not restarted" in said
    is_failure = isinstance(line, dict) and "what" in line
    assert said[0].endswith(f"{3 if is_failure else 2} failures so far")
    assert ("  1 line of failures.jsonl that the launcher did not write" in said) is not is_failure
    assert main(["status", str(log_dir), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["failures"]) == 3


@pytest.mark.parametrize(
    "command", [["status", "."], ["status", ".", "--json"], ["estimate", "--model", "roberta-base", "--batch", "8"]]
)
def test_a_full_disk_is_one_line_and_no_traceback(log_dir, command):
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "mindnlp_dp", *command], cwd=log_dir, stdout=full, stderr=subprocess.PIPE, text=True,
            timeout=100,
        )  # fmt: skip
    assert done.returncode != 0
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_text_in_any_language_is_printable():
    assert printable("损失 é ½ 🙂") == "损失 é ½ 🙂"
    assert printable("\udcff\x00\t\x7f\u2028") == r"\udcff\x00\t\x7f\u2028"
