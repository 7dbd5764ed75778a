"""Run the user's script in the process of one rank, which mpirun or the launcher starts.

``python run_module.py mindnlp_dp.launch.processes.worker LOG_DIR NPROC``, and ``[-m] SCRIPT ARGS...`` in a file of the
launcher's folder.

On CPU the process binds itself to its cores before any thread starts. It sends its output to
``worker_R.log``, runs the script as ``python`` would, and records in its heartbeat
how the script ended. If the script fails, the process exits at once: the clean-up of a
communication library would wait for ranks that wait for this one.
"""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Optional

from mindnlp_dp.launch.log_dir import LogFile, open_log
from mindnlp_dp.launch.processes import reaper
from mindnlp_dp.launch.processes.stack_dumps import SIGNAL
from mindnlp_dp.runtime import heartbeat
from mindnlp_dp.runtime.devices import default_device
from mindnlp_dp.runtime.job_context import ranks_of_this_host
from mindnlp_dp.runtime.launch_env import launched_rank
from mindnlp_dp.runtime.threads import split_cores

# Files of the launcher's folder: the command, as JSON, and the memory of the ranks' heartbeats.
COMMAND_FILE, HEARTBEATS_FILE = "command.json", "heartbeats"

# Rank 0's output is shown, so when all ranks fail together, rank 0 reports first.
OTHERS_WAIT_SECONDS = 0.2

# How often a rank that has finished checks whether the others have.
_OTHERS_END_SECONDS = 0.05

# A rank that gave up waiting for another rank lets that rank report the cause first.
ECHOES_WAIT_SECONDS = 1.0


def main() -> None:
    """Run the script as the rank that this process was started for, and record how it ended."""
    log_dir, nproc, shared = Path(sys.argv[1]), int(sys.argv[2]), Path(os.environ[reaper.VARIABLE])
    command = json.loads((shared / COMMAND_FILE).read_text())
    rank = launched_rank(os.environ)
    # A launcher in the background of a shell script ignores it, but its ranks must not.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # With cards, a block of cores may be far from the rank's card; the card's driver knows better.
    on_cpu, own = default_device(os.environ) == "CPU", ranks_of_this_host(os.environ, nproc)
    if on_cpu:
        os.sched_setaffinity(0, split_cores(sorted(os.sched_getaffinity(0)), len(own), rank - own.start))
    log = LogFile(log_dir / f"worker_{rank}.log", os.environ)
    # For the launcher: this rank's progress, and its stacks when a signal asks for them.
    memory = heartbeat.report_to(shared / HEARTBEATS_FILE, rank)
    heartbeat.writer.after_update = log.rotate_if_large
    faulthandler.register(SIGNAL, open_log(log_dir / f"worker_{rank}.stacks"), all_threads=True)
    # A segmentation fault in a kernel leaves the line of the script that called it in the log.
    faulthandler.enable(2, all_threads=False)

    this_process = os.getpid()
    code, waited = _run(command)
    # A full disk, a removed folder or closed streams must not change how this process ends.
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    if os.getpid() != this_process:
        # This is a child that the script has forked, and that has reached the script's end.
        os._exit(code)
    if code != 0 and (waited or rank != 0):
        time.sleep(ECHOES_WAIT_SECONDS if waited else OTHERS_WAIT_SECONDS)
    heartbeat.writer.record_end(code, waited=waited)
    if code != 0:
        os._exit(code)
    # A script without MindSpore, such as one that checks its arguments, has trained nothing.
    if nproc > 1 and "mindspore" in sys.modules and not _has_joined():
        _say(
            f"warning: this script never called mindnlp_dp.init_process_group(): {nproc} processes did the same work "
            "independently"
        )
    # As Python does before it ends: it waits for the script's threads, which may still work, print, or end the process.
    threading._shutdown()  # type: ignore[attr-defined]
    heartbeat.writer.record_end_of_threads()
    # A process that ends takes with it what its library has not sent yet, and another rank waits for that.
    while "MS_ROLE" in os.environ and _still_run(memory, own):
        time.sleep(_OTHERS_END_SECONDS)
    log.silence_libraries()


def _still_run(memory: mmap.mmap, ranks: range) -> bool:
    """Return whether a script of these ranks, which are this host's, has not ended."""
    found = heartbeat.read(memory)
    return any(found[rank].exit_code is None for rank in ranks)


def _say(text: object) -> None:
    """Print to this rank's log, if that can be written to."""
    with suppress(Exception):
        print(text, file=sys.stderr)


def _run(command: list[str]) -> tuple[int, bool]:
    """Run a script or module; return ``python``'s exit code, and whether it gave up waiting for another rank."""
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
            return (leave.code or 0) & 0xFF, _blames_another_rank(leave)
        _say(leave.code)
        return 1, _blames_another_rank(leave)
    except BaseException as error:  # noqa: BLE001
        # Whatever ended the script, the launcher must hear of it.
        with suppress(Exception):
            traceback.print_exception(type(error), error, _without_our_frames(error.__traceback__))
        return 130 if isinstance(error, KeyboardInterrupt) else 1, _blames_another_rank(error)
    return 0, False


def _blames_another_rank(error: Optional[BaseException]) -> bool:
    """Return whether an error only says that another rank is missing or lost: that rank is to blame, not this one."""
    collective_calls = sys.modules.get("mindnlp_dp.communication.transports.mindspore.collective_calls")
    while collective_calls is not None and error is not None:
        if isinstance(error, collective_calls.CollectiveTimeoutError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _without_our_frames(trace: Optional[TracebackType]) -> Optional[TracebackType]:
    """Return the traceback without the frames before the user's script."""
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace


def _has_joined() -> bool:
    """Return whether the script joined a job, through this package, mpi4py or MindSpore itself."""
    ours = sys.modules.get("mindnlp_dp.communication.default_group")
    management = sys.modules.get("mindspore.communication.management")
    return (
        (ours is not None and ours.was_started)
        or "mpi4py.MPI" in sys.modules
        or (management is not None and management.GlobalComm.INITED)
    )


if __name__ == "__main__":
    main()
