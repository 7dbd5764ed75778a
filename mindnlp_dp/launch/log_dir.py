"""A job's log folder: whose it is, and what earlier tries and earlier jobs have left in it.

Goes in: the folder. Comes out: one that is this job's alone, with nothing in it that a rank of another try has said.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .engines import LaunchError

# A line for each failure.
RECORD = "failures.jsonl"
# What ranks and their engine write into a log folder.
_WRITTEN = re.compile(r"worker_\d+\.(log|log\.\d+|status|stacks)|launcher(_\d+)?\.log|scheduler\.log")
_OF_THE_JOB = re.compile(rf"{re.escape(RECORD)}|progress(_\d+)?|fork_server\.log|environ_changes\.json")
_TRY = re.compile(r"try_\d+")


@contextmanager
def kept_by_this_job(log_dir: Path) -> Iterator[None]:
    """Within it, no other job takes the folder for its own.

    Raises:
        LaunchError: one does so already.
    """
    lock = None
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        lock = os.open(log_dir / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        assert lock is not None
        os.close(lock)
        raise LaunchError(
            f"the log folder {log_dir} is that of a job that runs; give each its own, --log-dir, or none"
        ) from None
    except OSError:
        # A disk that knows no locks, or cannot be written to, which somebody else says.
        pass
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def new_log_dir() -> Path:
    """A folder that nobody else has, as far as that can be: ``logs/DATE-TIME-PID``."""
    name = time.strftime("%Y%m%d-%H%M%S-") + str(os.getpid())
    for number in itertools.count(1):
        # Containers count their processes alike, and may have one disk.
        path = Path("logs", name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(parents=True)
        except OSError:
            if os.path.lexists(path):
                continue
            # Whoever writes to it says why that cannot be.
        return path
    raise AssertionError


def put_logs_aside(log_dir: Path, number: int) -> None:
    """What the try before number ``number`` has written, into a folder of its own."""
    folder = log_dir / f"try_{number}"
    folder.mkdir(parents=True, exist_ok=True)
    for path in log_dir.iterdir():
        if _WRITTEN.fullmatch(path.name):
            try:
                path.replace(folder / path.name)
            except FileNotFoundError:
                # Another host's launcher has, in a folder that they share.
                pass


def forget_earlier_jobs(log_dir: Path) -> None:
    """Remove what earlier jobs have left in the log folder, and nothing else: their ranks' ends are not this job's."""
    tries = [path for path in log_dir.iterdir() if _TRY.fullmatch(path.name) and path.is_dir()]
    for folder in [log_dir, *tries]:
        for path in folder.iterdir():
            if (_WRITTEN.fullmatch(path.name) or _OF_THE_JOB.fullmatch(path.name)) and not path.is_dir():
                path.unlink(missing_ok=True)
        if folder != log_dir and not any(folder.iterdir()):
            folder.rmdir()


def forget_statuses(log_dir: Path) -> bool:
    """How the ranks of a try have ended, which would be taken for the next one's ends; whether none is left."""
    try:
        for path in log_dir.glob("worker_*.status"):
            path.unlink(missing_ok=True)
    except OSError:
        return False
    return True
