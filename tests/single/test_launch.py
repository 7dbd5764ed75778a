"""Test the launcher without starting jobs: environments, exit codes, failed ranks, arguments."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

import mindnlp_dp
from mindnlp_dp.commands.main import main
from mindnlp_dp.launch.monitor.console import _Log
from mindnlp_dp.launch.monitor.failure_attribution import find_failure, report_failure
from mindnlp_dp.launch.monitor.snapshot import JobSnapshot
from mindnlp_dp.launch.processes.attempt import Attempt, HostReport
from mindnlp_dp.launch.processes.environment import clean_environment, cluster_environment, free_port
from mindnlp_dp.launch.processes.exit_status import ExitedProcess
from mindnlp_dp.launch.processes.oom_kills import OomKills
from mindnlp_dp.launch.processes.run_module import command as module_command
from mindnlp_dp.launch.processes.spawn import grace_seconds
from mindnlp_dp.launch.processes.stack_dumps import SIGNAL, describe_location, stacks_of
from mindnlp_dp.launch.rendezvous.protocol import LONGEST_BYTES
from mindnlp_dp.runtime import heartbeat, scratch_dir
from mindnlp_dp.runtime.devices import default_device, set_device_from_env
from mindnlp_dp.runtime.heartbeat import RankHeartbeat, state_and_birth_of
from mindnlp_dp.runtime.launch_env import launched_rank


def end(exit_code, when=1.0, waited=False):
    """Return the heartbeat of a rank that has recorded its end."""
    return RankHeartbeat(exit_code=exit_code, ended=when, waited=waited, threads_ended=True)


def judge(folder, ends, exited, num_ranks=2, **report):
    """Return the failure of an attempt on one host with these records of ranks' ends and ended processes."""
    ranks = [ends.get(rank, RankHeartbeat()) for rank in range(num_ranks)]
    snapshot = JobSnapshot(ranks, [HostReport(ended=exited, **report)])
    attempt = Attempt(0, "mpi", ["train.py"], str(folder), [num_ranks])
    return find_failure(snapshot, [SimpleNamespace(lost="")], attempt)


STALE = {
    "MS_ROLE": "MS_SCHED", "MS_SCHED_PORT": "8118", "MS_WORKER_NUM": "8", "MS_NODE_ID": "5", "RANK_ID": "5",
    "RANK_TABLE_FILE": "/gone", "OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1",
}  # fmt: skip


def test_stale_environment_variables_are_removed():
    environment = clean_environment({**STALE, "HOME": "/root", "GLOG_v": "1"})
    assert environment == {"HOME": "/root", "GLOG_v": "1", "PYTHONUNBUFFERED": "1"}


def test_rank_variables_of_an_outer_launcher_are_removed():
    slurm = {"SLURM_JOBID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
    outer = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", **slurm, "SLURM_JOB_ID": "7"}
    assert clean_environment(outer) == {"SLURM_JOB_ID": "7", "GLOG_v": "3", "PYTHONUNBUFFERED": "1"}


def test_a_cluster_process_gets_its_role_rank_and_timeouts():
    environment = cluster_environment(STALE, "MS_WORKER", 2, ("127.0.0.1", 1234), (1, 1))
    assert environment["MS_ROLE"] == "MS_WORKER"
    assert (environment["MS_WORKER_NUM"], environment["MS_NODE_ID"], environment["MS_SCHED_PORT"]) == ("2", "1", "1234")
    assert "RANK_TABLE_FILE" not in environment
    assert int(environment["MS_NODE_TIMEOUT"]) > 600
    users = cluster_environment({**STALE, "MS_NODE_TIMEOUT": "7"}, "MS_WORKER", 2, ("127.0.0.1", 1234), (1, 1))
    assert users["MS_NODE_TIMEOUT"] == "7"
    beats = {name: value for name, value in users.items() if "RETRY_INTERVAL" in name}
    assert beats == {"MS_RETRY_INTERVAL_LOWER": "1", "MS_RETRY_INTERVAL_UPPER": "1"}
    users = cluster_environment({"MS_RETRY_INTERVAL_UPPER": "9"}, "MS_WORKER", 2, ("127.0.0.1", 1234), (1, 1))
    assert users["MS_RETRY_INTERVAL_UPPER"] == "9"
    assert "MS_RETRY_INTERVAL_LOWER" not in users
    assert "MS_NODE_ID" not in cluster_environment(STALE, "MS_SCHED", 2, ("127.0.0.1", 1234))


def test_a_free_port_can_be_bound():
    port = free_port()
    with socket.socket() as server:
        server.bind(("127.0.0.1", port))
        assert server.getsockname() == ("127.0.0.1", port)


KILLED = """prterun noticed that process rank 1 with PID 12 on node vm exited on
signal 9 (Killed)."""
LEFT = """   Process name: [prterun-vm-3980@1,1]
   Exit code:    3"""
ABORTED = """prterun has exited due to process rank 1 with PID 4059 on node vm calling
"abort". This may have caused other processes in the application to be"""
DISCONNECTED = f"""An MPI communication peer process has unexpectedly disconnected.  This
usually indicates a failure in the peer process
  Peer host:  node2
{ABORTED}"""
LEFT_WELL = """prterun has exited due to process rank 1 with PID 4116 on node vm exiting
improperly. There are three reasons this could occur:"""
MPIRUN = [ExitedProcess(None, 1)]


@pytest.mark.parametrize(
    ("statuses", "ended", "printed", "verdict"),
    [
        ({0: end(1, 5.0), 1: end(3, 4.0)}, MPIRUN, LEFT, (1, 3, "failed with exit code 3")),
        ({}, MPIRUN, KILLED, (1, 137, "was killed by signal 9")),
        ({}, MPIRUN, LEFT, (1, 3, "exited with code 3")),
        ({}, MPIRUN, LEFT_WELL, (1, 1, "exited with code 0")),
        ({}, [ExitedProcess(None, 5)], ABORTED, (1, 5, "aborted the MPI job with exit code 5")),
        ({}, [ExitedProcess(None, 14)], DISCONNECTED, (None, 14, "a rank on node2 exited without reporting a status")),
        ({}, [ExitedProcess(None, 0)], KILLED, (1, 137, "was killed by signal 9")),
        # Codes above 128 that a script has chosen, such as those of sys.exit(-1) and KeyboardInterrupt.
        ({1: end(255, 4.0)}, MPIRUN, "", (1, 255, "failed with exit code 255")),
        ({1: end(130, 4.0)}, MPIRUN, "", (1, 130, "failed with exit code 130")),
        ({}, MPIRUN, "no slots", (None, 1, "")),
        ({}, [ExitedProcess(None, -9)], "", (None, 137, "mpirun was killed by signal 9")),
        ({}, [ExitedProcess(1, -9)], "", (1, 137, "was killed by signal 9")),
        ({}, [ExitedProcess(0, -15), ExitedProcess(1, 0)], "", (1, 1, "exited with code 0")),
        # A rank that waited is not blamed if another rank failed, left, finished, or never arrived.
        ({0: end(1, 5.0, True), 1: end(2, 9.0)}, [], "", (1, 2, "failed with exit code 2")),
        ({0: end(1, 5.0, True)}, [ExitedProcess(0, 1), ExitedProcess(1, 0)], "", (1, 1, "exited with code 0")),
        ({0: end(1, 9.0, True), 1: end(0, 1.0)}, [], "", (1, 1, "reached its end, and rank 0 waited 8 s longer")),
        (
            {0: end(1, 9.0, True)},
            [ExitedProcess(0, 1)],
            "",
            (1, 1, "was still busy elsewhere when rank 0 stopped waiting"),
        ),
        ({0: end(1, 9.0, True), 1: end(1, 9.0, True)}, [], "", (0, 1, "failed with exit code 1")),
    ],
)
def test_the_rank_that_ended_the_job_is_found(tmp_path, statuses, ended, printed, verdict):
    (tmp_path / "launcher.log").write_text(printed)
    rank, code, what = verdict
    failure = judge(tmp_path, statuses, ended)
    assert (failure.rank, failure.exit_code) == (rank, code)
    assert failure.what.startswith(what)


@pytest.mark.parametrize("returncode", [0, 1])
def test_ranks_that_recorded_exit_code_0_have_not_failed(tmp_path, returncode):
    ended = [ExitedProcess(0, returncode), ExitedProcess(1, 0)]
    assert judge(tmp_path, {0: end(0), 1: end(0)}, ended) is None


@pytest.mark.parametrize(
    ("ended", "what"),
    [
        ([ExitedProcess(None, 0)], "exited without reporting a status"),
        ([ExitedProcess(0, 0), ExitedProcess(1, 0)], "exited with code 0 before the end of the script (os._exit),"),
    ],
)
def test_a_rank_without_a_recorded_end_has_failed_despite_exit_code_0(tmp_path, ended, what):
    """Check exit codes of 0 where SIGCHLD is ignored, for mpirun and for the ranks of MindSpore's cluster."""
    failure = judge(tmp_path, {0: end(0), 1: RankHeartbeat(changes=1, pid=2)}, ended)
    assert (failure.rank, failure.exit_code, failure.what) == (1, 1, what)


def test_an_mpirun_failure_without_a_rank_shows_the_logs(tmp_path, capsys):
    """Check what /dev/shm without room leads to."""
    (tmp_path / "launcher.log").write_text("not enough space for /dev/shm/sm_segment")
    (tmp_path / "worker_1.log").write_text("starting")
    failure = judge(tmp_path, {0: end(0), 1: RankHeartbeat(changes=1, pid=1)}, [ExitedProcess(None, 14)])
    assert (failure.rank, failure.exit_code) == (None, 14)
    report_failure(failure, Attempt(0, "mpi", ["train.py"], str(tmp_path), [2]), 3.0)
    said = capsys.readouterr().err
    assert said.startswith("mpirun ended with exit code 14, and ranks [1] have not recorded their end, after 3.0 s;")
    assert "launcher.log begins:\n  not enough space" in said
    assert "worker_1.log ends:\n  starting" in said
    assert "worker_0.log" not in said


@pytest.mark.parametrize(
    ("kills", "why"),
    [
        (0, "often for lack of memory,"),
        (2, "and the kernel has killed 2 processes of this host meanwhile, for lack of memory,"),
    ],
)
def test_an_out_of_memory_kill_is_reported(tmp_path, kills, why):
    sent = HostReport.from_json(json.loads(json.dumps(HostReport(oom_kills=kills).to_json())))
    failure = judge(tmp_path, {0: end(0)}, [ExitedProcess(1, -9)], oom_kills=sent.oom_kills)
    assert (failure.rank, failure.what) == (1, f"was killed by signal 9, {why}")


@pytest.mark.parametrize(
    ("groups", "counter"),
    [
        ("4:memory:/jobs/7\n0::/\n", "sys/fs/cgroup/memory/jobs/7/memory.oom_control"),
        # A container with the host's path, whose own group is the root.
        ("4:memory:/docker/1a\n1:cpu:/docker/1a\n", "sys/fs/cgroup/memory/memory.oom_control"),
        ("0::/user.slice/job\n", "sys/fs/cgroup/user.slice/job/memory.events"),
        # A process of the root group, which has no counter.
        ("0::/\n", "proc/vmstat"),
    ],
)
def test_out_of_memory_kills_are_counted_in_the_cgroup_or_on_the_host(tmp_path, groups, counter):
    def write(path, number):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"oom 9\noom_kill {number}\noom_group_kill 5\n")

    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    write("proc/vmstat", 3)
    write(counter, 7)
    kills = OomKills(tmp_path)
    write(counter, 9)
    assert kills.number == 2
    (tmp_path / counter).unlink()
    assert kills.number == 0


def test_a_process_that_exits_without_a_status_fails_the_job():
    ranks = [end(0), RankHeartbeat()]
    assert JobSnapshot(ranks, [HostReport(ended=[ExitedProcess(1, 0)])]).has_failed
    assert not JobSnapshot(ranks, [HostReport(ended=[ExitedProcess(0, 1), ExitedProcess(None, 1)])]).has_failed


@pytest.mark.parametrize(
    ("exited", "said", "code", "what"),
    [
        ([ExitedProcess(1, 9)], "", 9, "exited with code 9"),
        ([ExitedProcess(1, -9)], "", 137, "was killed by signal 9"),
        ([ExitedProcess(1, 0)], "", 1, "exited with code 0"),
        ([ExitedProcess(None, 9)], LEFT.replace("3\n", "9\n").replace("   3", "   9"), 9, "exited with code 9"),
        ([ExitedProcess(None, 0)], "", 1, "was ended by another thread"),
    ],
)
def test_a_rank_ended_by_a_thread_after_its_main_thread_has_failed(tmp_path, exited, said, code, what):
    (tmp_path / "launcher.log").write_text(said)
    ranks = {0: end(0), 1: RankHeartbeat(pid=1, exit_code=0, ended=1.0)}
    failure = judge(tmp_path, ranks, exited, all_ended=True)
    assert (failure.rank, failure.exit_code) == (1, code)
    assert failure.what.startswith(what)
    # While it runs, the job continues; when it is gone, mpirun has some seconds to say why.
    assert not JobSnapshot(list(ranks.values()), [HostReport()]).has_failed
    assert JobSnapshot(list(ranks.values()), [HostReport(gone=[1])]).exited_silently == [1]


def test_launched_rank_reads_the_rank_of_mpi_or_mindspore():
    assert launched_rank({"OMPI_COMM_WORLD_RANK": "3"}) == 3
    assert launched_rank({"MS_NODE_ID": "2"}) == 2
    with pytest.raises(KeyError, match="mindnlp-dp run"):
        launched_rank({})


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["run", "--nproc", "0", "x.py"],
            "must be a number of at least 1, or MIN:MAX, got 0",
        ),
        (
            ["run", "--nproc", "two", "x.py"],
            "must be a number of at least 1, or MIN:MAX, got two",
        ),
        (["run", "--nproc", "1:9999999999", "x.py"], "must be at most 10000, got 1:9999999999"),
        (["run", "--nproc", "2", "--backend", "gloo", "x.py"], "invalid choice: 'gloo'"),
        (["run", "--nprocs", "2", "x.py"], "unrecognized option --nprocs; did you mean --nproc?"),
        (["run", "--nproc", "2", "--max-restart=1", "x.py"], "option --max-restart; did you mean --max-restarts?"),
        (["run", "--nproc=2", "--tee", "all", "-m", "-q", "x.py"], "unrecognized option -q"),
        (["run", "x.py"], "the following arguments are required: --nproc"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_invalid_arguments_are_refused(argv, message, capsys):
    with pytest.raises(SystemExit) as left:
        main(argv)
    assert left.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--n", "5"],
        ["--r=16"],
        ["--m"],
        ["--log", "x"],
        ["--max=3"],
        ["--nproc", "4"],
        ["-m"],
        ["--help"],
        ["--s=1"],
        ["--r", "8"],
        ["-r", "8"],
        ["--", "--", ":", "", "a b"],
    ],
)
@pytest.mark.parametrize("before", [[], ["-m"], ["--"]])
def test_script_arguments_are_passed_unchanged(monkeypatch, before, arguments):
    given = []
    monkeypatch.setattr("mindnlp_dp.commands.main.run_job", lambda nproc, command, **options: given.append(command))
    main(["run", "--nproc", "2", *before, "train.py", *arguments])
    assert given == [[*(["-m"] if before == ["-m"] else []), "train.py", *arguments]]


def test_a_missing_script_is_refused(capsys):
    assert main(["run", "--nproc", "2", "nowhere.py"]) == 2
    assert capsys.readouterr().err == "mindnlp-dp run: the script nowhere.py does not exist\n"


def test_python_m_mindnlp_dp_runs_the_command():
    done = subprocess.run([sys.executable, "-m", "mindnlp_dp", "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "usage: mindnlp-dp" in done.stdout


def test_the_version_option_prints_the_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"mindnlp-dp {mindnlp_dp.__version__}\n"


NPUS, NO_NPUS = {"ASCEND_RT_VISIBLE_DEVICES": "0,1"}, {"ASCEND_RT_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "0,1"}


@pytest.mark.parametrize(
    ("environ", "device"),
    [
        (NPUS, "Ascend"),
        (NO_NPUS, "CPU"),  # only GPUs: MindSpore's package on PyPI cannot use them
        ({**NPUS, "DEVICE_TARGET": "CPU"}, "CPU"),
        ({**NO_NPUS, "DEVICE_TARGET": "GPU"}, "GPU"),
    ],
)
def test_the_default_device_follows_device_target_and_the_npus(environ, device):
    assert default_device(environ) == device


def test_a_job_without_device_target_reports_that_it_uses_the_npus(monkeypatch, capsys, tmp_path):
    """Check that without DEVICE_TARGET the job uses the cards, reports it, and checks their number."""
    script = tmp_path / "script.py"
    script.write_text("")
    monkeypatch.delenv("DEVICE_TARGET", raising=False)
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0,1")
    assert main(["run", "--nproc", "3", str(script)]) == 2
    said = capsys.readouterr()
    assert said.out == "this host has Ascend cards, and its ranks use them; DEVICE_TARGET=CPU trains on the CPU\n"
    assert "3 workers, but this host has 2 Ascend devices" in said.err


def test_ranks_on_devices_have_a_longer_grace_period():
    assert grace_seconds({"DEVICE_TARGET": "Ascend"}) > grace_seconds({}) == grace_seconds({"DEVICE_TARGET": "CPU"})


@pytest.mark.parametrize(
    ("environ", "card"),
    [
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_RANK": "11"}, 3),
        (cluster_environment({}, "MS_WORKER", 2, ("127.0.0.1", 1), (1, 1)), 1),
        ({"DEVICE_ID": "5"}, None),  # stale variable
        ({}, None),
    ],
)
@pytest.mark.parametrize("chosen", [False, True], ids=["no device set", "device set by the script"])
def test_each_rank_selects_its_own_device(monkeypatch, environ, card, chosen):
    set_to = []
    conf = SimpleNamespace(get_instance=lambda: SimpleNamespace(is_device_enable=lambda: chosen))
    monkeypatch.setattr("mindspore._c_expression.DeviceManagerConf", conf)
    monkeypatch.setattr("mindspore.get_context", lambda name: set_to[-1][0] if set_to else "Ascend")
    monkeypatch.setattr("mindspore.set_device", lambda *device: set_to.append(device))
    monkeypatch.setattr(os, "environ", environ)
    assert set_device_from_env() == "Ascend"
    assert set_to == ([] if card is None or chosen else [("Ascend", card)])


def test_a_rank_records_its_end_and_the_end_of_its_threads(tmp_path):
    memory = heartbeat.create(tmp_path / "heartbeats", 2)
    writer = heartbeat.HeartbeatWriter()
    writer.report_to(tmp_path / "heartbeats", 1)

    def ends():
        return [(rank.exit_code, rank.waited, rank.threads_ended) for rank in heartbeat.read(memory)]

    assert ends() == [(None, False, False), (None, False, False)]
    writer.record_end(200, waited=True)
    assert ends()[1] == (200, True, False)
    writer.record_end_of_threads()
    assert ends() == [(None, False, False), (200, True, True)]


def test_a_reused_process_id_gets_no_signal(tmp_path):
    """Send no signal for its stack, which would end the process."""
    with subprocess.Popen(["sleep", "60"]) as other:
        state, born = state_and_birth_of(other.pid)
        # S, or R or D while it is loaded.
        assert state in ("S", "R", "D")
        ours = RankHeartbeat(changes=1, pid=other.pid, born=born)
        somebody_elses = RankHeartbeat(changes=1, pid=other.pid, born=born - 1)
        assert ours.state in ("S", "R", "D")
        assert somebody_elses.state == ""
        (tmp_path / "worker_0.stacks").write_text("")
        assert stacks_of({0: somebody_elses}, tmp_path) == {}
        assert other.poll() is None
        other.kill()
    assert state_and_birth_of(other.pid) == ("", 0)


def test_the_location_of_a_hang_is_a_line_of_the_users_code():
    """The innermost frames, in the standard library and in any folder of this package, are skipped."""
    package = Path(mindnlp_dp.__path__[0])
    ours = [str(package / name) for name in ("x.py", "communication/process_group.py", "launch/processes/worker.py")]
    files = [threading.__file__, *ours, "/u/train.py"]
    frames = "".join(f'  File "{file}", line {line} in f{line}\n' for line, file in enumerate(files))
    stacks = f"Thread 0x{7:016x} (most recent call first):\n{frames}"
    rank = RankHeartbeat(pid=1, thread=7, update=3)
    assert describe_location(rank, stacks, False) == "it is in /u/train.py:4, in f4(), in update 3"


def test_sys_path_of_a_job_has_the_package_and_not_its_subfolders(tmp_path):
    (tmp_path / "shows_path.py").write_text(
        "import os, sys\ndef main():\n    print(*map(os.path.realpath, sys.path), sep='\\n')\n"
    )
    run = subprocess.run(
        module_command("shows_path"), capture_output=True, text=True, check=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    package = Path(mindnlp_dp.__path__[0]).resolve()
    searched = [Path(line) for line in run.stdout.splitlines()]
    assert package.parent in searched
    assert not [path for path in searched if path == package or package in path.parents]


def test_stacks_of_many_ranks_fit_into_a_message(tmp_path):
    handles = f"trap : {SIGNAL}; echo ready; while :; do sleep 0.1; done"
    with subprocess.Popen(["bash", "-c", handles], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "ready\n"
        rank = RankHeartbeat(changes=1, pid=other.pid, born=state_and_birth_of(other.pid)[1])
        for number in range(64):
            (tmp_path / f"worker_{number}.stacks").write_text("x" * 70_000)
        found = stacks_of(dict.fromkeys(range(64), rank), tmp_path)
        other.kill()
    assert len(found) == 64
    assert len(json.dumps(found)) < LONGEST_BYTES


def test_a_process_without_a_handler_gets_no_signal_for_its_stacks(tmp_path):
    """Check a rank after Python's end, which the signal would end while a driver cleans up."""
    with subprocess.Popen(["sleep", "60"]) as other:
        rank = RankHeartbeat(changes=1, pid=other.pid, born=state_and_birth_of(other.pid)[1])
        (tmp_path / "worker_0.stacks").write_text("")
        assert stacks_of({0: rank}, tmp_path) == {}
        assert other.poll() is None
        other.kill()


def test_a_memory_folder_of_another_user_is_not_opened(monkeypatch, tmp_path):
    """Do not open another user's lock: it may be a link, or a FIFO that blocks the process that opens it."""
    stale = tmp_path / "mindnlp-dp-job-x"
    stale.mkdir()
    os.mkfifo(stale / "lock")
    monkeypatch.setattr(scratch_dir, "MEMORY", tmp_path)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    scratch_dir.ScratchDir("job").remove()
    assert stale.exists()
    monkeypatch.undo()
    monkeypatch.setattr(scratch_dir, "MEMORY", tmp_path)
    (stale / "lock").unlink()
    (stale / "lock").symlink_to("/dev/full")
    scratch_dir.ScratchDir("job").remove()
    assert stale.exists()
    (stale / "lock").unlink()
    (stale / "lock").touch()
    scratch_dir.ScratchDir("job").remove()
    assert not stale.exists()


def test_a_log_is_read_later_if_no_file_descriptor_is_free(tmp_path, monkeypatch):
    (tmp_path / "worker_0.log").write_text("hello")
    log = _Log(tmp_path / "worker_0.log", "")

    def full(*args, **kwargs):
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", full)
        assert log.new() is None
    assert log.new() == b"hello"


def test_a_heartbeat_read_during_a_write_is_consistent(tmp_path):
    """Read a record that a rank writes thousands of times per second."""
    memory = heartbeat.create(tmp_path / "heartbeats", 1)
    own = "import sys, threading\nfrom pathlib import Path\nfrom mindnlp_dp.runtime import heartbeat\n" + (
        "heartbeat.report_to(Path(sys.argv[1]), 0)\nprint('ready', flush=True)\nwhile True:\n    heartbeat.step()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", own, str(tmp_path / "heartbeats")], stdout=subprocess.PIPE, text=True
    ) as rank:
        assert rank.stdout.readline() == "ready\n"
        found = [heartbeat.read(memory)[0] for _ in range(20_000)]
        states = {one.state for one in found}
        rank.kill()
    assert {one.pid for one in found} == {rank.pid}
    assert "" not in states
