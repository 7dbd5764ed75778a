"""Test the launcher's monitor: it ends jobs that hang, restarts jobs that fail, and reports progress and logs."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from conftest import (
    CORE_UNDER_MPI,
    ROOT,
    TIMEOUT_SECONDS,
    assert_nothing_is_left,
    core,
    job_command,
    processes_of,
    run_job,
    start_job,
    wait_for,
    wait_for_files,
)
from mindnlp_dp.launch import run as launch
from mindnlp_dp.launch.monitor import attempt_monitor
from mindnlp_dp.launch.processes import spawn
from mindnlp_dp.runtime.scratch_dir import ScratchDir

INTERRUPTIBLE = ROOT / "tests/failure/interruptible.py"
HEAD = """
import os, signal, sys, time
import numpy as np
import mindnlp_dp as dp
group = dp.init_process_group()
x = np.ones(3, np.float32)
for _ in range(3):
    group.all_reduce(x)
"""
HANGS = {
    "in Python": (
        "def tokenize():\n    while True:\n        time.sleep(0.1)\n\n"
        "if group.rank == 1:\n    tokenize()\ngroup.all_reduce(x)\n",
        ["rank 1 of 3 hung", "Ranks 0 and 2 wait in all_reduce of 3 ranks", "script.py:11, in tokenize()"],
    ),
    "in a child's pipe": (
        "import subprocess\nif group.rank == 0:\n    subprocess.run(['sleep', '600'])\ngroup.barrier()\n",
        [
            "rank 0 of 3 hung",
            "Ranks 1 and 2 wait in barrier of 3 ranks",
            "Rank 0 did not join: it is in",
            "script.py:11",
        ],
    ),
    "stopped": (
        "if group.rank == 2:\n    os.kill(os.getpid(), signal.SIGSTOP)\ngroup.broadcast(x)\n",
        ["rank 2 of 3 hung", "is stopped (SIGSTOP)", "Ranks 0 and 1 wait in broadcast of 3 ranks"],
    ),
    "before gradients that the others exchange during their backward pass": (
        "from mindspore import Tensor, nn\nimport mindnlp.core\n"
        "def forward(x):\n    while group.rank == 1:\n        time.sleep(0.1)\n    return net(x).sum()\n\n"
        "net = nn.Dense(3, 3)\n"
        "weights = net.trainable_params()\n"
        "step = dp.make_train_step(forward, nn.SGD(weights, 0.1), weights, overlap=True)\n"
        "group.barrier()\nstep(Tensor(x[None]))\n",
        ["rank 1 of 3 hung", "Ranks 0 and 2 wait in", "in forward()"],
    ),
    "in groups that wait for each other": (
        "pair = group.split([0, 1] if group.rank < 2 else [2])\n"
        "pair.all_reduce(x) if group.rank == 0 else group.all_reduce(x)\n",
        ["Rank 0 waits in all_reduce of 2 ranks", "Ranks 1 and 2 wait in all_reduce of 3 ranks", "in the same order"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "how"),
    [
        pytest.param("mpi", "in Python", marks=core),
        *[("mpi", how) for how in HANGS if how != "in Python"],
        # The launcher decides; under MindSpore, only finding the ranks and their threads' stacks differs.
        pytest.param("mindspore", "in Python", marks=pytest.mark.slow),
        pytest.param("mindspore", "stopped", marks=pytest.mark.slow),
    ],
)
def test_a_hang_is_reported_with_its_rank_and_the_job_ends(tmp_path, backend, how):
    script, said = HANGS[how]
    exit_code, output = run_job(tmp_path, "--hang-timeout", 4, HEAD + script, nproc=3, backend=backend)
    assert exit_code == 124
    assert "the job hangs: no rank has made progress for 4 s" in output
    for words in said:
        assert words in output
    # Every rank that could answer has written its frames down to the script.
    stacks = [path.read_text() for path in sorted((tmp_path / "logs/latest").glob("worker_*.stacks"))]
    assert sum("script.py" in text for text in stacks) >= 2


def test_hang_detection_does_not_call_signal_handlers_of_the_script(tmp_path):
    """Scripts of Slurm jobs requeue at SIGUSR1."""
    script = """
        import signal, sys
        import numpy as np
        import mindnlp_dp as dp
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda *_: open("called", "w"))
        group = dp.init_process_group()
        def tokenize():
            while True:
                pass
        group.barrier()
        if group.rank == 1:
            tokenize()
        group.all_reduce(np.ones(3, np.float32))
    """
    job = run_job(tmp_path, "--hang-timeout", 3, script)
    assert job.exit_code == 124
    assert ", in tokenize()" in job.output
    assert not (tmp_path / "called").exists()


def test_a_hang_after_one_rank_has_finished_is_reported_with_that_rank(tmp_path):
    # Rank 0 waits in the exit handler of the MPI backend.
    script = "if group.rank == 0:\n    sys.exit(0)\ngroup.barrier()\n"
    exit_code, output = run_job(tmp_path, "--hang-timeout", 4, HEAD + script)
    assert exit_code == 124
    assert "rank 0 of 2 hung" in output
    assert "Rank 0 has reached the end of the script" in output
    assert "Rank 1 waits in barrier of 2 ranks" in output


def test_an_mpirun_that_starts_no_rank_is_ended_after_a_timeout(tmp_path, monkeypatch, capsys):
    mpirun = tmp_path / "mpirun"
    mpirun.write_text("#!/bin/sh\nexec sleep 600\n")
    mpirun.chmod(0o755)
    monkeypatch.setattr(spawn, "find_mpirun", lambda: str(mpirun))
    monkeypatch.setattr(attempt_monitor, "START_SECONDS", 1.0)
    (tmp_path / "script.py").write_text("print('never reached')\n")
    assert launch.run_job(2, [str(tmp_path / "script.py")], backend="mpi", log_dir=tmp_path / "logs") == 124
    said = capsys.readouterr().err
    assert "rank 0 of 2 never began" in said
    assert "ranks [0, 1] have not started 1 s after the job was started" in said


# Rank 1 stops mpirun, which then does not notice that a rank exits.
STOPS_MPIRUN = """
import os, psutil, signal, time
rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
if rank == 1:
    [mpirun] = [p for p in psutil.Process().parents() if p.name() in ("mpirun", "prterun")]
    mpirun.suspend()
else:
    time.sleep(0.5)
"""


@pytest.mark.usefixtures("own_imports")
@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ("", (0, "")),
        ("os.kill(os.getpid(), signal.SIGKILL)\n", (1, "rank 0 of 2 was killed, or exited before the end")),
    ],
    ids=["at the end", "killed"],
)
def test_a_job_ends_with_its_ranks_although_mpirun_is_stopped(tmp_path, monkeypatch, capsys, end, expected):
    monkeypatch.setattr(attempt_monitor, "_LEAVE_SECONDS", 1.0)
    monkeypatch.setattr(attempt_monitor, "_PARENT_SECONDS", 0.5)
    (tmp_path / "script.py").write_text(STOPS_MPIRUN + end)
    found = launch.run_job(2, [str(tmp_path / "script.py")], backend="mpi", log_dir=tmp_path / "logs")
    exit_code, said = expected
    assert (found, said in capsys.readouterr().err) == (exit_code, True)
    assert_nothing_is_left(tmp_path / "logs")


def test_a_slow_rank_is_not_a_hang(tmp_path):
    """Slow but fine: work that reports, work that no rank waits for, imports before joining, a stopped launcher."""
    work = "for _ in range(60):\n    time.sleep(0.1)\n    group.all_reduce(x)\n"
    alone = "time.sleep(6 - group.rank)\nprint('done')\n"
    script = "import time\ntime.sleep(6)\n" + HEAD + work + alone
    launcher = start_job(tmp_path, "--hang-timeout", 4, script, stdout=subprocess.PIPE)
    wait_for_files(tmp_path, "logs/latest/worker_0.log", 1)
    launcher.send_signal(signal.SIGSTOP)
    time.sleep(6)
    launcher.send_signal(signal.SIGCONT)
    output, _ = launcher.communicate(timeout=TIMEOUT_SECONDS)
    assert (launcher.returncode, output) == (0, "done\n")


@pytest.mark.core
def test_the_status_command_shows_the_state_of_each_rank(tmp_path):
    script = (
        HEAD + "open(f'here_{group.rank}', 'w').close()\nif group.rank == 1:\n    time.sleep(600)\ngroup.barrier()\n"
    )
    base = [sys.executable, "-m", "mindnlp_dp"]
    log_dir = tmp_path / "logs"
    launcher = start_job(tmp_path, script)
    try:
        wait_for_files(tmp_path, "here_*")
        time.sleep(0.5)
        told = subprocess.run([*base, "status", str(log_dir), "--json"], stdout=subprocess.PIPE, check=True)
        status = json.loads(told.stdout)
        assert [rank["state"] for rank in status["ranks"]] == ["waits", "works"]
        assert status["ranks"][0]["waits_in"] == "barrier of 2 ranks"
        assert status["alive"] == 2
        os.kill(status["ranks"][1]["pid"], 0)
        text = subprocess.run([*base, "status", str(log_dir)], stdout=subprocess.PIPE, check=True, text=True).stdout
        assert "2 of 2 ranks alive" in text
        assert "waits in barrier of 2 ranks since" in text
    finally:
        launcher.terminate()
        assert launcher.wait(TIMEOUT_SECONDS) == 143
    ended = subprocess.run([*base, "status", str(log_dir)], stdout=subprocess.PIPE, check=True, text=True).stdout
    assert "0 of 2 ranks alive" in ended
    wrong = subprocess.run([*base, "status", str(tmp_path)], stderr=subprocess.PIPE, text=True)
    assert (wrong.returncode, "is not a log folder of mindnlp-dp run" in wrong.stderr) == (2, True)


FAILS_WHILE_NOBODY_READS = """
import sys
from mpi4py import MPI
print(300_000 * "a line that is never read\\n", flush=True)
MPI.COMM_WORLD.barrier()
if MPI.COMM_WORLD.rank == 1:
    raise ValueError("seen all the same")
MPI.COMM_WORLD.barrier()
"""


@pytest.mark.parametrize("tee", [pytest.param("0", marks=pytest.mark.slow), pytest.param("all", marks=core)])
def test_unread_output_does_not_delay_failures_and_restarts(tmp_path, tee):
    """Nothing reads the output, as after Ctrl-S in a terminal, or in a pager that shows its first page."""
    record = tmp_path / "logs/failures.jsonl"
    launcher = start_job(
        tmp_path, "--tee", tee, "--max-restarts", 1, FAILS_WHILE_NOBODY_READS,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip

    def tries():
        return record.read_text().splitlines() if record.exists() else []

    def only_the_launcher_is_left():
        return len(tries()) == 2 and [process.pid for process in processes_of(tmp_path)] == [launcher.pid]

    wait_for(only_the_launcher_is_left, "both tries to fail")
    assert [json.loads(line)["rank"] for line in tries()] == [1, 1]
    assert launcher.poll() is None
    said = launcher.communicate(timeout=TIMEOUT_SECONDS)[0]
    assert launcher.returncode == 1
    assert said.count("rank 1 of 2 failed") == 2
    assert said.count("seen all the same") >= 2
    assert f"no process reads this output; the rest of it is in {tmp_path / 'logs/attempt_0'}" in said


# Slow enough for a launcher on a busy machine: if two logs start between two polls, the first of them is lost.
LINES = """
import os, time
from mindnlp_dp.runtime import heartbeat
from mpi4py import MPI
for update in range(20):
    for line in range(2000):
        print(MPI.COMM_WORLD.rank, update, line, 100 * "x")
    os.system("echo of a child")
    time.sleep(0.1)
    heartbeat.finish_update(update + 1, [])
print("the end")
"""


@pytest.mark.parametrize(
    ("megabytes", "files"), [pytest.param(1, 2, marks=core), pytest.param(0, 1, marks=pytest.mark.slow)]
)
def test_rotated_logs_are_shown_completely(tmp_path, megabytes, files):
    exit_code, output = run_job(tmp_path, "--log-mb", megabytes, LINES)
    assert exit_code == 0
    lines = output.splitlines()
    expected = [f"0 {update} {line}" for update in range(20) for line in range(2000)]
    assert [line.rpartition(" ")[0] for line in lines if line.endswith("x")] == expected
    assert (lines.count("of a child"), lines[-1]) == (20, "the end")
    for rank in range(2):
        sizes = [path.stat().st_size for path in (tmp_path / "logs/latest").glob(f"worker_{rank}.log*")]
        assert len(sizes) == files
        if megabytes:
            assert sum(sizes) < 3 << 20
    # The next job has its own folder.
    run_job(tmp_path, "print('again')\n")
    assert len(list((tmp_path / "logs/latest").glob("worker_*.log*"))) == 2
    assert len(list((tmp_path / "logs/attempt_0").glob("worker_*.log*"))) == 2 * files


@pytest.mark.parametrize(
    ("tee", "expected"), [("0", {"from 0"}), ("all", {"[0] from 0", "[1] from 1"}), ("none", set())]
)
def test_tee_selects_the_ranks_whose_output_is_shown(tmp_path, tee, expected):
    script = "from mpi4py import MPI\nprint('from', MPI.COMM_WORLD.rank, flush=True)\nMPI.COMM_WORLD.barrier()\n"
    exit_code, output = run_job(tmp_path, "--tee", tee, script)
    assert exit_code == 0
    assert set(output.splitlines()) == expected


# Tests of restarts.


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    assert run_job(folder, INTERRUPTIBLE, folder).exit_code == 0
    return json.loads((folder / "result.json").read_text())


@pytest.mark.parametrize("backend", CORE_UNDER_MPI)
def test_a_killed_rank_restarts_the_job_and_training_ends_with_the_same_result(tmp_path, undisturbed, backend):
    """One rank is killed once, in update 8, after the checkpoint of update 6."""
    exit_code, output = run_job(
        tmp_path, "--max-restarts", 2, INTERRUPTIBLE, tmp_path, "--stop-at", 8, "--on-rank", 1, "--once",
        backend=backend,
    )  # fmt: skip
    assert exit_code == 0, output
    assert "rank 1 of 2 was killed by signal 9" in output
    assert "restart 1 of 2, from the newest checkpoint" in output
    assert "restarted: resuming from" in (tmp_path / "logs" / "latest" / "worker_0.log").read_text()
    found = json.loads((tmp_path / "result.json").read_text())
    if backend == "mpi":
        assert found == undisturbed
    failures = [json.loads(line) for line in (tmp_path / "logs" / "failures.jsonl").read_text().splitlines()]
    assert [(f["rank"], f["exit_code"], f["restart"]) for f in failures] == [(1, 137, 1)]
    assert failures[0]["update"] in (7, 8)
    assert "boom" not in (tmp_path / "logs" / "attempt_0" / "worker_1.log").read_text()


def test_restarts_end_after_three_attempts_without_a_finished_update(tmp_path):
    began = time.monotonic()
    exit_code, output = run_job(tmp_path, "--max-restarts", 100, "import sys\n\nsys.exit('no data')\n")
    assert exit_code == 1
    assert output.count("in 1 s, from the newest checkpoint") == 1
    assert output.count("in 2 s, from the newest checkpoint") == 1
    assert "the job is over: 3 attempts in a row have not finished a single update" in output
    assert time.monotonic() - began < 60
    assert len(list((tmp_path / "logs").glob("attempt_*/worker_0.log"))) == 3


@pytest.mark.core
def test_max_restarts_limits_the_number_of_restarts(tmp_path):
    """Each attempt makes some updates, and fails again."""
    exit_code, output = run_job(tmp_path, "--max-restarts", 1, INTERRUPTIBLE, tmp_path, "--stop-at", 8, "--on-rank", 0)
    assert exit_code == 137
    assert "the job is over: it was restarted 1 times, the maximum (--max-restarts)" in output


# After the first attempt the log folder is a file, which cannot be written to, like a lost disk.
LOSES_ITS_LOGS = """
import os, shutil, sys
import mindnlp_dp as dp
group = dp.init_process_group()
group.barrier()
if group.is_main:
    shutil.rmtree("logs")
    {then}
    print("said on the way", flush=True)
sys.exit(3)
"""


def test_a_restart_without_a_log_folder_exits_with_the_code_of_a_temporary_failure(tmp_path):
    """The exit code does not tell a job manager such as Kubernetes that the command line is wrong."""
    job = run_job(tmp_path, "--max-restarts", 5, LOSES_ITS_LOGS.format(then="open('logs', 'w').close()"))
    assert job.exit_code == 75, job.output
    assert "cannot be created" in job.output
    assert "cannot be written to" in job.output
    assert "the job is over: 3 attempts in a row have not finished a single update" in job.output


def test_the_exit_code_is_reported_after_the_log_folder_was_deleted(tmp_path):
    job = run_job(tmp_path, LOSES_ITS_LOGS.format(then="pass"))
    assert job.exit_code == 3, job.output
    assert re.search("rank [01] of 2 failed with exit code 3 after", job.output)
    assert "before its ranks started" not in job.output


def test_an_mpirun_that_exits_with_0_without_starting_a_rank_fails_the_job(tmp_path, monkeypatch, capsys):
    mpirun = tmp_path / "mpirun"
    mpirun.write_text("#!/bin/sh\nexit 0\n")
    mpirun.chmod(0o755)
    monkeypatch.setattr(spawn, "find_mpirun", lambda: str(mpirun))
    (tmp_path / "script.py").write_text("")
    assert launch.run_job(2, [str(tmp_path / "script.py")], backend="mpi", log_dir=tmp_path / "logs") == 1
    assert "rank 0 of 2 exited without reporting a status" in capsys.readouterr().err


@pytest.mark.parametrize("end", ["sys.exit(3)", "os.kill(os.getpid(), 9)"])
def test_a_failed_job_ends_although_its_output_is_not_read(tmp_path, end):
    script = "import os, sys\nfrom mpi4py import MPI\n"
    script += f"os.write(1, b'x' * (2 << 20))\nMPI.COMM_WORLD.barrier()\nif not MPI.COMM_WORLD.rank: {end}\n"
    launcher = start_job(tmp_path, script, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    # Without a reader.
    assert launcher.wait(TIMEOUT_SECONDS) == (3 if "exit" in end else 137)
    launcher.stdout.close()


@pytest.mark.parametrize("closed", [1, 2])
def test_a_job_runs_with_stdout_or_stderr_closed(tmp_path, closed):
    script = "from mpi4py import MPI\nprint('hello')\nopen(f'here_{MPI.COMM_WORLD.rank}', 'w').close()\n"
    command = shlex.join(job_command(tmp_path, script)) + f" {closed}>&-"
    assert subprocess.run(["sh", "-c", command], cwd=tmp_path, timeout=TIMEOUT_SECONDS).returncode == 0
    assert len(list(tmp_path.glob("here_*"))) == 2


def test_choose_checkpoint_ignores_checkpoints_of_another_run(tmp_path):
    """A run that starts again in a folder ignores the checkpoints of an earlier run, and so do its restarts."""
    from mindnlp_dp.checkpoint.directory import choose_checkpoint
    from mindnlp_dp.checkpoint.manifest import job_of

    assert run_job(tmp_path, INTERRUPTIBLE, tmp_path).exit_code == 0
    job = job_of(tmp_path / "checkpoint-21")
    with pytest.warns(RuntimeWarning, match="begins with update 0"):
        assert choose_checkpoint(tmp_path, None, job="another")[0] is None
    assert choose_checkpoint(tmp_path, None, job=job)[0].name == "checkpoint-21"
    # Now the newest checkpoint is one of an earlier run.
    manifest = tmp_path / "checkpoint-21/checkpoint.json"
    manifest.write_text(manifest.read_text().replace(job, "another"))
    assert choose_checkpoint(tmp_path, None, job=job)[0].name == "checkpoint-18"


def test_mpi_ranks_of_one_host_open_no_network_ports(tmp_path):
    """MPI does not authenticate connections: any process that reaches such a port can talk to a rank."""
    script = HEAD + "open(f'here_{group.rank}', 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    launcher = start_job(tmp_path, script)
    wait_for_files(tmp_path, "here_*")
    for path in tmp_path.glob("here_*"):
        wait_for(path.read_text, "its number")
        found = psutil.Process(int(path.read_text())).net_connections("inet")
        listening = [one.laddr for one in found if one.status == psutil.CONN_LISTEN]
        assert not listening, (path.name, listening)
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(TIMEOUT_SECONDS) == 130


@pytest.mark.parametrize("victim", ["mpirun", "launcher"])
def test_shared_memory_of_mpi_is_removed_after_mpirun_or_the_launcher_is_killed(tmp_path, victim):
    script = (
        HEAD + "folder = os.environ['OMPI_MCA_btl_sm_backing_directory']\n"
        "open(f'here_{group.rank}', 'w').write(folder)\ntime.sleep(600)\n"
    )
    launcher = start_job(tmp_path, script)
    wait_for_files(tmp_path, "here_*")
    time.sleep(0.2)
    folder = Path((tmp_path / "here_0").read_text())
    assert list(folder.glob("sm_segment*"))
    if victim == "launcher":
        launcher.kill()
        launcher.wait()
    else:
        [mpirun] = [p for p in psutil.Process(launcher.pid).children() if p.name() in ("mpirun", "prterun")]
        mpirun.kill()
        assert launcher.wait(TIMEOUT_SECONDS) == 137
        assert not folder.exists()
    # The next launcher removes the folder of a launcher that was killed, and keeps that of a running launcher.
    lives = ScratchDir("job")
    ScratchDir("job").remove()
    assert (folder.exists(), lives.path.exists()) == (False, True)
    lives.remove()
    assert not lives.path.exists()
