"""Test elastic jobs, whose number of ranks changes, and restarts by a fork server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import numpy as np
import psutil
import pytest

from conftest import (
    CORE_UNDER_MPI,
    ROOT,
    TIMEOUT_SECONDS,
    assert_nothing_is_left,
    job_command,
    processes_of,
    run_job,
    start_job,
    wait_for_files,
)

ELASTIC = ROOT / "tests/failure/elastic.py"
UPDATES = 40


def results(folder):
    with np.load(folder / "weights.npz") as weights:
        return json.loads((folder / "result.json").read_text()), dict(weights)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Train with three ranks and no fault."""
    folder = tmp_path_factory.mktemp("undisturbed")
    job = run_job(folder, ELASTIC, folder, "--updates", UPDATES, "--seconds", 0, nproc=3)
    assert job.exit_code == 0, job.output
    return results(folder)


@pytest.mark.parametrize("backend", CORE_UNDER_MPI)
def test_a_job_shrinks_and_grows_and_trains_the_same_model(tmp_path, undisturbed, backend):
    exit_code, output = run_job(
        tmp_path, "--grow-after", 1, ELASTIC, tmp_path, "--updates", UPDATES, "--seconds", 0.2,
        "--fault", "kill@7:2", "--fault", "raise@20:0", nproc="1:3", backend=backend,
    )  # fmt: skip
    assert exit_code == 0, output
    found, weights = results(tmp_path)
    expected, whole = undisturbed
    assert len(found["sizes"]) == UPDATES
    assert found["sizes"][:5] == [3] * 5
    assert min(found["sizes"][5:]) < 3
    assert found["sizes"][-1] == 3
    for name, weight in whole.items():
        # AdamW amplifies rounding differences with every update.
        np.testing.assert_allclose(weights[name], weight, rtol=0, atol=2e-3, err_msg=name)
    # Growing is not recorded as a failure.
    failures = [json.loads(line) for line in (tmp_path / "logs/failures.jsonl").read_text().splitlines()]
    assert [failure["restart"] for failure in failures] == [1, 2]
    assert "the job continues with 2 of 3 ranks" in output
    assert "the job continues with 3 of 3 ranks" in output
    if backend == "mpi":
        # The job that resumes with fewer ranks keeps the global batch.
        assert "training with the checkpoint's global batch of 12 samples" in output
    assert expected["sizes"] == [3] * UPDATES


@pytest.mark.slow
def test_batches_that_are_in_proportion_to_the_ranks(tmp_path):
    """Every epoch reads every sample once, in smaller batches while a rank is missing."""
    exit_code, output = run_job(
        tmp_path, "--grow-after", 1, "--scale-batch", ELASTIC, tmp_path, "--updates", UPDATES, "--seconds", 0.2,
        "--fault", "kill@7:2", nproc="2:3",
    )  # fmt: skip
    assert exit_code == 0, output
    assert "training with global batches of 8 samples, and 0.667 times the learning rate" in output
    sizes = results(tmp_path)[0]["sizes"]
    assert len(sizes) > UPDATES
    assert sizes[0] == sizes[-1] == 3
    epochs = read = 0
    for size in sizes:
        read += 4 * size
        if read >= 48:
            epochs, read = epochs + 1, 0
    assert (epochs, read) == (UPDATES * 12 // 48, 0)


def test_the_smallest_size_is_kept_and_a_fault_that_returns_ends_the_job(tmp_path):
    exit_code, output = run_job(tmp_path, "import sys\nsys.exit(5)\n", nproc="2:3")
    assert exit_code == 5
    assert output.count("the job continues with 2 of 3 ranks") == 2
    assert "3 attempts in a row have not finished a single update" in output


FORKED = """
import os, sys, time
from pathlib import Path
print("imported before:", "mindnlp.engine" in sys.modules, os.environ.get("MINDNLP_DP_RESTART_COUNT"), flush=True)
import mindnlp_dp as dp
group = dp.init_process_group()
server = Path("logs/fork_server.log")
while os.environ["MINDNLP_DP_RESTART_COUNT"] == "0" and not (server.exists() and "ready" in server.read_text()):
    time.sleep(0.1)
Path(f"pid_{group.rank}").write_text(str(os.getpid()))
"""


# These ranks are forked by their job's own server. The other tests show the same for the shared server.
@pytest.mark.parametrize(
    ("how", "code", "backend"),
    [("os.kill(os.getpid(), 2)", 130, "mpi"), ("1 / 0", 1, "mindspore")],
)
@pytest.mark.slow
@pytest.mark.usefixtures("own_imports")
def test_ranks_that_were_forked_end_as_others_do(tmp_path, how, code, backend, request):
    # A shell script ignores SIGINT in its background processes, too.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    script = (
        FORKED + f"if group.rank == 1:\n    import subprocess\n    subprocess.Popen(['sleep', '600'])\n    {how}\n"
        "group.barrier()\n"
    )
    exit_code, output = run_job(tmp_path, "--max-restarts", 1, script, backend=backend)
    started = [p for p in psutil.process_iter(["cmdline", "cwd"]) if p.info["cmdline"] == ["sleep", "600"]]
    assert not [p for p in started if p.info["cwd"] == str(tmp_path)]
    assert exit_code == code
    assert "imported before: False 0" in output
    assert "imported before: True 1" in output
    assert output.count("rank 1 of 2") == 2
    if how == "1 / 0":
        assert "ZeroDivisionError" in (tmp_path / "logs/latest/worker_1.log").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("own_imports")
def test_forked_ranks_train_to_the_bit_and_leave_with_0(tmp_path, undisturbed):
    """The faults come late enough for the fork server to be ready; the number of ranks stays the same."""
    exit_code, output = run_job(
        tmp_path, "--max-restarts", 3, ELASTIC, tmp_path, "--updates", UPDATES, "--seconds", 0.2,
        "--fault", "kill@31:1", "--fault", "kill@33:0", "--fault", "exit@36:2", nproc=3,
    )  # fmt: skip
    assert exit_code == 0, output
    assert results(tmp_path)[0]["digest"] == undisturbed[0]["digest"]


def test_a_shared_server_forks_what_would_have_begun_by_itself(tmp_path):
    """Forked ranks have the caller's umask and unbuffered output. A job with another PYTHONPATH is not forked."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/of_the_user.py").write_text("")
    (tmp_path / "script.py").write_text(
        "import os, sys\nprint('imported before:', 'mindnlp.engine' in sys.modules)\n"
        "open(sys.argv[1], 'w').close()\n__import__(sys.argv[2])\nos.kill(os.getpid(), 9)\n"
    )
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    server = subprocess.Popen(
        [sys.executable, "-m", "mindnlp_dp.launch.processes.fork_server", str(tmp_path / "ranks")], env=environ,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    environ["MINDNLP_DP_FORK_SERVER"] = str(tmp_path / "ranks")
    path = os.pathsep.join([str(tmp_path / "modules"), os.environ.get("PYTHONPATH", "")])
    try:
        assert "ready" in server.stdout.readline()
        for name, module, other in (("as it is", "json", {}), ("elsewhere", "of_the_user", {"PYTHONPATH": path})):
            job = subprocess.run(
                job_command(tmp_path, "script.py", name, module, nproc=1), cwd=tmp_path, env={**environ, **other},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, umask=0o027, timeout=TIMEOUT_SECONDS,
            )  # fmt: skip
            assert job.returncode == 137, job.stdout
            assert f"imported before: {not other}" in job.stdout
            assert (tmp_path / name).stat().st_mode & 0o777 == 0o640
    finally:
        server.kill()
        server.wait()


@pytest.mark.usefixtures("own_imports")
@pytest.mark.parametrize(
    ("victim", "backend"),
    [
        pytest.param("stand-in", "mpi", marks=pytest.mark.slow),
        pytest.param("server", "mpi", marks=pytest.mark.slow),
        ("launcher", "mpi"),
        pytest.param("launcher", "mindspore", marks=pytest.mark.slow),
    ],
)
def test_nothing_is_left_of_forked_ranks(tmp_path, victim, backend):
    script = (
        FORKED + "if os.environ['MINDNLP_DP_RESTART_COUNT'] == '0':\n    sys.exit(1)\n"
        "import signal\ndef leave(number, frame):\n    Path(f'asked_{group.rank}').touch()\n    sys.exit(1)\n"
        "signal.signal(signal.SIGTERM, leave)\n"
        "Path(f'again_{group.rank}').touch()\ntime.sleep(600)\n"
    )
    launcher = start_job(tmp_path, "--max-restarts", 1, script, backend=backend)
    wait_for_files(tmp_path, "again_*")
    found = processes_of(tmp_path / "logs")
    servers = [p for p in found if "mindnlp_dp.launch.processes.fork_server" in p.cmdline()]
    server = next(p for p in servers if p.ppid() == launcher.pid)
    stand_ins = [
        p for p in found if "mindnlp_dp.launch.processes.worker" in p.cmdline() and "mpirun" not in p.cmdline()[0]
    ]
    victims = {"stand-in": stand_ins[0].pid, "server": server.pid, "launcher": launcher.pid}
    os.kill(victims[victim], signal.SIGKILL)
    assert launcher.wait(TIMEOUT_SECONDS) != 0
    assert_nothing_is_left(tmp_path / "logs", soon=True)
    if victim == "launcher":
        assert len(list(tmp_path.glob("asked_*"))) == 2
