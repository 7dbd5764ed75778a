"""Files and folders that are complete, or not there at all.

Goes in: a path, and a block that writes. Comes out: the written file or folder
under that path, in one rename, when the block succeeded. A process that is killed
leaves a workspace with a dot in front of its name, which nobody takes for the real one.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_OLD = "old"


@contextmanager
def in_place_of(path: Path) -> Iterator[Path]:
    """Write a file or folder under a temporary name beside ``path``; it replaces ``path`` when the block succeeds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    workspace = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        temporary = workspace / path.name
        yield temporary
        _flush(temporary)
        _replace(path, temporary, workspace / _OLD)
        _flush_folder(path.parent)
    finally:
        shutil.rmtree(workspace, ignore_errors=True)


def _replace(path: Path, new: Path, aside: Path) -> None:
    # A folder that holds something cannot be renamed over: the old one steps aside.
    if new.is_dir() and path.exists():
        path.rename(aside)
    try:
        new.replace(path)
    except OSError:
        if aside.exists():
            aside.rename(path)
        raise


def clean_up_after_a_kill(folder: Path, pattern: str) -> None:
    """Remove the workspaces that killed writers of ``folder/pattern`` left; what had stepped aside comes back.

    Only for a folder that nobody is writing to.
    """
    for workspace in folder.glob(f".{pattern}-*"):
        path = folder / workspace.name[1:].rpartition("-")[0]
        if (workspace / _OLD).exists() and not path.exists():
            (workspace / _OLD).rename(path)
        shutil.rmtree(workspace, ignore_errors=True)


def _flush(path: Path) -> None:
    """Have a file, or a folder with everything in it, on the disk before its new name is."""
    # A folder is what holds the names of its files.
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
