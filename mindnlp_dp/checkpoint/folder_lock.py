"""This module allows only one job at a time to write checkpoints to a folder.

A second job would overwrite the first one's checkpoints, and remove its unfinished ones. The Trainers and
:class:`~mindnlp_dp.FunctionalRun` take the lock before they write.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from pathlib import Path
from typing import Optional

NAME = ".mindnlp_dp.lock"
# A rank that was cut off from its job, and is being terminated, may still hold the lock.
WAIT_SECONDS = 10.0
_POLL_SECONDS = 0.1
# The locks of this process. A POSIX lock belongs to the process, and is lost when any descriptor of the file is closed.
_held: dict[tuple[int, Path], _Held] = {}


class _Held:
    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.num_holders = 0


class FolderLock:
    """The right to write to a folder; this process holds it until :meth:`release`, or until it ends."""

    def __init__(self, key: tuple[int, Path]) -> None:
        self._key: Optional[tuple[int, Path]] = key
        _held[key].num_holders += 1

    def release(self) -> None:
        """Release the lock, so that others can write to the folder. Does nothing the second time."""
        key, self._key = self._key, None
        # A forked child has none of its parent's locks.
        if key is None or key[0] != os.getpid():
            return
        held = _held[key]
        held.num_holders -= 1
        if held.num_holders == 0:
            del _held[key]
            with contextlib.suppress(OSError):
                os.unlink(key[1] / NAME)
            os.close(held.descriptor)


def lock_folder(folder: Path, wait_seconds: float = WAIT_SECONDS) -> FolderLock:
    """Lock ``folder`` for writing; create it if it does not exist.

    One process can take the lock several times. On a file system without locks, nothing is checked.

    Raises:
        RuntimeError: another process still holds the lock after ``wait_seconds``.
    """
    deadline = time.monotonic() + wait_seconds
    while (lock := _try_to_lock(folder)) is None:
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"another job is writing its checkpoints to {folder} ({_holder(folder)}), and would overwrite this "
                "one's: give each run its own output_dir, or wait until that job has ended"
            )
        time.sleep(_POLL_SECONDS)
    return lock


def try_to_lock_folder(folder: Path) -> Optional[FolderLock]:
    """Return the lock without waiting; None if another process holds it, or the folder is not writable."""
    try:
        return _try_to_lock(folder) if folder.is_dir() else None
    except OSError:
        return None


def _try_to_lock(folder: Path) -> Optional[FolderLock]:
    folder.mkdir(parents=True, exist_ok=True)
    key = os.getpid(), folder.resolve()
    if key in _held:
        return FolderLock(key)
    path = key[1] / NAME
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        os.close(descriptor)
        return None
    except OSError:
        # The file system has no locks: continue as if it had been locked.
        pass
    # The previous holder may have removed the file after this process opened it.
    if not _is_file_at(descriptor, path):
        os.close(descriptor)
        return None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
    _held[key] = _Held(descriptor)
    return FolderLock(key)


def _is_file_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False


def _holder(folder: Path) -> str:
    try:
        return (folder / NAME).read_text(encoding="utf-8", errors="replace") or "process unknown"
    except OSError:
        return "process unknown"
