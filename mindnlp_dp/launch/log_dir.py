"""A job's log folder: whose it is, and what earlier tries and earlier jobs have left in it.

Goes in: the folder. Comes out: one that is this job's alone, with nothing in it that a rank of another try has said.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import shutil
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
_TRY, _JOB = re.compile(r"try_(\d+)"), re.compile(r"job_(\d+)")
# Says that a job has made the folder its own.
_MARKER = ".mindnlp_dp"
# What explains the last failures; an elastic job may have a hundred tries, and each log hundreds of MiB.
_KEPT_TRIES, _KEPT_JOBS = 10, 3


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
    folder = _new_folder(log_dir / f"try_{number}")
    for path in log_dir.iterdir():
        if _WRITTEN.fullmatch(path.name):
            try:
                path.replace(folder / path.name)
            except FileNotFoundError:
                # Another host's launcher has, in a folder that they share.
                pass
    _keep_the_last(log_dir, _TRY, _KEPT_TRIES)


def put_earlier_job_aside(log_dir: Path) -> None:
    """What an earlier job has left in the log folder, into ``job_N``: it may say why this one was started again.

    Raises:
        LaunchError: as :func:`claim`.
    """
    claim(log_dir)
    if left := [path for path in log_dir.iterdir() if _is_left_by_a_job(path)]:
        folder = _new_folder(log_dir / f"job_{_last_number(log_dir, _JOB) + 1}")
        for path in left:
            path.replace(folder / path.name)
    _keep_the_last(log_dir, _JOB, _KEPT_JOBS)


def claim(log_dir: Path) -> None:
    """From now on the folder is a job's.

    Raises:
        LaunchError: no job has written to it yet, and it holds something that has the name of a log.
    """
    marker = log_dir / _MARKER
    if not marker.exists():
        named = [path.name for path in log_dir.iterdir() if _is_left_by_a_job(path) or _JOB.fullmatch(path.name)]
        if named:
            raise LaunchError(
                f"the log folder {log_dir} is no job's, and holds {', '.join(sorted(named))}, which a job would "
                "overwrite; give another one, --log-dir"
            )
        marker.touch()


def _new_folder(folder: Path) -> Path:
    """One that is known to be ours, and may be removed."""
    folder.mkdir(exist_ok=True)
    (folder / _MARKER).touch()
    return folder


def _is_left_by_a_job(path: Path) -> bool:
    if path.is_dir():
        return bool(_TRY.fullmatch(path.name))
    return any(of.fullmatch(path.name) for of in (_WRITTEN, _OF_THE_JOB))


def _last_number(log_dir: Path, pattern: re.Pattern[str]) -> int:
    found = [pattern.fullmatch(path.name) for path in log_dir.iterdir() if path.is_dir()]
    return max((int(match[1]) for match in found if match), default=0)


def _keep_the_last(log_dir: Path, pattern: re.Pattern[str], how_many: int) -> None:
    """Of the folders of that name that jobs have made, those with the highest numbers."""
    last = _last_number(log_dir, pattern)
    for path in log_dir.iterdir():
        match = pattern.fullmatch(path.name)
        if match and (path / _MARKER).exists() and int(match[1]) <= last - how_many:
            shutil.rmtree(path, ignore_errors=True)


def forget_statuses(log_dir: Path) -> bool:
    """How the ranks of a try have ended, which would be taken for the next one's ends; whether none is left."""
    try:
        for path in log_dir.glob("worker_*.status"):
            path.unlink(missing_ok=True)
    except OSError:
        return False
    return True
