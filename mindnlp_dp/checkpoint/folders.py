"""Which checkpoints a folder holds: the newest complete one to go on from, and the old ones that go."""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Optional, Union

from mindnlp_dp.runtime.atomic_files import clean_up_after_a_kill

from .manifest import CheckpointError, check_checkpoint

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
    folder: Path, wanted: Union[str, Path, bool, None], saves: bool = True, *, began: Optional[float] = None
) -> Optional[Path]:
    """What to resume from: a path as it is, the newest complete checkpoint in ``folder`` for True, else nothing.

    In a job that was restarted, ``began`` is when it was started first (seconds since 1970): the newest checkpoint that
    it has written itself comes before anything else.

    Warns when a run that ``saves`` begins anew in a folder that holds checkpoints.

    Raises:
        CheckpointError: there is no complete one.
    """
    if began is not None and (own := _newest_since(folder, began)) is not None:
        print(f"restarted: going on from {own}", flush=True)
        return own
    if wanted is True:
        return newest_checkpoint(folder)
    if wanted:
        return Path(wanted)
    there = checkpoints_in(folder)
    if there and saves:
        _warn(
            f"{folder} holds {there[-1].name} of an earlier run, and this one begins anew; to go on from there call "
            "train(resume_from_checkpoint=True), to keep both give this run an output_dir of its own"
        )
    return None


def _newest_since(folder: Path, began: float) -> Optional[Path]:
    if not any(path.stat().st_mtime >= began for path in checkpoints_in(folder)):
        return None
    try:
        newest = newest_checkpoint(folder)
    except CheckpointError:
        return None
    return newest if newest.stat().st_mtime >= began else None


def has_checkpoints(folder: Path) -> bool:
    """Whether there is anything to resume from, complete or not; puts right what a killed writer left, first."""
    remove_unfinished_checkpoints(folder)
    return bool(checkpoints_in(folder))


def newest_checkpoint(folder: Path) -> Path:
    """The last complete checkpoint in ``folder``; a warning for every newer one says what is wrong with it.

    Raises:
        CheckpointError: there is none.
    """
    wrong = []
    for path in reversed(checkpoints_in(folder)):
        try:
            check_checkpoint(path)
        except CheckpointError as error:
            wrong.append(str(error))
        else:
            for reason in wrong:
                _warn(f"{reason}; it is passed over for {path.name}")
            return path
    reasons = "".join(f"\n  {reason}" for reason in wrong)
    raise CheckpointError(f"no complete checkpoint in {folder}" + (f":{reasons}" if reasons else ""))


def remove_old_checkpoints(folder: Path, limit: Optional[int], keep: Collection[Path]) -> None:
    """Delete the oldest checkpoints until ``limit`` are left (None or 0: no limit); those in ``keep`` stay."""
    found = checkpoints_in(folder)
    spared = {path.resolve() for path in keep}
    removable = [path for path in found if path.resolve() not in spared]
    surplus = len(found) - limit if limit else 0
    for path in removable[: max(0, surplus)]:
        # Under a name that nobody looks for first, so that it is never there by half.
        doomed = path.with_name(f".{path.name}-removed")
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def remove_unfinished_checkpoints(folder: Path) -> None:
    """Remove what killed writers left in ``folder``, into which nobody is writing now."""
    clean_up_after_a_kill(folder, f"{PREFIX}-*")
