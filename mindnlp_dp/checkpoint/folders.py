"""Which checkpoints a folder holds: the newest complete one to resume from, and the old ones to remove.

A folder may hold checkpoints of several runs. The newest is that of the run that began last, however far the others
got, and a run removes its own only.
"""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Optional, Union

from mindnlp_dp.runtime.atomic_files import clean_up_after_a_kill

from .folder_lock import try_to_lock_folder
from .manifest import CheckpointError, RunId, check_checkpoint, job_of, run_of

PREFIX = "checkpoint"


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"{PREFIX}-{step}"


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoint folders in ``folder``, by step; not checked."""
    found = [(re.fullmatch(rf"{PREFIX}-(\d+)", path.name), path) for path in folder.glob(f"{PREFIX}-*")]
    return [path for _, path in sorted((int(name[1]), path) for name, path in found if name and path.is_dir())]


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=3)


def choose_checkpoint(
    folder: Path, wanted: Union[str, Path, bool, None], saves: bool = True, *, job: Optional[str] = None
) -> tuple[Optional[Path], RunId]:
    """Return the checkpoint to resume from, if any, and the run that goes on there.

    A path is taken as it is, True is the newest complete checkpoint in ``folder``. In a job that was restarted, of the
    name ``job``, the newest checkpoint that it has written itself comes before anything else.

    Warns when a run that ``saves`` begins in a folder that holds another run's checkpoints.

    Raises:
        CheckpointError: there is no complete one.
    """
    there = checkpoints_in(folder)
    new_run = RunId.new(map(run_of, there))
    found: Optional[Path] = None
    if job is not None:
        found = _newest_complete([path for path in there if job_of(path) == job])[0]
    why = "" if found is None else "restarted: "
    if found is None and wanted:
        found = newest_checkpoint(folder) if wanted is True else Path(wanted)
    if found is not None:
        print(f"{why}resuming from {found}", flush=True)
        # What is resumed from another folder begins a run of its own in this one.
        is_here = found.resolve().parent == folder.resolve()
        return found, (run_of(found) if is_here else None) or new_run
    if there and saves:
        _warn(
            f"{folder} holds {there[-1].name} of an earlier run, and this one begins with update 0; to resume from "
            "there call train(resume_from_checkpoint=True), to keep both give this run its own output_dir"
        )
    return None, new_run


def has_checkpoints(folder: Path) -> bool:
    """Whether there is anything to resume from, complete or not; puts right what a killed writer left, first."""
    put_right(folder)
    return bool(checkpoints_in(folder))


def newest_checkpoint(folder: Path) -> Path:
    """Return the last complete checkpoint of the run that began last in ``folder``.

    A warning for every newer one says what is wrong with it.

    Raises:
        CheckpointError: there is none.
    """
    runs = {path: run_of(path) for path in checkpoints_in(folder)}
    last = max((run.number for run in runs.values() if run is not None), default=0)
    # Where it is not known whose a checkpoint is, it is damaged, and named.
    own = [path for path, run in runs.items() if run is None or run.number == last]
    found, wrong = _newest_complete(own)
    if found is None:
        reasons = "".join(f"\n  {reason}" for reason in wrong)
        raise CheckpointError(f"no complete checkpoint in {folder}" + (f":{reasons}" if reasons else ""))
    return found


def _newest_complete(paths: Sequence[Path]) -> tuple[Optional[Path], list[str]]:
    """Return the last complete checkpoint of ``paths``, which are in order, and what is wrong with those after it."""
    wrong: list[str] = []
    for path in reversed(paths):
        try:
            check_checkpoint(path)
        except CheckpointError as error:
            wrong.append(str(error))
        else:
            for reason in wrong:
                _warn(f"{reason}; it is passed over for {path.name}")
            return path, wrong
    return None, wrong


def remove_old_checkpoints(folder: Path, limit: Optional[int], keep: Collection[Path], run: RunId) -> None:
    """Delete the oldest checkpoints of ``run`` until ``limit`` are left (None or 0: no limit).

    Those in ``keep`` stay, and so do those of other runs.
    """
    found = [path for path in checkpoints_in(folder) if run_of(path) == run]
    spared = {path.resolve() for path in keep}
    removable = [path for path in found if path.resolve() not in spared]
    surplus = len(found) - limit if limit else 0
    for path in removable[: max(0, surplus)]:
        # Under a name that nobody looks for first, so that it is never there by half.
        doomed = path.with_name(f".{path.name}-removed")
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def remove_unfinished_checkpoints(folder: Path) -> None:
    """Remove what killed writers left in ``folder``, which the caller has locked."""
    clean_up_after_a_kill(folder, f"{PREFIX}-*")


def put_right(folder: Path) -> None:
    """Remove what killed writers left in ``folder``, unless another process is writing to it now."""
    lock = try_to_lock_folder(folder)
    if lock is not None:
        try:
            remove_unfinished_checkpoints(folder)
        finally:
            lock.release()
