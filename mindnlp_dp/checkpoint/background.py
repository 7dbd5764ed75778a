"""This module writes checkpoints while training continues (``async_save``): a copy in memory, then a thread.

A checkpoint's files are written to a folder in memory, which takes as long as copying them; a thread moves them to the
disk, hashes them, and renames the folder when it is complete::

    train ── stage(): files in /dev/shm ── train ────────────────── train
                            └ thread: to the disk ── manifest ── rename

One checkpoint is written at a time: the next one waits for it. If the memory does not suffice, a checkpoint is written
at once, as without this module.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

from mindnlp_dp.checkpoint.manifest import RunId
from mindnlp_dp.checkpoint.writer import State, publish_checkpoint, write_checkpoint, write_files
from mindnlp_dp.runtime.scratch_dir import MEMORY, ScratchDir

# The files' folder in the scratch folder.
_FILES = "files"


class BackgroundWriter:
    """Writes the checkpoints of one process by a thread, one after the other.

    Its owner calls :meth:`check` between updates, and :meth:`wait` before it reads a checkpoint and at its end.
    """

    def __init__(self) -> None:
        self._thread: Optional[threading.Thread] = None
        self._error: Optional[BaseException] = None

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    @property
    def is_writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def write(
        self,
        path: Path,
        state: Optional[State],
        write_model: Callable[[Path], None],
        run: Optional[RunId],
        then: Callable[[], None],
    ) -> None:
        """Copy a checkpoint, and let a thread write it to ``path`` and call ``then``; wait for an earlier one.

        The arguments are those of :func:`~.writer.write_checkpoint`.

        Raises:
            OSError: an earlier checkpoint could not be written.
        """
        self.wait()
        staged = _stage(state, write_model)
        if staged is None:
            write_checkpoint(path, state, write_model, run)
            then()
            return
        scratch, outline = staged
        # Not a daemon: the interpreter waits for it at its end.
        self._thread = threading.Thread(
            target=self._finish, args=(scratch, path, outline, run, then), name="mindnlp_dp-checkpoint"
        )
        self._thread.start()

    def _finish(
        self, scratch: ScratchDir, path: Path, outline: Any, run: Optional[RunId], then: Callable[[], None]
    ) -> None:
        try:
            publish_checkpoint(scratch.path / _FILES, path, outline, run)
            then()
        except BaseException as error:  # noqa: BLE001
            self._error = error
        finally:
            scratch.remove()

    def wait(self) -> None:
        """Wait for the checkpoint that is being written; raise what went wrong with it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def check(self) -> None:
        """Raise the error of a checkpoint that could not be written, once."""
        error, self._error = self._error, None
        if error is not None:
            raise OSError(f"a checkpoint could not be written: {type(error).__name__}: {error}") from error


def _stage(state: Optional[State], write_model: Callable[[Path], None]) -> Optional[tuple[ScratchDir, Any]]:
    """Write a checkpoint's files to memory; return their folder and the state's outline; None if there is no room."""
    if not os.access(MEMORY, os.W_OK):
        return None
    scratch = ScratchDir("checkpoint")
    try:
        return scratch, write_files(scratch.path / _FILES, state, write_model)
    except BaseException as error:
        scratch.remove()
        if _is_lack_of_space(error):
            free = shutil.disk_usage(MEMORY).free
            warnings.warn(
                f"async_save: {MEMORY} has {free / 1e9:.1f} GB free, too little for a checkpoint; it is written while "
                "training waits",
                RuntimeWarning,
                stacklevel=4,
            )
            return None
        raise


def _is_lack_of_space(error: BaseException) -> bool:
    # safetensors reports the system's error as text.
    return getattr(error, "errno", None) == errno.ENOSPC or "os error 28" in str(error).lower()
