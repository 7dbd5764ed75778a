"""A folder in memory for what a job keeps on a host while it runs: sockets, and memory that ranks share under MPI.

Goes in: nothing. Comes out: a folder that goes with the job. OpenMPI removes its files itself when it ends well; an
mpirun that was killed leaves them, megabytes in memory for each rank. Where the launcher was killed, too, the next one
removes them: whose lock can be had, belongs to nobody.
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
    """Of one job.

    Attributes:
        path: the folder.
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
                # Another launcher came in between, and took it for one that was left.
                os.close(lock)

    def remove(self) -> None:
        """With all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _remove_if_left(folder: Path) -> None:
    try:
        if folder.lstat().st_uid != os.geteuid():
            # What another user has put there may be a link, or make this wait.
            return
        lock = os.open(folder / "lock", os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        # Somebody else's, or just being made.
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        # Its launcher lives.
        pass
    finally:
        os.close(lock)
