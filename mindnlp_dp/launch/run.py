"""``mindnlp-dp run``: start the processes, watch them, end them together, and start them again where that is wanted.

Goes in: a command and a number. Comes out: the exit code of the first rank that
failed, or 0. Each rank writes ``worker_R.log``; rank 0's is shown as it grows. A
rank says how it ended in ``worker_R.status`` (:mod:`mindnlp_dp.launch.worker`), for the
libraries' own exit codes are not always true: processes of MindSpore's cluster may end with 1
after a job that went well. How far it is stands in a file in memory (:mod:`mindnlp_dp.runtime.progress`).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Optional

from mindnlp_dp.runtime import progress

from .devices import default_device, too_many_workers
from .engines import (
    GRACE_SECONDS,
    POLL_SECONDS,
    LaunchError,
    Process,
    end,
    end_ranks,
    grace_seconds,
    start_cluster,
    start_mpi,
)
from .environment import restart_environment
from .hangs import HangWatch, name_hang
from .restarts import Restarts
from .screen import Screen
from .status import PROGRESS
from .verdict import Ended, Failure, Status, find_failure, read_statuses, report_failure

__all__ = ["JobOptions", "LaunchError", "run_job"]

# How long some ranks may have finished before the others' silence is worth a word.
PATIENCE_SECONDS = 30.0
# How often it is looked whether ranks get any further.
_LOOK_SECONDS = 0.5
HANG_TIMEOUT_SECONDS = 1800.0


@dataclass(frozen=True)
class JobOptions:
    """How a job is watched.

    Attributes:
        hang_timeout: seconds without progress of any rank after which the job is ended; 0: never.
        max_restarts: how many times it is started again after a failure.
        tee: whose output is shown: "0", "all" or "none".
    """

    hang_timeout: float = HANG_TIMEOUT_SECONDS
    max_restarts: int = 0
    tee: str = "0"


def run_job(
    nproc: int,
    command: Sequence[str],
    *,
    backend: Optional[str] = None,
    log_dir: Optional[Path] = None,
    options: Optional[JobOptions] = None,
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
    job = _Job(nproc, list(command), environ, backend, log_dir=log_dir, options=options or JobOptions())
    with _interruptible():
        try:
            return job.run()
        except KeyboardInterrupt:
            print("interrupted: all ranks were ended", file=sys.stderr)
            return 128 + signal.SIGINT


class _Job:
    """A job on this host, from its first try to its last."""

    def __init__(
        self,
        nproc: int,
        command: list[str],
        environ: dict[str, str],
        backend: str,
        *,
        log_dir: Path,
        options: JobOptions,
    ) -> None:
        self._nproc, self._command, self._environ, self._backend = nproc, command, environ, backend
        self._log_dir, self._options = log_dir, options
        self._restarts = Restarts(options.max_restarts, log_dir)
        self._began = time.time()

    def run(self) -> int:
        try:
            self._log_dir.mkdir(parents=True, exist_ok=True)
            self._restarts.forget_earlier_jobs()
        except OSError as error:
            raise LaunchError(f"the log folder {self._log_dir} cannot be written to: {error}") from None
        while True:
            began = time.monotonic()
            failure = self._try()
            if failure is None:
                return 0
            seconds = time.monotonic() - began
            report_failure(failure, self._log_dir, self._nproc, seconds)
            update = max((rank.update for rank in progress.read(self._log_dir / PROGRESS)), default=0)
            wait = self._restarts.after(failure, update=update, seconds=seconds)
            if wait is None:
                if self._restarts.why_not:
                    print(f"the job is over: {self._restarts.why_not}", file=sys.stderr)
                return failure.exit_code
            print(
                f"restart {self._restarts.count} of {self._options.max_restarts}"
                + (f" in {wait:.0f} s" if wait else "")
                + f", from the newest checkpoint; logs of this try: {self._log_dir}/try_{self._restarts.count}",
                file=sys.stderr,
            )
            time.sleep(wait)
            self._restarts.put_logs_aside()

    def _try(self) -> Optional[Failure]:
        with open(self._log_dir / "launcher.log", "wb") as log:
            failure = self._attempt(log)
            # On a busy machine OpenMPI's own server may come too late for it ("The PMIx server's listener thread failed
            # to start").
            if failure is not None and self._backend == "mpi" and not any(self._log_dir.glob("worker_*.log")):
                print("mpirun ended before any rank had begun; it is started once more", file=sys.stderr)
                failure = self._attempt(log)
            return failure

    def _attempt(self, log: BinaryIO) -> Optional[Failure]:
        worker = [
            sys.executable, "-m", "mindnlp_dp.launch.worker", str(self._log_dir), str(self._nproc), "--",
            *self._command,
        ]  # fmt: skip
        progress.create(self._log_dir / PROGRESS, self._nproc)
        environ = restart_environment(self._environ, self._restarts.count, self._began)
        start = start_mpi if self._backend == "mpi" else start_cluster
        processes = start(self._nproc, worker, environ, self._log_dir, log)
        try:
            ended, hang = self._watch(processes)
        finally:
            end(processes, grace_seconds(environ))
            end_ranks([rank.pid for rank in progress.read(self._log_dir / PROGRESS) if rank.pid], GRACE_SECONDS)
        return hang or find_failure([Ended(p.rank, p.popen.returncode) for p in ended], self._log_dir, self._nproc)

    def _watch(self, processes: list[Process]) -> tuple[list[Process], Optional[Failure]]:
        """Show logs until all processes have ended, or one has failed; return those that have ended.

        Or until the job hangs, which is a failure of its own.
        """
        working = [process for process in processes if not process.serves]
        screen = Screen(self._log_dir, self._nproc, self._options.tee, self._restarts.count)
        hangs = HangWatch(self._options.hang_timeout)
        finished, patient, looked = dict[int, float](), True, 0.0
        seen, statuses = 0, dict[int, Status]()
        while True:
            ended = [process for process in working if process.popen.poll() is not None]
            now = time.monotonic()
            # Opening as many files as there are ranks, many times a second, costs more than to ask whether there is a
            # new one. Two that come within a tick of the file system's clock are told apart by the next look.
            changed = os.stat(self._log_dir).st_mtime_ns
            if changed != seen or now - looked >= _LOOK_SECONDS:
                seen, statuses = changed, read_statuses(self._log_dir, self._nproc)
            for rank in [*statuses, *(process.rank for process in ended if process.rank is not None)]:
                finished.setdefault(rank, now)
            if patient and finished and now - min(finished.values()) > PATIENCE_SECONDS:
                patient = False
                _mention_stragglers(sorted(finished), self._nproc)
            # A status tells better than the exit code of a process, which a library may have changed.
            failed = any(status.exit_code != 0 for status in statuses.values()) or any(
                process.rank is not None and process.rank not in statuses and process.popen.returncode != 0
                for process in ended
            )
            hang = None
            if not failed and now - looked >= _LOOK_SECONDS:
                looked, ranks = now, progress.read(self._log_dir / PROGRESS)
                screen.say(ranks, len(finished))
                if hangs.look(ranks):
                    hang = name_hang(ranks, sorted(finished), self._log_dir, hangs.timeout)
            screen.show()
            if hang is None and not failed and len(ended) < len(working):
                time.sleep(POLL_SECONDS)
                continue
            if failed:
                # Ranks that fail together all get to say so, and one that is leaving is seen to have left.
                time.sleep(2 * POLL_SECONDS)
                ended = [process for process in working if process.popen.poll() is not None]
            screen.close()
            return ended, hang


def _mention_stragglers(finished: list[int], nproc: int) -> None:
    """Some ranks are done and others are not: they may be writing files, or waiting for ever."""
    running = [rank for rank in range(nproc) if rank not in finished]
    if running:
        print(
            f"ranks {finished} finished {PATIENCE_SECONDS:.0f} s ago, ranks {running} have not. If they wait for the "
            "others they wait for ever: every rank must make the same collective calls. Ctrl-C ends the job",
            file=sys.stderr,
        )


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
