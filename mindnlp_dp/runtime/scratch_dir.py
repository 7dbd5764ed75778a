"""This module makes scratch folders in memory that do not outlive their processes: of a job, or of a checkpoint.

The owner removes its folder. If it was killed, the next one of the same kind does: no process holds the lock of such a
folder. OpenMPI, for example, removes its files when it ends normally; an mpirun that was killed leaves megabytes in
memory for each rank.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Optional

MEMORY = Path("/dev/shm")


class ScratchDir:
    """A locked temporary folder of one process, in memory if possible.

    Folders of the same ``kind`` that no process has locked are removed first.

    Attributes:
        path: path of the folder.
    """

    def __init__(self, kind: str) -> None:
        folder, prefix = MEMORY if os.access(MEMORY, os.W_OK) else Path(tempfile.gettempdir()), f"mindnlp-dp-{kind}-"
        for stale in folder.glob(f"{prefix}*"):
            _remove_if_left(stale)
        self._lock: Optional[int] = None
        while self._lock is None:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=folder))
            lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.fstat(lock).st_nlink:
                self._lock = lock
            else:
                # Before it was locked, another process took it for a stale folder and removed it.
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
        # Another kind of folder, or one that is just being created.
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        # Its owner still runs.
        pass
    finally:
        os.close(lock)
