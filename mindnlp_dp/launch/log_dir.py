"""The log folder of a job: a new folder for each attempt, and the files in it that ranks write.

The launcher creates an attempt's folder, so it has the files of that attempt only, and they belong to its user. What
ranks and launchers share while they run is not here, but in memory that no other user can open
(:mod:`mindnlp_dp.launch.processes.local_host`).
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Optional

from mindnlp_dp.launch.errors import LaunchError, TemporaryError

# The file that has a line for each failure, and the link to the last attempt's folder.
RECORD, LATEST = "failures.jsonl", "latest"

# Enough to explain the last failures; an elastic job may have a hundred attempts, and each log hundreds of MiB.
_KEPT_ATTEMPTS = 10

# Other users may not write to these folders, whatever the umask is.
_MODE = 0o755


def open_to_write(path: Path, *, flags: int = os.O_TRUNC) -> int:
    """Open a file of a log folder; never a link, which another user may have put there."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o644)


class LogDir:
    """The log folder of one job, ``logs/DATE-TIME-PID`` by default.

    Attributes:
        path: absolute path of the folder.

    Raises:
        LaunchError: the folder belongs to another user, who could replace what is in it.
        TemporaryError: the folder cannot be created.
    """

    def __init__(self, path: Optional[Path] = None) -> None:
        try:
            given = Path("logs", time.strftime("%Y%m%d-%H%M%S-") + str(os.getpid())) if path is None else path
            self.path = given.absolute()
            for folder in (self.path.parent, self.path) if path is None else (self.path,):
                _check_owner(folder)
            self.path.mkdir(_MODE, parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_be_written(path or Path("logs"), error) from None
        # The folders that this job has made, and may remove.
        self._attempts: list[Path] = []
        self._next = 0

    def new_attempt(self) -> Path:
        """Make and return the folder of the next attempt, ``attempt_N``.

        Raises:
            TemporaryError: the first attempt's folder cannot be created. A later attempt then uses the last one's.
        """
        try:
            while True:
                folder = self.path / f"attempt_{self._next}"
                self._next += 1
                with contextlib.suppress(FileExistsError):
                    folder.mkdir(_MODE, parents=True)
                    break
        except OSError as error:
            if not self._attempts:
                raise cannot_be_written(self.path, error) from None
            print(f"{folder} cannot be created ({error}); the next logs replace the last ones", file=sys.stderr)
            return self._attempts[-1]
        self._attempts.append(folder)
        if len(self._attempts) > _KEPT_ATTEMPTS:
            shutil.rmtree(self._attempts.pop(0), ignore_errors=True)
        # A disk may not support links.
        with contextlib.suppress(OSError):
            link = self.path / f".{LATEST}"
            link.unlink(missing_ok=True)
            link.symlink_to(folder.name)
            link.replace(self.path / LATEST)
        return folder

    def record(self, failure: Mapping[str, Any]) -> None:
        """Append a line to the record of failures."""
        try:
            with open(open_to_write(self.path / RECORD, flags=0), "w", encoding="utf-8") as file:
                file.write(json.dumps(failure) + "\n")
        except OSError as error:
            print(f"this failure could not be recorded in {self.path / RECORD}: {error}", file=sys.stderr)


def join_attempt(folder: Path) -> None:
    """Make an attempt's folder on a host that has another disk than the first host, where it was made.

    Raises:
        LaunchError: the same as for :class:`LogDir`.
    """
    try:
        for part in (folder.parent, folder):
            _check_owner(part)
            part.mkdir(_MODE, parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_be_written(folder, error) from None


def _check_owner(folder: Path) -> None:
    owner = folder.stat().st_uid if folder.exists() else 0
    if owner not in (0, os.geteuid()):
        raise LaunchError(
            f"the log folder {folder} belongs to another user (id {owner}), who could replace what ranks write there; "
            "give another one, --log-dir"
        )


def cannot_be_written(folder: Path, error: OSError) -> TemporaryError:
    """Return the error of a launcher that cannot write to a log folder."""
    return TemporaryError(
        f"the log folder {folder} of {os.uname().nodename} cannot be written to ({error}); --log-dir names another"
    )


# The limit in MiB; 0: unlimited.
VARIABLE = "MINDNLP_DP_LOG_MB"

DEFAULT_MB = 256


class LogFile:
    """Redirects this process's output to a file, from its creation on; used by a rank's worker.

    The file is rotated when it has grown large: what the worker and its children write is in FILE, and in FILE.1, the
    previous one, together at most twice the limit, plus what is written in an update.
    """

    def __init__(self, path: Path, environ: Mapping[str, str]) -> None:
        self._path, self._most_bytes = path, int(environ.get(VARIABLE, DEFAULT_MB)) << 20
        self._log: Optional[int] = None
        self._open()
        encoding = getattr(sys.stdout, "encoding", "utf-8")
        self._files = _PatientFile(1), _PatientFile(2)
        # Unbuffered, as with PYTHONUNBUFFERED. The streams are kept: a script may replace them, and use their buffers.
        self._text = [
            io.TextIOWrapper(raw, encoding, errors="backslashreplace", write_through=True)  # type: ignore[type-var]
            for raw in self._files
        ]
        sys.stdout, sys.stderr = self._text

    def _open(self) -> None:
        log = open_to_write(self._path)
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

    def silence_libraries(self) -> None:
        """Let only Python write to the log from now on, because MindSpore's threads report their end there."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for file in self._files:
            with contextlib.suppress(OSError):
                # The script may have closed it.
                file.descriptor = os.dup(file.descriptor)
            os.dup2(nowhere, 1 if file is self._files[0] else 2)

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


class _PatientFile(io.RawIOBase):
    """Writes to a log; what a full or broken disk does not take is dropped, and a line says so once it can."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self._lost = descriptor, 0

    def fileno(self) -> int:
        return self.descriptor

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        try:
            if self._lost:
                missing = b"[%d bytes of output are missing here: the disk did not take them]\n" % self._lost
                os.write(self.descriptor, missing)
                self._lost = 0
            # A disk with little room takes a part.
            self._lost = size - os.write(self.descriptor, data)
        except OSError:
            self._lost += size
        return size


def open_log(path: Path) -> BinaryIO:
    """Open a log for what other programs than ranks print, such as mpirun."""
    return open(open_to_write(path), "wb")
