"""Create a folder in memory for a job's files on a host: sockets, and memory that ranks share under MPI.

The launcher removes the folder with the job. OpenMPI removes its files itself when it ends normally; an mpirun that was
killed leaves them, megabytes in memory for each rank. If the launcher was killed, too, the next launcher removes its
folder: no process holds the lock of such a folder.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Optional

_IN_MEMORY = Path("/dev/shm")
_PREFIX = "mindnlp-dp-job-"


class Scratch:
    """A locked temporary folder of one job on one host; used by its launcher.

    Attributes:
        path: path of the folder.
    """

    def __init__(self) -> None:
        folder = _IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
        for stale in folder.glob(f"{_PREFIX}*"):
            _remove_if_left(stale)
        self._lock: Optional[int] = None
        while self._lock is None:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=folder))
            lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.fstat(lock).st_nlink:
                self._lock = lock
            else:
                # Before it was locked, another launcher took it for a stale folder and removed it.
                os.close(lock)

    def remove(self) -> None:
        """Remove the folder and all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _remove_if_left(folder: Path) -> None:
    try:
        if folder.lstat().st_uid != os.geteuid():
            # Another user's folder may be a link, or make this process wait.
            return
        lock = os.open(folder / "lock", os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        # It is not a job's folder, or is just being created.
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        # Its launcher still runs.
        pass
    finally:
        os.close(lock)
