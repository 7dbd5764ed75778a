"""This module finds a folder's newest complete checkpoint and removes old ones; Trainers and FunctionalRun call it.

A folder may hold checkpoints of several runs. The newest one is that of the run that began last, however far the others
got, and a run removes only its own checkpoints. Going back to an earlier checkpoint begins another run, which that
checkpoint belongs to from the first update on; the later ones stay as they are.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Optional, Union

from mindnlp_dp.checkpoint.folder_lock import try_to_lock_folder
from mindnlp_dp.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    RunId,
    check_checkpoint,
    job_of,
    read_manifest,
    run_of,
    set_run,
)
from mindnlp_dp.runtime.atomic_write import TEMPORARY, make_temporary, remove_stale_temporaries

PREFIX = "checkpoint"
# The beginning of the names of folders in which ranks write files for a checkpoint.
WORKSPACE = f"{TEMPORARY}{PREFIX}-files-"


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the folder of the checkpoint after ``step`` updates."""
    return folder / f"{PREFIX}-{step}"


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoint folders in ``folder``, sorted by step; whether they are complete is not checked."""
    found = [path for path in folder.glob(f"{PREFIX}-*") if re.fullmatch(rf"{PREFIX}-\d+", path.name)]
    return sorted((path for path in found if path.is_dir()), key=_step_of)


def _step_of(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def _number_of_run(path: Path) -> int:
    run = run_of(path)
    return 0 if run is None else run.number


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
    found: Optional[Path] = None
    if job is not None:
        found = _newest_complete(sorted((path for path in there if job_of(path) == job), key=_number_of_run))[0]
    why = "" if found is None else "restarted: "
    if found is None and wanted:
        found = newest_checkpoint(folder) if wanted is True else named_checkpoint(Path(wanted))
    if found is not None:
        print(f"{why}resuming from {found}", flush=True)
        return found, run_that_continues(found, folder, is_newest=bool(why) or wanted is True)
    if there and saves:
        _warn(
            f"{folder} holds {there[-1].name} of an earlier run, and this one begins with update 0; to resume from "
            "there add --resume to a recipe's command, or call train(resume_from_checkpoint=True); to keep both give "
            "this run its own output_dir"
        )
    return None, RunId.new(map(run_of, there))


def named_checkpoint(path: Path) -> Path:
    """Return a checkpoint that the user named.

    Raises:
        CheckpointError: it is not a checkpoint; the message names the checkpoints that are there.
    """
    try:
        read_manifest(path)
    except CheckpointError as error:
        # Not Path.exists(), which raises PermissionError for a folder that may not be read.
        if not os.path.exists(path / MANIFEST) and (names := _names_in(path)):
            raise CheckpointError(
                f"{path} is a folder of checkpoints, not a checkpoint: resume from one of them ({names}), or pass True "
                "for the newest one in output_dir"
            ) from None
        if not os.path.exists(path) and (names := _names_in(path.parent)):
            raise CheckpointError(f"{error}; {path.parent} has {names}") from None
        raise
    return path


def _names_in(folder: Path) -> str:
    """Return the names of the checkpoints in a folder; of many, the first and the last ones."""
    names = [path.name for path in checkpoints_in(folder)]
    return ", ".join(names if len(names) <= 4 else [names[0], "...", *names[-2:]])


def run_that_continues(found: Path, folder: Path, *, is_newest: bool) -> RunId:
    """Return the run that continues from a checkpoint, and writes to ``folder``.

    It is the checkpoint's run if that began last in this folder and the checkpoint is its newest one: ``is_newest``, if
    those after it are damaged. Otherwise it is a new run: what follows is not what was saved before.
    """
    there, run = checkpoints_in(folder), run_of(found)
    new = RunId.new(map(run_of, there))
    if run is None or run.number < new.number - 1:
        return new
    own = [path for path in there if run_of(path) == run]
    return run if any(path.samefile(found) for path in (own if is_newest else own[-1:])) else new


def claim_checkpoint(path: Path, folder: Path, run: RunId) -> None:
    """Make the checkpoint in ``folder`` that a new run continues from its own, so that it is the newest one of the run.

    Without it, a run that is stopped before it saves would be lost, and the abandoned run would continue.
    """
    if run_of(path) != run and any(path.samefile(other) for other in checkpoints_in(folder)):
        set_run(path, run)


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
                _warn(f"{reason}; it is skipped, and {path.name} is used")
            return path, wrong
    return None, wrong


def remove_old_checkpoints(
    folder: Path, limit: Optional[int], keep: Collection[Path], run: RunId, *, step: int
) -> None:
    """Delete the oldest checkpoints of ``run`` until ``limit`` are left; None, 0 or less: no limit.

    Those after ``step``, the last update of the run, are deleted first: they were passed over when it was resumed.
    Checkpoints in ``keep`` and those of other runs are not removed.
    """
    if limit is None or limit <= 0:
        return
    found = [path for path in checkpoints_in(folder) if run_of(path) == run]
    spared = {path.resolve() for path in keep}
    removable = [path for path in found if path.resolve() not in spared]
    removable.sort(key=lambda path: _step_of(path) <= step)
    for path in removable[: max(0, len(found) - limit)]:
        if path.is_symlink():
            path.unlink()
            continue
        # Rename it first, so that a half-removed folder never looks like a checkpoint.
        workspace = make_temporary(path)
        path.rename(workspace / path.name)
        shutil.rmtree(workspace, ignore_errors=True)


def remove_unfinished_checkpoints(folder: Path) -> None:
    """Remove what killed writers left in ``folder``, which the caller has locked."""
    remove_stale_temporaries(folder, PREFIX)


def remove_leftovers(folder: Path) -> None:
    """Remove what killed writers left in ``folder``, unless another process is writing to it now."""
    lock = try_to_lock_folder(folder)
    if lock is not None:
        try:
            remove_unfinished_checkpoints(folder)
        finally:
            lock.release()
