"""``mindnlp-dp run``: start the processes, watch them, end them together.

Goes in: a command and a number. Comes out: the exit code of the first rank that
failed, or 0. Each rank writes ``worker_R.log``; rank 0's is shown as it grows. A
rank says how it ended in ``worker_R.status`` (:mod:`mindnlp_dp.launch.worker`), for the
libraries' own exit codes are not always true: processes of MindSpore's cluster may end with 1
after a job that went well.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Optional

from .devices import default_device, too_many_workers
from .environment import clean_environment, cluster_environment, find_mpirun, free_port
from .verdict import Ended, Failure, find_failure, read_statuses, report_failure

POLL_SECONDS = 0.05
GRACE_SECONDS = 3.0
# HCCL and NCCL close their links to other cards; one that is killed may leave its card unusable for a while.
DEVICE_GRACE_SECONDS = 20.0
# How long some ranks may have finished before the others' silence is worth a word.
PATIENCE_SECONDS = 30.0
# Loaded here, for little is safe between fork and exec. The number is Linux's (prctl(2)).
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


class LaunchError(Exception):
    """The job cannot be started as asked."""


def run_job(
    nproc: int, command: Sequence[str], *, backend: Optional[str] = None, log_dir: Optional[Path] = None
) -> int:
    """Run ``python COMMAND`` in ``nproc`` processes and return the job's exit code.

    Raises:
        LaunchError: the script or ``mpirun`` does not exist, or there are fewer devices than processes.
    """
    if command[0] != "-m" and not os.path.isfile(command[0]):
        raise LaunchError(f"the script {command[0]} does not exist")
    environ = dict(os.environ)
    if backend is None:
        device = default_device(environ)
        backend = "mindspore" if device in ("Ascend", "GPU") else "mpi"
        if backend == "mindspore" and "DEVICE_TARGET" not in environ:
            environ["DEVICE_TARGET"] = device
            print(f"this host has {device} cards: --backend mindspore, with them; DEVICE_TARGET=CPU does without")
    if wrong := too_many_workers(nproc, environ):
        raise LaunchError(wrong)
    log_dir = log_dir or Path("logs", time.strftime("%Y%m%d-%H%M%S-") + str(os.getpid()))
    log_dir.mkdir(parents=True, exist_ok=True)
    for stale in [*log_dir.glob("worker_*.log"), *log_dir.glob("worker_*.status")]:
        stale.unlink()

    worker = [sys.executable, "-m", "mindnlp_dp.launch.worker", str(log_dir), str(nproc), "--", *command]
    start = _start_mpi if backend == "mpi" else _start_cluster
    began = time.monotonic()
    with _interruptible(), open(log_dir / "launcher.log", "wb") as launcher_log:

        def attempt() -> Optional[Failure]:
            processes = start(nproc, worker, environ, log_dir, launcher_log)
            try:
                ended = _watch(processes, log_dir, nproc)
            finally:
                _end(processes, grace_seconds(environ))
            return find_failure([Ended(p.rank, p.popen.returncode) for p in ended], log_dir, nproc)

        try:
            failure = attempt()
            # On a busy machine OpenMPI's own server may come too late for it ("The PMIx server's listener thread failed
            # to start").
            if failure is not None and backend == "mpi" and not any(log_dir.glob("worker_*.log")):
                print("mpirun ended before any rank had begun; it is started once more", file=sys.stderr)
                failure = attempt()
        except KeyboardInterrupt:
            print("interrupted: ending all ranks", file=sys.stderr)
            return 128 + signal.SIGINT
    if failure is None:
        return 0
    report_failure(failure, log_dir, nproc, time.monotonic() - began)
    return failure.exit_code


# Starting. Processes whose end ends the job come first in the list; the scheduler, which serves them, is last.


@dataclass(frozen=True)
class _Process:
    popen: subprocess.Popen[bytes]
    rank: Optional[int]
    serves: bool = False


def _start_mpi(nproc: int, worker: list[str], environ: dict[str, str], log_dir: Path, log: BinaryIO) -> list[_Process]:
    mpirun = find_mpirun()
    if mpirun is None:
        raise LaunchError('mpirun was not found; pip install "mindnlp-dp[mpi]", or use --backend mindspore')
    # Ranks bind themselves to their cores, the same way under every backend.
    options = ["-n", str(nproc), "--bind-to", "none", "--oversubscribe"]
    if os.geteuid() == 0:
        options.append("--allow-run-as-root")
    return [_Process(_popen([mpirun, *options, *worker], clean_environment(environ), log), None)]


def _start_cluster(
    nproc: int, worker: list[str], environ: dict[str, str], log_dir: Path, log: BinaryIO
) -> list[_Process]:
    port = free_port()
    processes = []
    for rank in range(nproc):
        environment = cluster_environment(environ, "MS_WORKER", nproc, port, rank)
        processes.append(_Process(_popen(worker, environment, log), rank))
    scheduler = [sys.executable, "-m", "mindnlp_dp.communication.transports.mindspore_scheduler"]
    environment = cluster_environment(environ, "MS_SCHED", nproc, port)
    with open(log_dir / "scheduler.log", "wb") as scheduler_log:
        processes.append(_Process(_popen(scheduler, environment, scheduler_log), None, serves=True))
    return processes


def _popen(command: list[str], environment: dict[str, str], log: BinaryIO) -> subprocess.Popen[bytes]:
    # A session of its own: Ctrl-C reaches the launcher alone, which then ends every rank.
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        preexec_fn=_end_with_the_launcher,  # noqa: PLW1509 -- the launcher has no threads
    )


def _end_with_the_launcher() -> None:
    """Ask Linux to end this process when the launcher does, which may be killed without a chance to do it."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


# Watching.


def _watch(processes: list[_Process], log_dir: Path, nproc: int) -> list[_Process]:
    """Show rank 0's log until all processes have ended, or one has failed; return those that have ended."""
    working = [process for process in processes if not process.serves]
    shown, finished, patient = 0, dict[int, float](), True
    while True:
        ended = [process for process in working if process.popen.poll() is not None]
        statuses = read_statuses(log_dir, nproc)
        for rank in [*statuses, *(process.rank for process in ended if process.rank is not None)]:
            finished.setdefault(rank, time.monotonic())
        if patient and finished and time.monotonic() - min(finished.values()) > PATIENCE_SECONDS:
            patient = False
            _mention_stragglers(sorted(finished), nproc)
        # A status tells better than the exit code of a process, which a library may have changed.
        failed = any(status.exit_code != 0 for status in statuses.values()) or any(
            process.rank is not None and process.rank not in statuses and process.popen.returncode != 0
            for process in ended
        )
        shown = _show(log_dir / "worker_0.log", shown)
        if not failed and len(ended) < len(working):
            time.sleep(POLL_SECONDS)
            continue
        if failed:
            # Ranks that fail together all get to say so, and one that is leaving is seen to have left.
            time.sleep(2 * POLL_SECONDS)
            ended = [process for process in working if process.popen.poll() is not None]
        _show(log_dir / "worker_0.log", shown)
        return ended


def _mention_stragglers(finished: list[int], nproc: int) -> None:
    """Some ranks are done and others are not: they may be writing files, or waiting for ever."""
    running = [rank for rank in range(nproc) if rank not in finished]
    if running:
        print(
            f"ranks {finished} finished {PATIENCE_SECONDS:.0f} s ago, ranks {running} have not. If they wait for the "
            "others they wait for ever: every rank must make the same collective calls. Ctrl-C ends the job",
            file=sys.stderr,
        )


def _show(log: Path, offset: int) -> int:
    try:
        with open(log, "rb") as file:
            file.seek(offset)
            new = file.read()
    except FileNotFoundError:
        return offset
    sys.stdout.buffer.write(new)
    sys.stdout.buffer.flush()
    return offset + len(new)


def grace_seconds(environ: Mapping[str, str]) -> float:
    """How long ranks may take to end when they are asked to."""
    return GRACE_SECONDS if environ.get("DEVICE_TARGET", "CPU") == "CPU" else DEVICE_GRACE_SECONDS


def _end(processes: list[_Process], grace: float) -> None:
    """End what still runs: politely, then, after a grace period, for good."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            if process.popen.poll() is None:
                _signal_session(process.popen.pid, number)
        deadline = time.monotonic() + grace
        while any(p.popen.poll() is None for p in processes) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)


def _signal_session(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        pass


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM ends the job as Ctrl-C does."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
