"""Test that no process, file or folder of a job remains, however it ends, and that it touches no other process."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from npu_host import NpuHost

from conftest import (
    BACKENDS,
    CORE_UNDER_MPI,
    TIMEOUT_SECONDS,
    assert_nothing_is_left,
    core,
    job_command,
    run_job,
    start_job,
    wait_for,
    wait_for_files,
)
from mindnlp_dp.launch.processes import reaper
from mindnlp_dp.runtime.scratch_dir import MEMORY

# Under MindSpore's backend the launcher is the ranks' parent, so a script needs no library.
HEAD = """
import os, signal, subprocess, sys, threading, time
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("MS_NODE_ID", "0")))
def child(name, **options):
    process = subprocess.Popen(["/bin/sh", "-c", "trap '' TERM; exec /bin/sleep 600"], **options)
    open(name, "w").write(str(process.pid))
child(f"child_{rank}_plain")
child(f"child_{rank}_in_its_own_session", start_new_session=True)
child(f"child_{rank}_without_environment", start_new_session=True, env={})
"""
pytestmark = pytest.mark.usefixtures("own_imports")


def children(folder: Path) -> list[psutil.Process]:
    """Return the processes, whose ids are in the folder, that still run."""
    found = []
    for path in folder.glob("child_*"):
        try:
            process = psutil.Process(int(path.read_text() or 0))
            if process.status() != psutil.STATUS_ZOMBIE and process.cwd() == str(folder):
                found.append(process)
        except psutil.Error:
            pass
    return found


def folders_in_memory() -> set[Path]:
    return set(MEMORY.glob("mindnlp-dp-job-*"))


@pytest.mark.parametrize("end", ["sys.exit(3)", "os.kill(os.getpid(), 9)", "os._exit(0)"])
@pytest.mark.parametrize("backend", CORE_UNDER_MPI)
def test_children_of_ranks_end_with_a_failed_job(tmp_path, backend, end):
    job = run_job(tmp_path, HEAD + f"if rank == 1:\n    {end}\ntime.sleep(600)\n", backend=backend)
    assert job.exit_code in (1, 3, 137), job.output
    assert "rank 1 of 2" in job.output
    assert len(list(tmp_path.glob("child_*"))) == 6
    assert children(tmp_path) == []


KILLS_MPIRUN = """
import psutil
if rank == 1 and os.environ["MINDNLP_DP_RESTART_COUNT"] == "0":
    while len([name for name in os.listdir() if name.startswith("child")]) < 6:
        time.sleep(0.1)
    [mpirun] = [p for p in psutil.Process().parents() if p.name() in ("mpirun", "prterun")]
    mpirun.kill()
    time.sleep(600)
if os.environ["MINDNLP_DP_RESTART_COUNT"] == "1":
    sys.exit(0)
time.sleep(600)
"""


def test_a_killed_mpirun_restarts_the_job_and_ends_children_of_ranks(tmp_path):
    """Check the out-of-memory killer, which may choose mpirun."""
    script = HEAD.replace('child(f"', 'if os.environ["MINDNLP_DP_RESTART_COUNT"] == "0": child(f"') + KILLS_MPIRUN
    job = run_job(tmp_path, "--max-restarts", 1, script)
    assert job.exit_code == 0, job.output
    assert "mpirun was killed by signal 9" in job.output
    assert children(tmp_path) == []


@pytest.mark.parametrize("backend", CORE_UNDER_MPI)
def test_children_that_outlive_a_successful_job_are_ended_and_reported(tmp_path, backend):
    job = run_job(tmp_path, HEAD, backend=backend)
    assert job.exit_code == 0, job.output
    assert "processes that the script has started still run, and are ended: sleep" in job.output
    assert children(tmp_path) == []


def test_children_that_end_by_themselves_are_not_reported(tmp_path):
    script = """
        import multiprocessing, subprocess, sys
        if __name__ == "__main__":
            with multiprocessing.get_context("forkserver").Pool(2) as pool:
                print(sum(pool.map(abs, range(10))))
            shared = multiprocessing.get_context("spawn").Queue()
            subprocess.Popen([sys.executable, "-c", "pass"])
    """
    job = run_job(tmp_path, script, nproc=1)
    assert (job.exit_code, job.output) == (0, "45\n")


IGNORES = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nopen(f'here_{rank}', 'w').close()\ntime.sleep(600)\n"


@pytest.mark.parametrize(
    ("backend", "number"),
    [
        pytest.param("mpi", signal.SIGKILL, marks=core), ("mindspore", signal.SIGKILL),
        # Ctrl-\ in a terminal.
        pytest.param("mindspore", signal.SIGQUIT, marks=pytest.mark.slow), ("mpi", signal.SIGQUIT),
    ],
)  # fmt: skip
def test_a_killed_launcher_leaves_no_process_and_no_shared_memory(tmp_path, backend, number):
    # A process without the environment, in its own session, is found only by a launcher that lives.
    script = HEAD.replace('child(f"child_{rank}_without', '0 and child(f"child_{rank}_without') + IGNORES
    launcher = start_job(tmp_path, script, backend=backend, stdout=subprocess.DEVNULL)
    wait_for_files(tmp_path, "here_*")
    ours = {Path(read_variable(int(path.read_text()))) for path in tmp_path.glob("child_*_plain")}
    launcher.send_signal(number)
    assert launcher.wait(TIMEOUT_SECONDS) == -number
    wait_for(lambda: not children(tmp_path), "the children's end")
    assert_nothing_is_left(tmp_path / "logs", soon=True)
    wait_for(lambda: not ours & folders_in_memory(), "the folder in memory to be removed")


def read_variable(pid: int) -> str:
    environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    [folder] = [entry for entry in environ if entry.startswith(reaper.VARIABLE.encode())]
    return folder.decode().partition("=")[2]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_shared_folder_of_a_job_is_private_and_removed_at_its_end(tmp_path, backend):
    before = os.umask(0)
    try:
        job = run_job(
            tmp_path, "import os\nfrom pathlib import Path\n"
            f"folder = Path(os.environ[{reaper.VARIABLE!r}])\n"
            "print(oct(folder.stat().st_mode), folder.stat().st_uid == os.geteuid(), folder, "
            "sorted(os.listdir(folder))[:2])\n",
            nproc=1, backend=backend,
        )  # fmt: skip
    finally:
        os.umask(before)
    assert job.exit_code == 0, job.output
    mode, is_ours, folder, *names = job.output.split()
    assert (mode, is_ours) == ("0o40700", "True")
    assert names == ["['command.json',", "'heartbeats']"]
    assert not Path(folder).exists()
    # Nor are there processes' ids in the log folder, which another user may be able to write to.
    assert sorted(path.name for path in (tmp_path / "logs").rglob("*") if "heart" in path.name) == []


@pytest.mark.skipif(subprocess.run(["unshare", "-pf", "true"]).returncode != 0, reason="no process namespaces here")
def test_a_launcher_with_pid_1_leaves_no_zombies(tmp_path):
    """Check a container without --init: orphans become children of the launcher."""
    script = """
        import os, subprocess, sys, time
        if os.environ["MINDNLP_DP_RESTART_COUNT"] == "0":
            for _ in range(3):
                subprocess.Popen(["sh", "-c", "setsid sleep 0.2 & setsid sleep 600 &"]).wait()
            sys.exit(3)
        stats = [open(f"/proc/{pid}/stat").read() for pid in os.listdir("/proc") if pid.isdecimal()]
        print([stat for stat in stats if "sleep" in stat or ") Z" in stat])
    """
    command = job_command(tmp_path, "--max-restarts", 1, script, nproc=1)
    done = subprocess.run(
        ["unshare", "-pf", "--mount-proc", *command], cwd=tmp_path, stdout=subprocess.PIPE, text=True,
        timeout=TIMEOUT_SECONDS,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "[]\n")


def test_processes_that_the_job_did_not_start_are_not_ended(tmp_path):
    """Check the children of a shell that becomes the launcher, and those of an earlier job's user."""
    (tmp_path / "script.py").write_text("import sys\nsys.exit(3)\n")
    command = shlex.join(job_command(tmp_path, "script.py"))
    done = subprocess.run(
        ["sh", "-c", f"sleep 600 & echo $! > other; setsid sleep 600 & echo $! > another; exec {command}"],
        cwd=tmp_path, timeout=TIMEOUT_SECONDS,
    )  # fmt: skip
    others = [psutil.Process(int((tmp_path / name).read_text())) for name in ("other", "another")]
    alive = [process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in others]
    for process in others:
        process.kill()
    assert (done.returncode, alive) == (3, [True, True])


THREAD = """
import os, subprocess, sys, threading, time
def work():
    time.sleep({seconds})
    print("from the thread", flush=True)
    subprocess.run(["echo", "from a child"])
    {end}
threading.Thread(target=work).start()
print("the main thread has ended", flush=True)
"""


@pytest.mark.parametrize("backend", CORE_UNDER_MPI)
def test_os_exit_in_a_thread_after_the_main_thread_fails_the_job(tmp_path, backend):
    script = THREAD.format(seconds=1, end="os._exit(9) if os.environ.get('OMPI_COMM_WORLD_RANK', "
                                          "os.environ.get('MS_NODE_ID')) == '1' else None")  # fmt: skip
    job = run_job(tmp_path, script, backend=backend)
    assert job.exit_code == 9, job.output
    assert "rank 1 of 2" in job.output


LATER = """
import atexit, codecs, io, logging, os, sys, threading, time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
# Pools that are never shut down, and a thread that works while the main thread does.
pool, other = ThreadPoolExecutor(2), ThreadPool(2)
print(sum(pool.map(abs, range(4))) + sum(other.map(abs, range(4))))
def wait_for_the_main_thread():
    while threading.main_thread().is_alive():
        time.sleep(0.01)
threading.Thread(target=wait_for_the_main_thread).start()
def first():
    second = threading.Thread(target=lambda: (time.sleep(0.5), print("a thread's thread")))
    second.start()
threading.Thread(target=first).start()
logging.basicConfig(format="%(message)s", stream=sys.stdout)
atexit.register(logging.warning, "logged at the end")
codecs.getwriter("utf-8")(sys.stdout.buffer).write("a writer\\n")
sys.stdout = io.TextIOWrapper(sys.stdout.buffer, encoding="utf-8", write_through=True)
print("wrapped again")
"""


def test_a_script_with_threads_and_exit_handlers_ends_as_under_python(tmp_path):
    job = run_job(tmp_path, LATER, nproc=1)
    expected = "12\na writer\nwrapped again\na thread's thread\nlogged at the end\n"
    assert (job.exit_code, job.output) == (0, expected)


def test_run_job_does_not_end_other_children_of_the_calling_process(tmp_path):
    (tmp_path / "script.py").write_text("import subprocess, sys\nsubprocess.Popen(['sleep', '600'])\nsys.exit(3)\n")
    program = """
import subprocess, threading, time
from pathlib import Path
from mindnlp_dp.launch.run import run_job
others = []
def start():
    time.sleep(0.3)
    others.extend([subprocess.Popen(["sleep", "600"]), subprocess.Popen(["sh", "-c", "exit 5"])])
thread = threading.Thread(target=start)
thread.start()
code = run_job(1, ["script.py"], backend="mpi", log_dir=Path("logs"))
thread.join()
print(code, others[0].poll(), others[1].wait())
others[0].kill()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_SECONDS
    )
    assert done.stdout == "3 None 5\n"
    assert not [p for p in psutil.process_iter(["cmdline", "cwd"]) if p.info["cmdline"] == ["sleep", "600"]
                and p.info["cwd"] == str(tmp_path)]  # fmt: skip


def test_sigterm_ends_a_launcher_whose_output_is_not_read(tmp_path):
    """Check a job that has succeeded, and waits for a stopped terminal or a pager."""
    script = "import os\nos.write(1, b'x' * (3 << 20))\nopen('here', 'w').close()\n"
    launcher = start_job(tmp_path, script, nproc=1, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    wait_for_files(tmp_path, "here", 1)
    mpirun = [p for p in psutil.Process(launcher.pid).children() if p.name() in ("mpirun", "prterun")]
    psutil.wait_procs(mpirun, timeout=60)
    time.sleep(0.5)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(60) in (0, 143)
    launcher.stdout.close()


def test_output_of_a_thread_after_the_main_thread_is_shown(tmp_path):
    job = run_job(tmp_path, THREAD.format(seconds=1, end="pass"), nproc=1)
    assert (job.exit_code, job.output) == (0, "the main thread has ended\nfrom the thread\nfrom a child\n")


@pytest.mark.parametrize("device", ["CPU", "Ascend"])
def test_mindspore_ranks_stay_alive_until_all_scripts_have_ended(tmp_path, monkeypatch, device):
    """Check that what a library has not sent at the end of a script still reaches the other ranks."""
    if device == "Ascend":
        NpuHost(tmp_path / "host", monkeypatch, num_cards=2)
    script = """
        import os, time
        from pathlib import Path
        if os.environ["MS_NODE_ID"] == "0":
            Path("pid").write_text(str(os.getpid()))
        else:
            time.sleep(2)
            os.kill(int(Path("pid").read_text()), 0)
            assert Path("/proc", Path("pid").read_text(), "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    """
    assert run_job(tmp_path, script, backend="mindspore").exit_code == 0


def test_a_deleted_working_folder_is_refused_without_a_traceback(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    (tmp_path / "script.py").write_text("")
    command = shlex.join([sys.executable, "-m", "mindnlp_dp", "run", "--nproc", "1", str(tmp_path / "script.py")])
    done = subprocess.run(
        ["sh", "-c", f"cd {gone} && rmdir {gone} && {command}"], stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}, timeout=TIMEOUT_SECONDS,
    )  # fmt: skip
    assert done.returncode == 75
    assert "Traceback" not in done.stderr
    assert "the log folder logs of" in done.stderr
