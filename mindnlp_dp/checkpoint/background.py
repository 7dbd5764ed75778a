"""This module writes checkpoints while training continues (``async_save``): a copy in memory, then a thread.

A rank's files are written to a folder in memory, which takes as long as copying them; a thread moves them to the disk::

    train ── start(): files in /dev/shm ── train ────────────────── train
                            └ thread: to the disk ── manifest ── rename

With ``sharded_checkpoints``, every rank has such a thread. When the ranks agree, between two updates, that all of them
are done, rank 0's thread puts the checkpoint together. collective_save.py uses it.

One checkpoint is written at a time: the next one waits for it. If the memory does not suffice, training waits until the
files are on the disk.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from mindnlp_dp.checkpoint.directory import WORKSPACE
from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.runtime.scratch_dir import MEMORY, ScratchDir

# The files' folder in the scratch folder.
_FILES = "files"
# Called with the folder of the files.
Step = Callable[[Path], None]


class WriterStatus(enum.IntEnum):
    """What the threads of the ranks do: the largest value of all ranks is that of the job."""

    IDLE = 0
    WRITING = 1
    FAILED = 2


@dataclass
class _Job:
    """A checkpoint that is being written: its ``files``, and the step that is ``last``, if other ranks come first."""

    files: Path
    cleanup: Callable[[], None]
    last: Optional[Step]


class BackgroundWriter:
    """Writes this rank's files of checkpoints by a thread, one checkpoint after the other.

    Between updates its owner compares the :attr:`status` of all ranks, and calls :meth:`check` if one has failed, and
    :meth:`complete` if none is writing. It calls :meth:`wait` before the next checkpoint and at its end, or
    :meth:`stop` after an error.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._thread: Optional[threading.Thread] = None
        self._job: Optional[_Job] = None
        self._error: Optional[BaseException] = None

    @property
    def status(self) -> WriterStatus:
        is_writing = self._thread is not None and self._thread.is_alive()
        # Looked at last: a thread that has ended has told its error before.
        if self._error is not None:
            return WriterStatus.FAILED
        return WriterStatus.WRITING if is_writing else WriterStatus.IDLE

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is not complete yet."""
        return self._job is not None

    def start(
        self,
        copy: Step,
        write: Optional[Step] = None,
        last: Optional[Step] = None,
        *,
        spare: Path,
        cleanup: Optional[Callable[[], None]] = None,
    ) -> None:
        """Call ``copy`` with a new folder in memory, and let a thread call ``write`` with it.

        ``last`` is called by a thread, too, after :meth:`complete`. If the memory does not suffice, ``copy`` is called
        with a folder on the disk, in ``spare``. After the last step, or an error, the folder is removed and ``cleanup``
        is called. Call :meth:`wait` before.
        """
        resources = contextlib.ExitStack()
        if cleanup is not None:
            resources.callback(cleanup)
        with resources:
            files = _stage(copy, spare, resources)
            self._job = _Job(files, resources.pop_all().close, last)
        if write is not None:
            self._run(self._job, write, is_last=last is None)

    def complete(self) -> None:
        """Let a thread take the last step of a checkpoint, for which all ranks have taken the first."""
        job = self._job
        if job is not None and job.last is not None:
            last, job.last = job.last, None
            self._run(job, last, is_last=True)

    def _run(self, job: _Job, step: Step, *, is_last: bool) -> None:
        # Not a daemon: the interpreter waits for it at its end.
        thread = threading.Thread(target=self._take, args=(job, step, is_last), name="mindnlp_dp-checkpoint")
        try:
            thread.start()
        except RuntimeError:
            # The process may have no more threads.
            self._take(job, step, is_last)
        else:
            self._thread = thread

    def _take(self, job: _Job, step: Step, is_last: bool) -> None:
        try:
            step(job.files)
        except BaseException as error:  # noqa: BLE001
            self._error, is_last = error, True
        if is_last:
            self._remove(job)

    def _remove(self, job: _Job) -> None:
        job.last = None
        job.cleanup()
        self._job = None

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is complete. A collective.

        Raises:
            OSError: on every rank, if a rank could not write.
        """
        doing = "writing a checkpoint"
        self._group.run_on(True, self._join, doing)
        self.complete()
        self._group.run_on(True, self._join, doing)

    def _join(self) -> None:
        self._end_thread()
        self.check()

    def check(self) -> None:
        """Raise the error of a checkpoint that could not be written, once."""
        error, self._error = self._error, None
        if error is not None:
            raise OSError(f"a checkpoint could not be written: {type(error).__name__}: {error}") from error

    def stop(self) -> None:
        """End after an error of the training, without the other ranks.

        A checkpoint is completed if all ranks' files are there, and dropped with a warning otherwise.
        """
        self._end_thread()
        if self._error is None:
            self.complete()
            self._end_thread()
        error = self._error
        self.drop()
        if error is not None:
            warnings.warn(
                f"the last checkpoint is incomplete and was removed: {type(error).__name__}: {error}",
                RuntimeWarning,
                stacklevel=3,
            )

    def drop(self) -> None:
        """Wait for the thread, and remove the files of a checkpoint that is not complete."""
        self._end_thread()
        self._error = None
        if self._job is not None:
            self._remove(self._job)

    def _end_thread(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def _stage(copy: Step, spare: Path, resources: contextlib.ExitStack) -> Path:
    """Call ``copy`` with a folder in memory, or on the disk if memory has too little room; return it.

    ``resources`` will remove it.
    """
    if os.access(MEMORY, os.W_OK):
        free = shutil.disk_usage(MEMORY).free
        with contextlib.ExitStack() as staged:
            scratch = ScratchDir("checkpoint")
            staged.callback(scratch.remove)
            try:
                copy(scratch.path / _FILES)
            except Exception as error:
                if not _is_lack_of_space(error):
                    raise
            else:
                resources.push(staged.pop_all())
                return scratch.path / _FILES
        warnings.warn(
            f"async_save: {MEMORY} has {free / 1e9:.1f} GB free, too little for a checkpoint; training waits until it "
            "is on the disk",
            RuntimeWarning,
            stacklevel=4,
        )
    spare.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=WORKSPACE, dir=spare))
    resources.callback(shutil.rmtree, folder, ignore_errors=True)
    copy(folder / _FILES)
    return folder / _FILES


def _is_lack_of_space(error: BaseException) -> bool:
    # safetensors reports the system's error as text.
    return getattr(error, "errno", None) == errno.ENOSPC or "os error 28" in str(error).lower()
