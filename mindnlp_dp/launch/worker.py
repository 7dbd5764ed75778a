"""What one rank's process does around the user's script.

``python run_module.py mindnlp_dp.launch.worker LOG_DIR NPROC -- [-m] SCRIPT ARGS...``

On CPU it binds itself to its cores before anything starts threads. It sends its output to
``worker_R.log``, runs the script as ``python`` would, and says in ``worker_R.status``
how that ended. A script that fails leaves at once: the clean-up of a communication library
would wait for ranks that wait for this one.
"""

from __future__ import annotations

import faulthandler
import json
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Optional

from mindnlp_dp.runtime import progress
from mindnlp_dp.runtime.cores import split_cores

from .environment import goes_on_in_place, name_of_try, ranks_of_this_host
from .fork_client import ENVIRON_CHANGES, changes_of, leave_as, stand_in
from .launchers import launched_rank
from .log_file import LogFile
from .status import PROGRESS
from .verdict import Status, write_status

# Rank 0 is the one that is shown: when all fail together, it gets to speak first.
OTHERS_WAIT_SECONDS = 0.2
# ... and one that failed for want of another rank lets that one say why.
ECHOES_WAIT_SECONDS = 1.0


def main() -> None:
    """Do it here, or stand by while a process does that has imported what takes long."""
    ended = stand_in(os.environ, "mindnlp_dp.launch.worker")
    if ended is None:
        run()
    else:
        leave_as(ended)


def run() -> None:
    """Be the rank that this process was started as."""
    log_dir, nproc = Path(sys.argv[1]), int(sys.argv[2])
    # As long as the script has not changed its environment.
    name = name_of_try(os.environ)
    command = sys.argv[4:]
    rank = launched_rank(os.environ)
    # A block of cores may be far from a rank's card, which its driver knows better.
    if os.environ.get("DEVICE_TARGET", "CPU") == "CPU":
        own = ranks_of_this_host(os.environ, nproc)
        os.sched_setaffinity(0, split_cores(sorted(os.sched_getaffinity(0)), len(own), rank - own.start))
    log = LogFile(log_dir / f"worker_{rank}.log", os.environ)
    # For who watches the job: how far this rank is, and, when it is asked by a signal, where.
    reporter = progress.report_to(log_dir / os.environ.get(progress.VARIABLE, PROGRESS), rank)
    reporter.after_update = log.begin_anew_if_large
    if rank == 0:
        environ = dict(os.environ)
        reporter.before_it_meets = lambda: _write_changes(log_dir, environ)
    stacks = open(log_dir / f"worker_{rank}.stacks", "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)

    this_process = os.getpid()
    code, waited = _run(command)
    # The disk may be full, the folder gone, the streams closed: no reason to end otherwise than the script did.
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    if os.getpid() != this_process:
        # A child that the script has forked, and that came to the script's end.
        os._exit(code)
    if code != 0 and (waited or rank != 0):
        time.sleep(ECHOES_WAIT_SECONDS if waited else OTHERS_WAIT_SECONDS)
    try:
        write_status(log_dir, rank, Status(code, time.monotonic(), waited, name))
    except OSError as error:
        _say(f"how rank {rank} ended is not in {log_dir}: {error}")
    if code != 0:
        if goes_on_in_place(os.environ):
            # mpirun takes no notice of a rank that leaves by itself, and the others are not told.
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(code)
    if nproc > 1 and not _met_the_others():
        _say(
            f"warning: this script never called mindnlp_dp.init_process_group(): {nproc} processes did the same work, "
            "each for itself"
        )
    _silence_libraries()


def _say(text: str) -> None:
    """Into this rank's log, where that can be written to."""
    with suppress(Exception):
        print(text, file=sys.stderr)


def _write_changes(log_dir: Path, before: Mapping[str, str]) -> None:
    """For a fork server: what this rank's script has changed in its environment."""
    try:
        (log_dir / ENVIRON_CHANGES).write_text(json.dumps(sorted(changes_of(before))))
    except OSError:
        pass


def _silence_libraries() -> None:
    """From here on only Python writes to the log: MindSpore's threads report their end there."""
    # Open until the process ends: handlers that run at exit may still write.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        log = os.dup(1)
    except OSError:
        # The script has closed it.
        log = os.dup(nowhere)
    sys.stdout = sys.stderr = open(log, "w", buffering=1, encoding="utf-8")  # noqa: SIM115
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def _run(command: list[str]) -> tuple[int, bool]:
    """Run a script or module; return ``python``'s exit code, and whether it waited in vain for another rank."""
    is_module = command[0] == "-m"
    sys.argv = command[1:] if is_module else command
    try:
        if is_module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.realpath(sys.argv[0])))
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as leave:
        if leave.code is None or isinstance(leave.code, int):
            return (leave.code or 0) & 0xFF, _waited_in_vain(leave)
        _say(str(leave.code))
        return 1, _waited_in_vain(leave)
    except BaseException as error:  # noqa: BLE001
        # Whatever ended the script, the launcher must hear of it.
        with suppress(Exception):
            traceback.print_exception(type(error), error, _without_our_frames(error.__traceback__))
        return 130 if isinstance(error, KeyboardInterrupt) else 1, _waited_in_vain(error)
    return 0, False


def _waited_in_vain(error: Optional[BaseException]) -> bool:
    """Whether an error comes of a rank that did not come; that rank is to be named, and not this one."""
    late_ranks = sys.modules.get("mindnlp_dp.communication.transports.late_ranks")
    mpi_faults = sys.modules.get("mindnlp_dp.communication.transports.mpi_faults")
    if mpi_faults is not None and mpi_faults.tells_of_a_loss(error):
        return True
    while late_ranks is not None and error is not None:
        if isinstance(error, late_ranks.LateRankError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _without_our_frames(trace: Optional[TracebackType]) -> Optional[TracebackType]:
    """The traceback from the user's script on."""
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace


def _met_the_others() -> bool:
    """Whether the script joined a job, by us, by mpi4py or by MindSpore itself."""
    ours = sys.modules.get("mindnlp_dp.communication.process_group")
    management = sys.modules.get("mindspore.communication.management")
    return (
        (ours is not None and ours.was_started)
        or "mpi4py.MPI" in sys.modules
        or (management is not None and management.GlobalComm.INITED)
    )


if __name__ == "__main__":
    main()
