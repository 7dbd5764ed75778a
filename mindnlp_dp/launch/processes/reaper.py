"""Find and end all processes of a job on this host; as a program, end them if their launcher is killed.

``python reaper.py FOLDER SECONDS`` waits until its standard input is closed, which the launcher holds open. If the
launcher has not said that all is well, the program ends the job's processes, by SIGTERM and, after SECONDS, by SIGKILL,
and removes FOLDER, the launcher's own. It imports only the standard library, so that it starts at once.

A process belongs to the job if it has the launcher's folder in its environment. Under ``mindnlp-dp run`` it also does
if it descends from the launcher, to which processes are passed whose parents have ended (:func:`adopting_orphans`).
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple, Optional

# The environment variable of all processes of a job: the launcher's own folder.
VARIABLE = "MINDNLP_DP_JOB_DIR"

_ALL_IS_WELL, _DISMISS_SECONDS = b".", 5.0

_PR_SET_CHILD_SUBREAPER = 36

_adopts = False


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Make this process the parent of descendants whose own parent has ended, inside the block (Linux, prctl(2))."""
    global _adopts
    prctl, _adopts = ctypes.CDLL(None).prctl, True
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _adopts = False
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def launcher() -> Optional[int]:
    """Return this process's id if it is a launcher only, so that all its descendants are its job's; None otherwise."""
    return os.getpid() if _adopts else None


class _Process(NamedTuple):
    """A process as in proc(5): ``has_ended`` if it only waits for its parent to notice."""

    pid: int
    parent: int
    name: str
    has_ended: bool


def _all_processes() -> Iterator[_Process]:
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        # A process may end meanwhile.
        with suppress(OSError), open(f"/proc/{pid}/stat", errors="replace") as file:
            start, _, rest = file.read().rpartition(")")
            state, parent = rest.split()[:2]
            yield _Process(pid, int(parent), start.partition("(")[2], state in "ZX")


def children_of_this_process() -> set[int]:
    """Return the process ids of this process's children."""
    return {process.pid for process in _all_processes() if process.parent == os.getpid()}


def processes_of(folder: str, launcher: Optional[int] = None, others: Collection[int] = ()) -> dict[int, str]:
    """Return the names of a job's living processes, by their process ids.

    Args:
        folder: the launcher's own folder.
        launcher: process id of the launcher, if all its descendants count. Its children that have ended are reaped.
        others: processes that are none of the job's, with their descendants.
    """
    found = {process.pid: process for process in _all_processes()}

    def descends(process: _Process) -> bool:
        while process.pid not in others and process.parent != launcher and process.parent in found:
            process = found[process.parent]
        return process.pid not in others and process.parent == launcher

    names = {}
    for pid, process in found.items():
        if process.has_ended:
            if process.parent == launcher and pid not in others:
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
        elif pid not in others and (descends(process) or _is_marked(pid, folder)):
            names[pid] = process.name
    return names


def _is_marked(pid: int, folder: str) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return f"{VARIABLE}={folder}".encode() in file.read().split(b"\0")
    except OSError:
        # It has ended, or is another user's.
        return False


def send(number: int, processes: Collection[int]) -> None:
    """Send a signal to processes, as far as they still exist."""
    for pid in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


class Watchdog:
    """A process that ends a job's processes if this launcher is killed."""

    def __init__(self, folder: str, grace: float) -> None:
        # Not in the launcher's session, and without its streams: it outlives the launcher.
        self._popen = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, folder, str(grace)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            cwd="/",
        )  # fmt: skip
        self.pid = self._popen.pid

    def dismiss(self) -> None:
        """End the watchdog, because no process of the job is left."""
        try:
            self._popen.communicate(_ALL_IS_WELL, timeout=_DISMISS_SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            # It was killed, or is stopped.
            self._popen.kill()
            self._popen.wait()


def main() -> None:
    """Wait for the launcher's end, and end its job's processes unless it has done that."""
    folder, grace = sys.argv[1], float(sys.argv[2])
    if sys.stdin.buffer.read() == _ALL_IS_WELL:
        return
    send(signal.SIGTERM, processes_of(folder))
    deadline = time.monotonic() + grace
    while processes_of(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    # Again, because a process may just have started another.
    for _ in range(10):
        send(signal.SIGKILL, processes_of(folder))
        time.sleep(0.1)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
