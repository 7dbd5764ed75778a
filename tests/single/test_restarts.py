"""Tests whether a job is restarted, what happens to the files of an earlier job, and which rank is blamed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from mindnlp_dp.launch.errors import LaunchError
from mindnlp_dp.launch.event_loop import EventLoop
from mindnlp_dp.launch.log_dir import (
    RECORD,
    VARIABLE,
    LogFile,
    archive_attempt_logs,
    archive_earlier_job,
    claim,
    lock_log_dir,
    new_log_dir,
)
from mindnlp_dp.launch.monitor.failure_attribution import Failure, find_failed_process
from mindnlp_dp.launch.monitor.recovery import RestartPolicy
from mindnlp_dp.launch.monitor.snapshot import JobSnapshot
from mindnlp_dp.launch.processes.attempt import HostReport
from mindnlp_dp.launch.processes.exit_status import ExitedProcess
from mindnlp_dp.launch.processes.host import LocalHost
from mindnlp_dp.runtime.heartbeat import Status

FAILURE = Failure(1, 9, "failed")


def waits(tmp_path, updates, most=100):
    restarts = RestartPolicy(most, tmp_path)
    return [restarts.after(FAILURE, update=update, seconds=1.0) for update in updates], restarts


def test_three_in_a_row_that_got_nowhere_are_one_too_many(tmp_path):
    found, restarts = waits(tmp_path, [0, 0, 0])
    assert found == [1.0, 2.0, None]
    assert restarts.why_not == "3 attempts in a row have not finished a single update"
    assert [json.loads(line)["waits"] for line in (tmp_path / RECORD).read_text().splitlines()] == found


def test_one_that_got_on_is_none_of_them(tmp_path):
    found, restarts = waits(tmp_path, [1000, 0, 0, 5, 0, 0, 0])
    assert found == [0.0, 1.0, 2.0, 0.0, 1.0, 2.0, None]
    assert restarts.count == 6
    assert waits(tmp_path, [7, 7], most=1)[0] == [0.0, None]


OURS = ("worker_0.log", "worker_12.log.1", "worker_1.stacks", "launcher.log", "launcher_1.log",
        "scheduler.log", "progress", "progress_3", "fork_server.log", "environ_changes.json", RECORD)  # fmt: skip
THEIRS = (
    "progress.py",
    "progress_notes.md",
    "worker_notes.log",
    "launcher_of_mine.log",
    "worker_0.log.old",
    "train.py",
)


def test_an_earlier_jobs_files_are_put_aside_and_nobody_elses(tmp_path):
    claim(tmp_path)
    for folder in (tmp_path, tmp_path / "try_1", tmp_path / "try_lr_1e-3"):
        folder.mkdir(exist_ok=True)
        for name in (*OURS, *THEIRS):
            (folder / name).write_text("")
    (tmp_path / "progress_4").mkdir()
    archive_earlier_job(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted([".mindnlp_dp", *THEIRS, "job_1", "try_lr_1e-3", "progress_4"])
    assert sorted(os.listdir(tmp_path / "job_1")) == sorted([".mindnlp_dp", *OURS, "try_1"])
    assert sorted(os.listdir(tmp_path / "job_1/try_1")) == sorted([*OURS, *THEIRS])
    for number in range(2, 6):
        (tmp_path / "worker_0.log").write_text(str(number))
        archive_earlier_job(tmp_path)
    # The last three are kept: they show why a job was restarted repeatedly.
    assert sorted(path.name for path in tmp_path.glob("job_*")) == ["job_3", "job_4", "job_5"]
    assert (tmp_path / "job_5/worker_0.log").read_text() == "5"


def test_a_users_file_is_not_taken_for_a_log(tmp_path):
    (tmp_path / "progress").write_text("half of the thesis")
    for number in (100, 101, 102, 103, 104):
        (tmp_path / f"job_{number}").mkdir()
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(
        LaunchError, match="does not belong to a job, and holds job_100, job_101, .* progress, which a job would"
    ):
        archive_earlier_job(tmp_path)
    # A host that joins a later attempt does not move them either.
    with pytest.raises(LaunchError, match="does not belong to a job"):
        LocalHost({}, 1, EventLoop()).clear(str(tmp_path), 2)
    assert sorted(os.listdir(tmp_path)) == before


def test_no_folder_that_a_user_made_is_removed(tmp_path):
    claim(tmp_path)
    for number in range(101, 107):
        (tmp_path / f"job_{number}").mkdir()
        (tmp_path / f"try_{number}").mkdir()
    archive_attempt_logs(tmp_path, 200)
    assert len(list(tmp_path.glob("try_1*"))) == 6
    archive_earlier_job(tmp_path)
    assert len(list(tmp_path.glob("job_*"))) == 7


def test_a_trys_logs_are_put_aside(tmp_path):
    claim(tmp_path)
    for name in ("worker_0.log", "worker_0.stacks", "progress", "train.py"):
        (tmp_path / name).write_text(name)
    archive_attempt_logs(tmp_path, 1)
    assert sorted(os.listdir(tmp_path)) == [".mindnlp_dp", "progress", "train.py", "try_1"]
    assert sorted(os.listdir(tmp_path / "try_1")) == [".mindnlp_dp", "worker_0.log", "worker_0.stacks"]
    for number in range(2, 13):
        archive_attempt_logs(tmp_path, number)
    assert sorted(int(path.name[4:]) for path in tmp_path.glob("try_*")) == list(range(3, 13))


def test_another_hosts_clock_does_not_say_who_failed_first(monkeypatch):
    """Convert the time of a failure two seconds ago from a host whose clock is an hour ahead."""
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 3600)
    sent = json.loads(json.dumps(HostReport(statuses={3: Status(1, now + 3600 - 2.0)}).to_json()))
    monkeypatch.setattr(time, "monotonic", lambda: now + 0.5)
    assert HostReport.from_json(sent).statuses[3].time == pytest.approx(now + 0.5 - 2.0)


def test_a_rank_that_was_ended_for_anothers_failure_is_not_to_blame(tmp_path):
    failure = find_failed_process([ExitedProcess(0, -15), ExitedProcess(1, -9)], {}, tmp_path, ranks=range(2))
    assert (failure.rank, failure.exit_code) == (1, 137)


def test_without_a_log_folder_there_is_a_verdict(tmp_path):
    failure = find_failed_process([ExitedProcess(None, 3)], {}, tmp_path / "gone", ranks=range(2))
    assert (failure.rank, failure.exit_code) == (None, 3)


def test_echoes_wait_for_their_cause():
    def has_only_secondary_failures(statuses, *ended):
        return JobSnapshot([], statuses, [HostReport(ended=list(ended))]).has_only_secondary_failures

    echo, cause = Status(1, 1.0, waited=True), Status(1, 1.0)
    assert has_only_secondary_failures({0: echo})
    assert has_only_secondary_failures({0: echo, 2: Status(0, 1.0)}, ExitedProcess(0, 1))
    assert not has_only_secondary_failures({0: echo, 1: cause})
    assert not has_only_secondary_failures({0: echo}, ExitedProcess(1, -9))
    assert not has_only_secondary_failures({})


def test_processes_of_other_hosts_are_not_looked_for_here(tmp_path, monkeypatch):
    from mindnlp_dp.launch.monitor.status import status_of, status_text
    from mindnlp_dp.runtime import heartbeat

    def write(path, rank, pid):
        writer = heartbeat.HeartbeatWriter(path, rank)
        writer._pid = pid
        writer.mark_joined()
        return writer

    gone = subprocess.Popen(["true"])
    gone.wait()
    heartbeat.create(tmp_path / "progress", 3)
    write(tmp_path / "progress", 0, os.getpid())
    write(tmp_path / "progress", 1, gone.pid)
    with monkeypatch.context() as there:
        there.setattr(heartbeat, "_this_system", lambda: b"another boot")
        heartbeat.create(tmp_path / "progress_1", 3)
    write(tmp_path / "progress_1", 2, gone.pid).begin_to_wait("all_reduce of 3 ranks")
    status = status_of(tmp_path)
    assert [rank["state"] for rank in status["ranks"]] == ["works", "gone", "waits"]
    assert status["alive"] == 2
    assert (status["ranks"][2]["waits_since"], status["ranks"][2]["here"]) == (None, False)
    assert "waits in all_reduce of 3 ranks, on another host, when it was last heard" in status_text(status)
    json.dumps(status, allow_nan=False)


@pytest.mark.parametrize("environ", [{}, {"PYTHONUNBUFFERED": "1"}])
def test_status_that_is_read_in_part(tmp_path, environ):
    from mindnlp_dp.runtime import heartbeat

    heartbeat.create(tmp_path / "progress", 10_000)
    command = [sys.executable, "-m", "mindnlp_dp", "status", str(tmp_path)]
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**clean, **environ}) as status:
        assert b"0 of 10000 ranks alive" in status.stdout.readline()
        status.stdout.close()
        assert status.stderr.read() == b""
    assert status.returncode == 141


def test_two_jobs_have_two_log_folders(tmp_path, monkeypatch):
    def begin_another():
        with lock_log_dir(tmp_path):
            pass

    with lock_log_dir(tmp_path), pytest.raises(LaunchError, match="is that of a job that runs"):
        begin_another()
    with lock_log_dir(tmp_path):
        pass
    monkeypatch.chdir(tmp_path)
    first, second = new_log_dir(), new_log_dir()
    assert first != second
    assert first.is_dir()


def test_a_folder_of_logs_that_leads_nowhere(tmp_path, monkeypatch):
    """Check a link to a disk that is not mounted."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").symlink_to(tmp_path / "not here")
    with pytest.raises(LaunchError, match="cannot be written to"):
        LocalHost({}, 1, EventLoop()).clear(str(new_log_dir()), 0)


def test_logs_that_cannot_be_archived_do_not_end_the_job(tmp_path, capsys):
    claim(tmp_path)
    (tmp_path / "try_1").write_text("a file of the user's")
    host = LocalHost({}, 1, EventLoop())
    host.clear(str(tmp_path), 1)
    assert (tmp_path / "try_1").read_text() == "a file of the user's"
    assert "cannot be archived" in capsys.readouterr().err


def test_a_log_that_cannot_begin_anew_grows_on(tmp_path, monkeypatch):
    path = tmp_path / "worker_0.log"
    before = [os.dup(stream) for stream in (1, 2)]
    try:
        log = LogFile(path, {VARIABLE: "1"})
        os.write(1, bytes(2 << 20))
        with monkeypatch.context() as full:
            full.setattr(log, "_open", lambda: (_ for _ in ()).throw(OSError("no room")))
            log.rotate_if_large()
        assert path.stat().st_size == 2 << 20
        log.rotate_if_large()
        os.write(1, b"anew")
    finally:
        for stream, saved in zip((1, 2), before):
            os.dup2(saved, stream)
            os.close(saved)
    assert (path.read_bytes(), (tmp_path / "worker_0.log.1").stat().st_size) == (b"anew", 2 << 20)
