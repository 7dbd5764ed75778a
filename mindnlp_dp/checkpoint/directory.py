"""This module finds a folder's newest complete checkpoint and removes old ones; Trainers and FunctionalRun call it.

A folder may hold checkpoints of several runs. The newest one is that of the run that began last, however far the others
got, and a run removes only its own checkpoints.
"""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Optional, Union

from mindnlp_dp.checkpoint.folder_lock import try_to_lock_folder
from mindnlp_dp.checkpoint.manifest import CheckpointError, RunId, check_checkpoint, job_of, run_of
from mindnlp_dp.runtime.atomic_write import remove_stale_temporaries

PREFIX = "checkpoint"
# The beginning of the names of folders in which ranks write files for a checkpoint.
WORKSPACE = f".{PREFIX}-files-"


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the folder of the checkpoint after ``step`` updates."""
    return folder / f"{PREFIX}-{step}"


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoint folders in ``folder``, sorted by step; whether they are complete is not checked."""
    found = [(re.fullmatch(rf"{PREFIX}-(\d+)", path.name), path) for path in folder.glob(f"{PREFIX}-*")]
    return [path for _, path in sorted((int(name[1]), path) for name, path in found if name and path.is_dir())]


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=3)


def choose_checkpoint(
    folder: Path, wanted: Union[str, Path, bool, None], saves: bool = True, *, job: Optional[str] = None
) -> tuple[Optional[Path], RunId]:
    """Return the checkpoint to resume from, if any, and the run that continues there.

    ``wanted`` is a path, used as it is, or True for the newest complete checkpoint in ``folder``. In a restarted job
    with the name ``job``, the newest checkpoint that the job itself wrote comes before anything else.

    Warns if a run that ``saves`` begins in a folder that holds another run's checkpoints.

    Raises:
        CheckpointError: ``wanted`` is True, and the folder does not have a complete checkpoint.
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
        # A run that is resumed from another folder is a new run in this one.
        is_here = found.resolve().parent == folder.resolve()
        return found, (run_of(found) if is_here else None) or new_run
    if there and saves:
        _warn(
            f"{folder} holds {there[-1].name} of an earlier run, and this one begins with update 0; to resume from "
            "there call train(resume_from_checkpoint=True), to keep both give this run its own output_dir"
        )
    return None, new_run


def has_checkpoints(folder: Path) -> bool:
    """Tell whether ``folder`` has checkpoints, complete or not, after removing what killed writers left."""
    remove_leftovers(folder)
    return bool(checkpoints_in(folder))


def newest_checkpoint(folder: Path) -> Path:
    """Return the last complete checkpoint of the run that began last in ``folder``.

    For every newer one a warning says what is wrong with it.

    Raises:
        CheckpointError: the folder does not have a complete checkpoint.
    """
    runs = {path: run_of(path) for path in checkpoints_in(folder)}
    last = max((run.number for run in runs.values() if run is not None), default=0)
    # A checkpoint of an unknown run is damaged: include it, so that a message names it.
    own = [path for path, run in runs.items() if run is None or run.number == last]
    found, wrong = _newest_complete(own)
    if found is None:
        reasons = "".join(f"\n  {reason}" for reason in wrong)
        raise CheckpointError(f"no complete checkpoint in {folder}" + (f":{reasons}" if reasons else ""))
    return found


def _newest_complete(paths: Sequence[Path]) -> tuple[Optional[Path], list[str]]:
    """Return the last complete checkpoint of ``paths``, which are sorted, and what is wrong with those after it."""
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

    Checkpoints in ``keep`` and those of other runs are not removed.
    """
    found = [path for path in checkpoints_in(folder) if run_of(path) == run]
    spared = {path.resolve() for path in keep}
    removable = [path for path in found if path.resolve() not in spared]
    surplus = len(found) - limit if limit else 0
    for path in removable[: max(0, surplus)]:
        # Rename it first, so that a half-removed folder never looks like a checkpoint.
        doomed = path.with_name(f".{path.name}-removed")
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def remove_unfinished_checkpoints(folder: Path) -> None:
    """Remove what killed writers left in ``folder``, which the caller has locked."""
    remove_stale_temporaries(folder, f"{PREFIX}-*")


def remove_leftovers(folder: Path) -> None:
    """Remove what killed writers left in ``folder``, unless another process is writing to it now."""
    lock = try_to_lock_folder(folder)
    if lock is not None:
        try:
            remove_unfinished_checkpoints(folder)
        finally:
            lock.release()
