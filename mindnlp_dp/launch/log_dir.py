"""Reserve a job's log folder, and archive what earlier attempts and earlier jobs have left in it.

The launcher calls it, so that the folder belongs to one job, and no status of an earlier attempt is read by mistake.
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

# The file that has a line for each failure.
RECORD = "failures.jsonl"
# The files that ranks and their engine write into a log folder.
_WRITTEN = re.compile(r"worker_\d+\.(log|log\.\d+|status|stacks)|launcher(_\d+)?\.log|scheduler\.log")
_OF_THE_JOB = re.compile(rf"{re.escape(RECORD)}|progress(_\d+)?|fork_server\.log|environ_changes\.json")
_TRY, _JOB = re.compile(r"try_(\d+)"), re.compile(r"job_(\d+)")
# The file that marks a folder as a job's.
_MARKER = ".mindnlp_dp"
# Enough to explain the last failures; an elastic job may have a hundred attempts, and each log hundreds of MiB.
_KEPT_TRIES, _KEPT_JOBS = 10, 3


@contextmanager
def kept_by_this_job(log_dir: Path) -> Iterator[None]:
    """Lock the folder inside the block, so that no other job uses it.

    Raises:
        LaunchError: another job has locked the folder.
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
        # The disk does not support locks, or cannot be written to, which a later write reports.
        pass
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def new_log_dir() -> Path:
    """Create and return a folder that no other job has, as far as possible: ``logs/DATE-TIME-PID``."""
    name = time.strftime("%Y%m%d-%H%M%S-") + str(os.getpid())
    for number in itertools.count(1):
        # Containers may share a disk, and each may have the same process ids.
        path = Path("logs", name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(parents=True)
        except OSError:
            if os.path.lexists(path):
                continue
            # The first write to the folder reports why it cannot be created.
        return path
    raise AssertionError


def put_logs_aside(log_dir: Path, number: int) -> None:
    """Move what the attempt before attempt ``number`` has written to a separate folder, ``try_NUMBER``."""
    folder = _new_folder(log_dir / f"try_{number}")
    for path in log_dir.iterdir():
        if _WRITTEN.fullmatch(path.name):
            try:
                path.replace(folder / path.name)
            except FileNotFoundError:
                # Another host's launcher has moved it, in a shared folder.
                pass
    _keep_the_last(log_dir, _TRY, _KEPT_TRIES)


def put_earlier_job_aside(log_dir: Path) -> None:
    """Move what an earlier job has left to the folder ``job_N``: it may explain why this job was started again.

    Raises:
        LaunchError: the same as for :func:`claim`.
    """
    claim(log_dir)
    if left := [path for path in log_dir.iterdir() if _is_left_by_a_job(path)]:
        folder = _new_folder(log_dir / f"job_{_last_number(log_dir, _JOB) + 1}")
        for path in left:
            path.replace(folder / path.name)
    _keep_the_last(log_dir, _JOB, _KEPT_JOBS)


def claim(log_dir: Path) -> None:
    """Mark the folder as a job's.

    Raises:
        LaunchError: no job has marked the folder yet, and it holds a file that has the name of a log.
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
    """Create a folder with a mark that it is ours and may be removed."""
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
    """Remove the folders of that name that jobs have made, except those with the highest numbers."""
    last = _last_number(log_dir, pattern)
    for path in log_dir.iterdir():
        match = pattern.fullmatch(path.name)
        if match and (path / _MARKER).exists() and int(match[1]) <= last - how_many:
            shutil.rmtree(path, ignore_errors=True)


def forget_statuses(log_dir: Path) -> bool:
    """Remove the statuses of an attempt, which would be taken for the next one's; return whether none is left."""
    try:
        for path in log_dir.glob("worker_*.status"):
            path.unlink(missing_ok=True)
    except OSError:
        return False
    return True
