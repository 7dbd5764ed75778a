"""Which checkpoints a folder holds: the newest complete one to go on from, and the old ones that go."""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Optional, Union

from mindnlp_dp.runtime.atomic_files import clean_up_after_a_kill

from .manifest import CheckpointError, check_checkpoint, job_of

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
) -> Optional[Path]:
    """What to resume from: a path as it is, the newest complete checkpoint in ``folder`` for True, else nothing.

    In a job that was restarted, of the name ``job``, the newest checkpoint that it has written itself comes before
    anything else.

    Warns when a run that ``saves`` begins anew in a folder that holds checkpoints.

    Raises:
        CheckpointError: there is no complete one.
    """
    if job is not None and (own := _newest_of(folder, job)) is not None:
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


def has_checkpoints(folder: Path) -> bool:
    """Whether there is anything to resume from, complete or not; puts right what a killed writer left, first."""
    remove_unfinished_checkpoints(folder)
    return bool(checkpoints_in(folder))


def newest_checkpoint(folder: Path) -> Path:
    """The last complete checkpoint in ``folder``; a warning for every newer one says what is wrong with it.

    Raises:
        CheckpointError: there is none.
    """
    found, wrong = _newest_complete(checkpoints_in(folder))
    if found is None:
        reasons = "".join(f"\n  {reason}" for reason in wrong)
        raise CheckpointError(f"no complete checkpoint in {folder}" + (f":{reasons}" if reasons else ""))
    return found


def _newest_of(folder: Path, job: str) -> Optional[Path]:
    """That was written by this job; an earlier run in the same folder may have got further."""
    return _newest_complete([path for path in checkpoints_in(folder) if job_of(path) == job])[0]


def _newest_complete(paths: Sequence[Path]) -> tuple[Optional[Path], list[str]]:
    """Of checkpoints in the order of their steps; and what is wrong with those behind it, of which it warns."""
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
