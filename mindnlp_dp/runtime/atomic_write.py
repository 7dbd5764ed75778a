"""This module writes files and folders so that they are either complete or absent.

A file or folder appears under its path in one rename, when the block that writes it has succeeded. A process that is
killed leaves a workspace, whose name no other program uses, and which is not mistaken for the real one.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Union

# The beginning of the names of workspaces.
TEMPORARY = ".mindnlp_dp-"
_OLD = "old"


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path; what the block writes there replaces ``path`` when the block succeeds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    workspace = make_temporary(path)
    try:
        temporary = workspace / path.name
        yield temporary
        _flush(temporary)
        _replace(path, temporary, workspace / _OLD)
        _flush_folder(path.parent)
    finally:
        shutil.rmtree(workspace, ignore_errors=True)


def make_temporary(path: Path) -> Path:
    """Make a workspace next to ``path``."""
    return Path(tempfile.mkdtemp(prefix=f"{TEMPORARY}{path.name}-", dir=path.parent))


def _replace(path: Path, new: Path, aside: Path) -> None:
    # A rename cannot replace a folder that is not empty, so the old one is moved aside first.
    if new.is_dir() and path.exists():
        path.rename(aside)
    try:
        new.replace(path)
    except OSError:
        if aside.exists():
            aside.rename(path)
        raise


def remove_stale_temporaries(folder: Path, prefix: str) -> None:
    """Remove the workspaces that killed writers of ``folder/prefix-*`` left; move old versions back if need be.

    Call it only for a folder that no process is writing to.
    """
    for workspace in folder.glob(f"{TEMPORARY}{prefix}-*"):
        name, _, random = workspace.name[len(TEMPORARY) :].rpartition("-")
        # As tempfile.mkdtemp() names them.
        if re.fullmatch("[a-z0-9_]{8}", random) is None or not name.startswith(f"{prefix}-"):
            continue
        path = folder / name
        if (workspace / _OLD).exists() and not path.exists():
            (workspace / _OLD).rename(path)
        shutil.rmtree(workspace, ignore_errors=True)


def link_or_copy(source: Union[str, Path], target: Union[str, Path]) -> None:
    """Give a file a second name, or copy it to another file system, or to one without links.

    The file appears under ``target`` in one rename, and replaces a file there, whose other names and readers keep it.
    """
    target = Path(target)
    new = target.with_name(f".{target.name}-new")
    try:
        try:
            os.link(source, new)
        except OSError:
            shutil.copyfile(source, new)
        new.replace(target)
    finally:
        # It is still there after an error, or if both are names of one file.
        new.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    """Flush a file, or a folder with everything in it, to the disk before it is renamed."""
    # Folders are flushed, too, because they hold the names of their files.
    for file in [path, *path.rglob("*")]:
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        else:
            _flush_folder(file)


def _flush_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
