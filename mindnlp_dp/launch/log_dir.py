"""Reserve a job's log folder, archive earlier logs in it, and write rank output to it.

The launcher calls it, so that the log folder belongs to one job, and each attempt's logs are kept.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Optional

from mindnlp_dp.launch.errors import LaunchError

# The file that has a line for each failure.
RECORD = "failures.jsonl"

# The files that ranks and their engine write into a log folder.
_WRITTEN = re.compile(r"worker_\d+\.(log|log\.\d+|stacks)|launcher(_\d+)?\.log|scheduler\.log")

_OF_THE_JOB = re.compile(rf"{re.escape(RECORD)}|progress(_\d+)?|fork_server\.log|environ_changes\.json")

_TRY, JOB_VARIABLE = re.compile(r"try_(\d+)"), re.compile(r"job_(\d+)")

# The file that marks a folder as a job's.
_MARKER = ".mindnlp_dp"

# Enough to explain the last failures; an elastic job may have a hundred attempts, and each log hundreds of MiB.
_KEPT_TRIES, _KEPT_JOBS = 10, 3


@contextmanager
def lock_log_dir(log_dir: Path) -> Iterator[None]:
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
            f"the log folder {log_dir} is that of a job that runs; give each job its own --log-dir, or none"
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


def archive_attempt_logs(log_dir: Path, number: int) -> None:
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


def archive_earlier_job(log_dir: Path) -> None:
    """Move what an earlier job has left to the folder ``job_N``: it may explain why this job was started again.

    Raises:
        LaunchError: the same as for :func:`claim`.
    """
    claim(log_dir)
    if left := [path for path in log_dir.iterdir() if _is_left_by_a_job(path)]:
        folder = _new_folder(log_dir / f"job_{_last_number(log_dir, JOB_VARIABLE) + 1}")
        for path in left:
            path.replace(folder / path.name)
    _keep_the_last(log_dir, JOB_VARIABLE, _KEPT_JOBS)


def claim(log_dir: Path) -> None:
    """Mark the folder as a job's.

    Raises:
        LaunchError: no job has marked the folder yet, and it holds a file that has the name of a log.
    """
    marker = log_dir / _MARKER
    if not marker.exists():
        named = [
            path.name for path in log_dir.iterdir() if _is_left_by_a_job(path) or JOB_VARIABLE.fullmatch(path.name)
        ]
        if named:
            raise LaunchError(
                f"the log folder {log_dir} does not belong to a job, and holds {', '.join(sorted(named))}, which a job "
                "would overwrite; give another one, --log-dir"
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


PROGRESS = "progress"


def progress_file(host: int) -> str:
    """Return the name of a host's progress file; several hosts may have one log folder, on a shared disk."""
    return f"{PROGRESS}_{host}" if host else PROGRESS


# The limit in MiB; 0: unlimited.
VARIABLE = "MINDNLP_DP_LOG_MB"

DEFAULT_MB = 256


# A rank's output goes to a file that is rotated when it has grown large. What the worker and its children write to
# standard output and standard error is in FILE, and in FILE.1, the previous one: together at most twice the limit,
# plus what is written in an update.


class LogFile:
    """Redirects this process's output to a file, from its creation on; used by a rank's worker."""

    def __init__(self, path: Path, environ: Mapping[str, str]) -> None:
        self._path, self._most_bytes = path, int(environ.get(VARIABLE, DEFAULT_MB)) << 20
        self._log: Optional[int] = None
        self._open()

    def _open(self) -> None:
        log = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        for stream in self._streams():
            os.dup2(log, stream)
        if self._log is not None:
            os.close(self._log)
        self._log = log

    def _streams(self) -> list[int]:
        """Return standard output and error, except where the script has redirected or closed them."""
        if self._log is None:
            return [1, 2]
        log, ours = os.fstat(self._log), []
        for stream in (1, 2):
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(stream), log):
                    ours.append(stream)
        return ours

    def rotate_if_large(self) -> None:
        """Rotate a large log, between two updates. Processes that have it open still read the old, renamed file."""
        if self._most_bytes and self._log is not None and os.fstat(self._log).st_size > self._most_bytes:
            # A log that cannot be rotated keeps growing.
            with contextlib.suppress(OSError):
                earlier = self._path.with_name(f"{self._path.name}.1")
                self._path.replace(earlier)
                try:
                    self._open()
                except OSError:
                    earlier.replace(self._path)
