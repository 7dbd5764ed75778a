"""Test that a failed rank ends its job, and that the launcher reports the rank, its exit code or signal, its error."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from conftest import (
    BACKENDS,
    CORE_UNDER_MPI,
    MPI_FIRST,
    TIMEOUT_SECONDS,
    assert_nothing_is_left,
    core,
    job_command,
    slow,
    start_job,
    wait_for_files,
)
from mindnlp_dp.launch.processes.run_module import PYTHON_VARIABLE
from mindnlp_dp.runtime.versions import mindspore_is_before

HEAD = """
import os, signal, sys, time
import mindnlp_dp as dp
"""
FAIL_AT_START = """
if int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("MS_NODE_ID"))) == 1:
    raise OSError("no such device")
"""
INIT = """
group = dp.init_process_group()
print(f"rank {group.rank} of {group.world_size} is here", flush=True)
"""
# For tests of the launcher alone, which save the seconds that importing MindSpore and mindnlp_dp takes.
MPI_ALONE = """
from mpi4py import MPI
group = MPI.COMM_WORLD
"""
ALONE = {"mpi": MPI_ALONE, "mindspore": INIT}
WAIT = """
group.barrier()
print("never reached")
"""


@pytest.mark.usefixtures("own_imports")
@pytest.mark.parametrize("backend", CORE_UNDER_MPI)
def test_a_successful_job_exits_with_0_and_shows_the_output_of_rank_0(launch, tmp_path, backend):
    job = launch(HEAD + INIT + "group.barrier()\nprint('bye', sys.argv[1:], __name__)\n", "a", "--b", backend=backend)
    assert (job.exit_code, job.output) == (0, "rank 0 of 2 is here\nbye ['a', '--b'] __main__\n")
    assert (tmp_path / "logs/latest/worker_1.log").read_text() == "rank 1 of 2 is here\nbye ['a', '--b'] __main__\n"


# mpirun 5.0 ends the job at ":", and changes "--map-by" to "--mapby".
WORDS = [
    ":",
    "--map-by",
    "slot",
    "--bind-to",
    "core",
    "--r",
    "8",
    "-n",
    "3",
    "--",
    "",
    'it\'s "$x" \\ *',
    "x" * 120_000,
]


@pytest.mark.parametrize("forked", [True, False])
@pytest.mark.parametrize("backend", CORE_UNDER_MPI)
def test_arguments_of_a_script_reach_every_rank_unchanged(launch, tmp_path, monkeypatch, backend, forked):
    if not forked:
        monkeypatch.delenv(PYTHON_VARIABLE)
    script = "import json" + HEAD + ALONE[backend] + "json.dump(sys.argv[1:], open(f'words_{group.rank}', 'w'))\n"
    job = launch(script, *WORDS, backend=backend)
    assert job.exit_code == 0, job.output
    assert [json.loads((tmp_path / f"words_{rank}").read_text()) for rank in range(2)] == [WORDS, WORDS]


def test_a_job_runs_without_the_variable_home(launch, monkeypatch):
    """Check the environment of a system service of systemd, or of ``env -i``: OpenMPI does not start in it."""
    monkeypatch.delenv("HOME")
    job = launch(HEAD + MPI_ALONE + "assert os.path.isdir(os.environ['HOME'])\nif not group.rank: print('started')\n")
    assert (job.exit_code, job.output) == (0, "started\n")


@pytest.mark.parametrize("backend", CORE_UNDER_MPI)
def test_an_exception_on_one_rank_ends_the_waiting_ranks_and_shows_the_traceback(launch, backend):
    job = launch(HEAD + INIT + "if group.rank == 1: raise ValueError('boom')\n" + WAIT, backend=backend)
    assert job.exit_code == 1
    assert "rank 1 of 2 failed with exit code 1" in job.output
    assert "ValueError: boom" in job.output  # rank 1's log is shown
    assert "never reached" not in job.output
    assert "runpy" not in job.output  # the traceback starts in the user's script


@pytest.mark.core
def test_the_job_has_the_exit_code_of_the_failed_rank(launch):
    job = launch(HEAD + INIT + "if group.rank == 0: sys.exit(7)\n" + WAIT)
    assert job.exit_code == 7
    assert "rank 0 of 2 failed with exit code 7" in job.output


@pytest.mark.core
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_killed_rank_ends_the_job_and_is_reported_with_its_signal(launch, backend):
    job = launch(HEAD + INIT + "if group.rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n" + WAIT, backend=backend)
    assert job.exit_code == 128 + signal.SIGKILL
    assert "rank 1 of 2 was killed by signal 9" in job.output


@pytest.mark.usefixtures("own_imports")
@pytest.mark.parametrize("backend", CORE_UNDER_MPI)
def test_a_killed_rank_fails_the_job_although_the_parent_ignores_sigchld(tmp_path, backend):
    """Check a launcher whose parent, such as a daemon that avoids zombies, ignores SIGCHLD: exec inherits that."""
    script = HEAD + ALONE[backend] + "if group.rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n" + WAIT
    done = subprocess.run(
        job_command(tmp_path, script, backend=backend), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        cwd=tmp_path, timeout=TIMEOUT_SECONDS,
        preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
    )  # fmt: skip
    assert done.returncode == 128 + signal.SIGKILL, done.stdout
    assert "rank 1 of 2 was killed by signal 9" in done.stdout


CRASH = """
import ctypes
def crash(depth):
    if depth:
        crash(depth - 1)
    else:
        ctypes.string_at(0)
if group.rank == 1: crash(30)
"""


@pytest.mark.parametrize("backend", CORE_UNDER_MPI)
def test_a_segmentation_fault_shows_the_line_of_the_script(launch, backend):
    job = launch(HEAD + ALONE[backend] + CRASH + WAIT, backend=backend)
    assert job.exit_code == 128 + signal.SIGSEGV
    assert "rank 1 of 2 was killed by signal 11" in job.output
    assert "Fatal Python error: Segmentation fault" in job.output
    assert re.search(r'script.py", line \d+ in crash', job.output)


@pytest.mark.parametrize("backend", CORE_UNDER_MPI)
def test_a_failure_before_the_rendezvous_ends_the_job_and_is_reported(launch, backend):
    job = launch(HEAD + FAIL_AT_START + INIT + WAIT, backend=backend)
    assert job.exit_code == 1
    assert "rank 1 of 2 failed" in job.output
    assert "OSError: no such device" in job.output


@pytest.mark.parametrize(
    ("backend", "code"), [("mpi", 0), pytest.param("mpi", 3, marks=core), pytest.param("mindspore", 0, marks=slow)]
)
def test_os_exit_on_one_rank_ends_the_job_and_is_reported(launch, backend, code):
    leave = f"if group.rank == 1: os._exit({code})\n"
    # On a busy machine, rank 1 may exit some seconds after rank 0 began to wait for it.
    job = launch(HEAD + ALONE[backend] + leave + WAIT, backend=backend, MS_NODE_TIMEOUT="10")
    assert job.exit_code == (code or 1)
    assert f"rank 1 of 2 exited with code {code} before the end of the script (os._exit)" in job.output
    assert "never reached" not in job.output


@pytest.mark.parametrize(
    ("leave", "what"),
    [
        pytest.param("sys.exit(0)", "reached its end, and rank 0 waited", marks=slow),
        ("time.sleep(60)", "was still busy elsewhere when rank 0"),
    ],
    ids=["at its end", "late"],
)
def test_a_mindspore_timeout_is_reported_with_the_missing_rank_not_the_waiting_one(launch, leave, what):
    job = launch(HEAD + INIT + f"if group.rank == 1: {leave}\n" + WAIT, backend="mindspore", MS_NODE_TIMEOUT="10")
    assert job.exit_code == 1
    assert f"rank 1 of 2 {what}" in job.output
    assert "rank 0 waited 10 s in all_gather for a rank that did not arrive, and MindSpore gave up" in job.output
    assert "late by more than MS_NODE_TIMEOUT, which is 10 s here" in job.output


KILL = "os.kill(os.getpid(), signal.SIGKILL)"
OVERLAPPED = """
    import os, signal
    import mindnlp_dp as dp
    from models import Rows, tiny_roberta, train

    group = dp.init_process_group()

    class Fails(dp.DataParallelTrainer):
        def training_step(self, model, inputs):
            loss = super().training_step(model, inputs)
            if group.rank == 1 and self.state.global_step == 3:
                print("under way:", self.synchronizer(model).overlap.is_open, flush=True)
                FAIL
            return loss

    train(tiny_roberta(), Rows(64), "out", trainer_class=Fails, overlap=True, bucket_cap_mb=0.01,
          per_device_train_batch_size=4)
    print("never reached")
"""


@pytest.mark.parametrize(
    ("backend", "fail", "said"),
    [
        ("mpi", "raise ValueError('boom')", "ValueError: boom"),
        pytest.param("mpi", KILL, "rank 1 of 2 was killed by signal 9", marks=core),
        pytest.param("mindspore", KILL, "rank 1 of 2 was killed by signal 9", marks=slow),
    ],
    ids=["exception", "kill", "kill, MindSpore"],
)
def test_a_failure_during_overlapped_gradient_sync_ends_the_job(launch, tmp_path, backend, fail, said):
    job = launch(OVERLAPPED.replace("FAIL", fail), backend=backend)
    assert job.exit_code != 0
    assert said in job.output
    assert "never reached" not in job.output
    assert "under way: True" in (tmp_path / "logs/latest/worker_1.log").read_text()


def test_a_data_set_that_fails_on_one_rank_ends_the_job_with_its_exception(launch):
    script = """
        import mindnlp_dp as dp
        from models import Rows, tiny_roberta, train

        group = dp.init_process_group()

        class Broken(Rows):
            def __getitems__(self, indices):
                if group.rank == 1 and len(self.read) >= 4:
                    raise OSError(f"sample {indices[0]} cannot be read")
                return super().__getitems__(indices)

        train(tiny_roberta(), Broken(40), "out", per_device_train_batch_size=4)
        print("never reached")
    """
    job = launch(script)
    assert job.exit_code == 1
    assert "rank 1 of 2 failed" in job.output
    assert "cannot be read" in job.output
    assert "never reached" not in job.output


@pytest.mark.parametrize("backend", BACKENDS)
def test_stale_cluster_variables_are_ignored(launch, backend):
    stale = {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "8", "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": "1"}
    job = launch(HEAD + INIT + "group.barrier()\n", backend=backend, **stale)
    assert (job.exit_code, job.output) == (0, "rank 0 of 2 is here\n")


def test_an_uncaught_exception_under_plain_mpirun_ends_all_ranks(tmp_path):
    """The MPI backend aborts the job, without mindnlp-dp run, too."""
    script = tmp_path / "script.py"
    script.write_text(HEAD + INIT + "if group.rank == 1: raise ValueError('boom')\n" + WAIT)
    mpirun = os.path.join(os.path.dirname(sys.executable), "mpirun")
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    done = subprocess.run(
        [mpirun, *root, "--oversubscribe", "-n", "2", sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert done.returncode != 0
    assert "ValueError: boom" in done.stdout
    assert "never reached" not in done.stdout


def test_scripts_may_fork_and_replace_or_close_stdout(launch):
    """A script may fork a child that reaches the script's end, replace sys.stdout, and close standard output."""
    job = launch(
        """
        import os, sys, time
        from mpi4py import MPI
        if os.fork() == 0:
            raise SystemExit(5)
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 5
        MPI.COMM_WORLD.barrier()
        import mmap
        from pathlib import Path
        from mindnlp_dp.launch.processes import reaper, worker
        from mindnlp_dp.runtime import heartbeat
        with open(Path(os.environ[reaper.VARIABLE], worker.HEARTBEATS_FILE), "r+b") as file:
            ranks = heartbeat.read(mmap.mmap(file.fileno(), 0))
        assert [rank.exit_code for rank in ranks] == [None, None]
        MPI.COMM_WORLD.barrier()
        with open(f"said_{MPI.COMM_WORLD.rank}", "w") as sys.stdout:
            print("hello")
        os.close(1)
        """
    )
    assert job.exit_code == 0, job.output


@pytest.mark.parametrize("backend", BACKENDS)
def test_sigint_on_one_rank_raises_keyboard_interrupt_and_ends_the_job(launch, tmp_path, backend):
    """MindSpore's cluster installs its own SIGINT handler, with which the ranks would wait for each other."""
    job = launch(
        """
        import os, signal, threading, time
        import numpy as np
        import mindnlp_dp as dp
        group = dp.init_process_group()
        half = group.split([0, 1])
        if group.rank == 1:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            while True:
                half.all_reduce(np.ones(1, np.float32))
        except KeyboardInterrupt:
            print("interrupted as ever")
            raise
        """,
        backend=backend,
    )
    assert job.exit_code == 130, job.output
    assert "rank 1 of 2" in job.output
    assert "interrupted as ever" in (tmp_path / "logs/latest/worker_1.log").read_text()


@pytest.mark.parametrize(
    ("backend", "number"),
    [
        ("mpi", signal.SIGINT), ("mpi", signal.SIGTERM), pytest.param("mpi", signal.SIGKILL, marks=core),
        pytest.param("mindspore", signal.SIGKILL, marks=slow),
    ],
)  # fmt: skip
def test_an_interrupted_launcher_leaves_no_process(tmp_path, backend, number):
    script = HEAD + ALONE[backend] + "(open(f'here_{group.rank}', 'w')).close()\ntime.sleep(600)\n"
    launcher = start_job(tmp_path, script, backend=backend, stdout=subprocess.DEVNULL)
    wait_for_files(tmp_path, "here_*")
    launcher.send_signal(number)
    assert launcher.wait(TIMEOUT_SECONDS) == (-signal.SIGKILL if number == signal.SIGKILL else 128 + number)
    assert_nothing_is_left(tmp_path / "logs", soon=True)


def test_ranks_that_finish_late_are_reported(tmp_path, monkeypatch, capsys):
    from mindnlp_dp.launch import run
    from mindnlp_dp.launch.monitor import attempt_monitor

    monkeypatch.setattr(attempt_monitor, "PATIENCE_SECONDS", 1.0)
    script = tmp_path / "script.py"
    script.write_text(HEAD + MPI_ALONE + "if group.rank == 0: time.sleep(3)\n")
    assert run.run_job(2, [str(script)], backend="mpi", log_dir=tmp_path / "logs") == 0
    assert "ranks [1] finished 1 s ago, ranks [0] have not" in capsys.readouterr().err


@pytest.mark.usefixtures("own_imports")
@pytest.mark.parametrize("backend", MPI_FIRST)
def test_a_process_that_keeps_running_after_success_is_reported_and_ended(tmp_path, monkeypatch, capsys, backend):
    from mindnlp_dp.launch import run
    from mindnlp_dp.launch.monitor import attempt_monitor

    monkeypatch.setattr(attempt_monitor, "PATIENCE_SECONDS", 4.0)
    script = tmp_path / "script.py"
    late = "def close():\n    time.sleep(600)\nif group.rank == 1: threading.Thread(target=close).start()\n"
    script.write_text("import threading" + HEAD + ALONE[backend] + late)
    options = run.JobOptions(hang_timeout=5.0)
    assert run.run_job(2, [str(script)], backend=backend, log_dir=tmp_path / "logs", options=options) == 0
    said = capsys.readouterr().err
    assert "all ranks have finished, the last one 4 s ago:\nthe process of rank 1 (" in said
    assert "script.py:" in said
    assert ", in close()" in said
    assert_nothing_is_left(tmp_path / "logs")


def test_a_missing_mpirun_is_refused_with_the_install_command(monkeypatch, capsys, tmp_path):
    from mindnlp_dp.commands.main import main
    from mindnlp_dp.launch.processes import spawn

    (tmp_path / "script.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(spawn, "find_mpirun", lambda: None)
    assert main(["run", "--nproc", "2", "--backend", "mpi", "script.py"]) == 2
    assert capsys.readouterr().err == (
        'mindnlp-dp run: mpirun was not found; pip install "mindnlp-dp[mpi]", or use --backend mindspore\n'
    )


@pytest.mark.parametrize("failures", [1, 2])
def test_an_mpirun_that_fails_before_ranks_start_is_started_once_more(tmp_path, monkeypatch, capsys, failures):
    from mindnlp_dp.launch import run
    from mindnlp_dp.launch.processes import spawn

    mpirun, count = tmp_path / "mpirun", tmp_path / "count"
    mpirun.write_text(
        f"#!/bin/sh\necho >>{count}\n"
        f"[ $(wc -l <{count}) -gt {failures} ] || {{ echo the listener failed to start; exit 213; }}\n"
        f'exec {spawn.find_mpirun()} "$@"\n'
    )
    mpirun.chmod(0o755)
    monkeypatch.setattr(spawn, "find_mpirun", lambda: str(mpirun))
    script = tmp_path / "script.py"
    script.write_text(HEAD + MPI_ALONE + "print('done')\n")
    exit_code = run.run_job(2, [str(script)], backend="mpi", log_dir=tmp_path / "logs")
    said = capsys.readouterr().err
    assert "mpirun exited before any rank had started; it is started again" in said
    assert exit_code == (0 if failures == 1 else 213)
    assert ("the listener failed to start" in said) == (failures == 2)
    assert len(count.read_text().splitlines()) == 2


STAGES = """
import mindspore, numpy as np
from mindnlp.core import nn, optim
from mindnlp_dp.parallel.parallel_plan import PipelinePlan, ShardingPlan

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return (x * x).mean(), x

model = dp.parallelize(
    Net(), dp.init_device_mesh({"pp": 2}), ShardingPlan(pipeline=PipelinePlan(layers="layers", tuples=False))
)
calls = 0

def forward(x):
    global calls
    calls += 1
    if group.rank == FAILING_RANK and calls == 7:
        raise ValueError("a label is missing")
    return model(x)[0]

optimizer = optim.SGD(model.parameters(), lr=0.1)
step = dp.make_train_step(forward, optimizer, list(model.parameters()), accumulation_steps=4, model=model)
for update in range(3):
    step([{"x": mindspore.Tensor(np.ones((2, 4), np.float32))}] * 4)
    print(f"update {update} is done", flush=True)
"""


@pytest.mark.skipif(mindspore_is_before("2.8"), reason="MCCL has messages between two ranks from 2.8 on")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_failed_pipeline_stage_ends_the_job_under_mccl(launch, rank):
    job = launch(HEAD + INIT + STAGES.replace("FAILING_RANK", str(rank)), backend="mindspore")
    assert job.exit_code == 1
    assert "update 0 is done" in job.output
    assert "update 1 is done" not in job.output
    assert f"rank {rank} of 2 failed with exit code 1" in job.output
    assert "ValueError: a label is missing" in job.output
