"""Tests whether a job is restarted, what happens to the files of an earlier job, and which rank is blamed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from mindnlp_dp.launch.errors import LaunchError, TemporaryError
from mindnlp_dp.launch.log_dir import RECORD, VARIABLE, LogDir, LogFile, join_attempt, open_to_write
from mindnlp_dp.launch.monitor.failure_attribution import Failure, find_failure
from mindnlp_dp.launch.monitor.restarts import RestartPolicy
from mindnlp_dp.launch.monitor.snapshot import JobSnapshot
from mindnlp_dp.launch.processes.attempt import Attempt, HostReport
from mindnlp_dp.launch.processes.exit_status import ExitedProcess
from mindnlp_dp.runtime.heartbeat import RankHeartbeat

FAILURE = Failure(1, 9, "failed")


def waits(tmp_path, updates, most=100):
    restarts = RestartPolicy(most, LogDir(tmp_path))
    return [restarts.after(FAILURE, update=update, seconds=1.0) for update in updates], restarts


def test_a_job_is_not_restarted_after_three_attempts_without_an_update(tmp_path):
    found, restarts = waits(tmp_path, [0, 0, 0])
    assert found == [1.0, 2.0, None]
    assert restarts.why_not == "3 attempts in a row have not finished a single update"
    assert [json.loads(line)["waits"] for line in (tmp_path / RECORD).read_text().splitlines()] == found


def test_an_attempt_with_an_update_resets_the_count(tmp_path):
    found, restarts = waits(tmp_path, [1000, 0, 0, 5, 0, 0, 0])
    assert found == [0.0, 1.0, 2.0, 0.0, 1.0, 2.0, None]
    assert restarts.count == 6
    assert waits(tmp_path, [7, 7], most=1)[0] == [0.0, None]


def test_each_attempt_has_its_own_log_folder(tmp_path):
    (tmp_path / "attempt_0").write_text("a file of the user's")
    first = LogDir(tmp_path)
    assert [first.new_attempt().name for _ in range(2)] == ["attempt_1", "attempt_2"]
    # Another job, perhaps at the same time.
    assert LogDir(tmp_path).new_attempt().name == "attempt_3"
    assert (tmp_path / "latest").readlink().name == "attempt_3"
    assert (tmp_path / "attempt_0").read_text() == "a file of the user's"
    for _ in range(10):
        first.new_attempt()
    # The last ten of this job are kept, and all that others have made.
    kept = sorted(int(path.name[8:]) for path in tmp_path.glob("attempt_*"))
    assert kept == [0, 3, *range(4, 14)]


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o022])
def test_other_users_cannot_write_to_log_folders(tmp_path, mask):
    before = os.umask(mask)
    try:
        log_dir = LogDir(tmp_path / "logs")
        attempt = log_dir.new_attempt()
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o022 for path in (log_dir.path, attempt)] == [0, 0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_log_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    theirs = tmp_path / "logs"
    theirs.mkdir()
    os.chown(theirs, 12345, -1)
    with pytest.raises(LaunchError, match="belongs to another user .id 12345., who could replace"):
        LogDir(theirs)
    with pytest.raises(LaunchError, match="belongs to another user"):
        join_attempt(theirs / "attempt_0")
    # The folder of all jobs, where the default folder is made.
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LaunchError, match="belongs to another user"):
        LogDir()
    assert os.listdir(theirs) == []
    # A folder of root, such as /tmp, or of this user.
    os.chown(theirs, 0, -1)
    assert LogDir(theirs).new_attempt().is_dir()


@pytest.mark.parametrize("name", ["worker_0.log", "failures.jsonl", "launcher.log"])
def test_links_in_a_log_folder_are_not_followed(tmp_path, name):
    thesis = tmp_path / "thesis.txt"
    thesis.write_text("all chapters")
    (tmp_path / name).symlink_to(thesis)
    with pytest.raises(OSError, match="symbolic links"):
        open_to_write(tmp_path / name)
    if name == "failures.jsonl":
        LogDir(tmp_path).record({"rank": 1})
    assert thesis.read_text() == "all chapters"


def test_the_time_of_a_failure_is_converted_from_the_clock_of_its_host(monkeypatch):
    """Convert the time of a failure two seconds ago from a host whose clock is an hour ahead."""
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 3600)
    sent = json.loads(json.dumps(HostReport({3: end(1, now + 3600 - 2.0)}).to_json()))
    monkeypatch.setattr(time, "monotonic", lambda: now + 0.5)
    assert HostReport.from_json(sent).ranks[3].ended == pytest.approx(now + 0.5 - 2.0)


def end(exit_code, when=1.0, waited=False):
    """Return the heartbeat of a rank that has recorded its end."""
    return RankHeartbeat(exit_code=exit_code, ended=when, waited=waited, threads_ended=True)


def find(folder, ends, *exited, num_ranks=2):
    snapshot = JobSnapshot([ends.get(n, RankHeartbeat()) for n in range(num_ranks)], [HostReport(ended=list(exited))])
    return find_failure(snapshot, [SimpleNamespace(lost="")], Attempt(0, "mpi", [], str(folder), [num_ranks]))


def test_a_rank_ended_by_sigterm_is_not_blamed_for_the_failure(tmp_path):
    failure = find(tmp_path, {}, ExitedProcess(0, -15), ExitedProcess(1, -9))
    assert (failure.rank, failure.exit_code) == (1, 137)


def test_a_failure_is_found_without_a_log_folder(tmp_path):
    failure = find(tmp_path / "gone", {}, ExitedProcess(None, 3))
    assert (failure.rank, failure.exit_code) == (None, 3)


def test_secondary_failures_wait_for_the_cause():
    def has_only_secondary_failures(ends, *exited):
        ranks = [ends.get(number, RankHeartbeat()) for number in range(3)]
        return JobSnapshot(ranks, [HostReport(ended=list(exited))]).has_only_secondary_failures

    echo, cause = end(1, waited=True), end(1)
    assert has_only_secondary_failures({0: echo})
    assert has_only_secondary_failures({0: echo, 2: end(0)}, ExitedProcess(0, 1))
    assert not has_only_secondary_failures({0: echo, 1: cause})
    assert not has_only_secondary_failures({0: echo}, ExitedProcess(1, -9))
    assert not has_only_secondary_failures({})


def test_a_log_folder_that_is_a_dangling_link_is_refused(tmp_path, monkeypatch):
    """Check a link to a disk that is not mounted."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").symlink_to(tmp_path / "not here")
    with pytest.raises(TemporaryError, match="cannot be written to"):
        LogDir()


def test_an_attempt_uses_the_previous_log_folder_if_mkdir_fails(tmp_path, monkeypatch, capsys):
    log_dir = LogDir(tmp_path / "logs")
    first = log_dir.new_attempt()

    def full(*args, **options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(Path, "mkdir", full)
        assert log_dir.new_attempt() == first
    assert "the next logs replace the last ones" in capsys.readouterr().err
    # A folder that was removed is made again.
    shutil.rmtree(tmp_path / "logs")
    assert log_dir.new_attempt().is_dir()


FULL = """
import os, sys
from pathlib import Path
from mindnlp_dp.launch.log_dir import LogFile
log = LogFile(Path("worker_0.log"), {})
print("before")
saved = os.dup(1)
full = os.open("/dev/full", os.O_WRONLY)
for stream in (1, 2):
    os.dup2(full, stream)
print("lost" * 10)
print("an error, lost", file=sys.stderr)
for stream in (1, 2):
    os.dup2(saved, stream)
print("after")
sys.stdout.flush()
"""


def test_a_full_disk_ends_no_rank_and_lost_output_is_counted(tmp_path):
    subprocess.run([sys.executable, "-c", FULL], cwd=tmp_path, check=True)
    lines = (tmp_path / "worker_0.log").read_text().splitlines()
    assert lines == ["before", "[41 bytes of output are missing here: the disk did not take them]", "after"]


def test_a_log_that_cannot_be_rotated_keeps_growing(tmp_path, monkeypatch):
    path = tmp_path / "worker_0.log"
    before = [os.dup(stream) for stream in (1, 2)]
    try:
        streams = sys.stdout, sys.stderr
        log = LogFile(path, {VARIABLE: "1"})
        os.write(1, bytes(2 << 20))
        with monkeypatch.context() as full:
            full.setattr(log, "_open", lambda: (_ for _ in ()).throw(OSError("no room")))
            log.rotate_if_large()
        assert path.stat().st_size == 2 << 20
        log.rotate_if_large()
        os.write(1, b"again")
    finally:
        sys.stdout, sys.stderr = streams
        for stream, saved in zip((1, 2), before):
            os.dup2(saved, stream)
            os.close(saved)
    assert (path.read_bytes(), (tmp_path / "worker_0.log.1").stat().st_size) == (b"again", 2 << 20)
