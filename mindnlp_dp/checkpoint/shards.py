"""This module writes the sharded arrays of a checkpoint's state by the ranks that have them, and reads them again.

Each rank writes one file with its pieces, named by the array and the bounds of their elements; the outline in
checkpoint.json has the arrays' shapes. So any number of ranks can read them::

    state.safetensors                   rank 0: all that is not sharded
    state-00001-of-00002.safetensors    rank 0: "optimizer/state/0/exp_avg@0:768", ...
    state-00002-of-00002.safetensors    rank 1: "optimizer/state/0/exp_avg@768:1536", ...
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from mindnlp_dp.checkpoint.state_tree import PackedState, pack_state, sharded_layouts
from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.runtime.sharded_array import FlatLayout

_FILES = "state-*-of-*.safetensors"


@contextlib.contextmanager
def workspace_in(folder: Path, group: ProcessGroup, is_needed: bool = True) -> Iterator[Path]:
    """Make a folder for this block in ``folder``, where ranks write files for a checkpoint. A collective.

    Yields its path on every rank, or ``folder`` itself if it is not needed. If rank 0 is killed, the next run removes
    it by its name.
    """
    if not is_needed:
        yield folder
        return

    def make() -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=".checkpoint-files-", dir=folder))

    path = group.run_on_rank0(make, "preparing a checkpoint")
    try:
        yield path
    finally:
        if group.is_main:
            shutil.rmtree(path, ignore_errors=True)


def take(file: Path, checkpoint: Path) -> None:
    """Put a file of a workspace into a checkpoint, which may be written twice: with ``async_save``, first in memory."""
    new = checkpoint / f".{file.name}"
    try:
        os.link(file, new)
    except OSError:
        # Another file system, or one without links.
        shutil.copyfile(file, new)
    new.replace(checkpoint / file.name)


def write_shards(workspace: Path, state: Any, group: ProcessGroup) -> tuple[PackedState, Callable[[Path], None]]:
    """Write every rank's pieces of the sharded arrays in ``state`` to files in ``workspace``.

    Returns the packed state, and a function that puts the files into a checkpoint; one rank calls it. A collective.

    Raises:
        OSError: on every rank, if a rank cannot write, for instance because its host does not have the folder.
    """
    doing = "writing a checkpoint's shards"
    packed = group.run_on(True, lambda: pack_state(state), doing)
    assert packed is not None, "packed on every rank"
    pieces = {
        f"{name}@{start}:{start + len(piece)}": piece
        for name, array in packed.sharded.items()
        for start, piece in array.pieces
        if len(piece)
    }
    # Replicas have the same pieces: the first rank that has one writes it.
    writers: dict[str, int] = {}
    for rank, theirs in enumerate(group.all_gather_object(list(pieces))):
        for piece in theirs:
            writers.setdefault(piece, rank)
    files = {rank: f"state-{rank + 1:05}-of-{group.world_size:05}.safetensors" for rank in set(writers.values())}

    def write() -> None:
        if not workspace.is_dir():
            raise OSError(f"{workspace.parent} is not the same folder on all hosts, which sharded checkpoints need")
        mine = {name: piece for name, piece in pieces.items() if writers[name] == group.rank}
        if mine:
            save_file(mine, workspace / files[group.rank])

    def put_in(checkpoint: Path) -> None:
        for name in files.values():
            take(workspace / name, checkpoint)

    group.run_on(True, write, doing)
    return packed, put_in


def no_shards(checkpoint: Path) -> None:
    """Put nothing into a checkpoint of which one rank writes all."""


@dataclass
class ArrayInFiles:
    """An array whose pieces are in several files; they are read when NumPy asks for the array.

    Attributes:
        pieces: the bounds of each piece's elements, an open file, and the piece's name there.
    """

    layout: FlatLayout
    tensor_type: str
    pieces: list[tuple[int, int, Any, str]] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @property
    def dtype(self) -> np.dtype:
        # Files hold bfloat16 as float32.
        return np.dtype("float32" if self.tensor_type == "bfloat16" else self.tensor_type)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        flat = np.empty(self.layout.numel, self.dtype)
        for start, stop, file, name in self.pieces:
            flat[start:stop] = file.get_tensor(name)
        return self.layout.whole(flat).astype(dtype or flat.dtype, copy=False)


def open_sharded_arrays(path: Path, outline: Any, files: Iterable[str]) -> dict[str, ArrayInFiles]:
    """Return the sharded arrays of a checkpoint, by name; ``files`` are the names of those in its manifest.

    Raises:
        ValueError: a file is damaged, or elements of an array are in none.
    """
    arrays = {name: ArrayInFiles(*told) for name, told in sharded_layouts(outline).items()}
    for file in (file for file in files if fnmatchcase(file, _FILES)):
        opened = safe_open(path / file, "np")
        for key in opened.keys():  # noqa: SIM118 -- not a dict
            name, _, bounds = key.rpartition("@")
            start, stop = map(int, bounds.split(":"))
            if name not in arrays or opened.get_slice(key).get_shape() != [stop - start]:
                raise ValueError(f"{file} holds {key!r}, which the outline does not have")
            arrays[name].pieces.append((start, stop, opened, key))
    for name, array in arrays.items():
        end = 0
        for start, stop, _, _ in sorted(array.pieces, key=lambda piece: piece[:2]):
            if start > end:
                break
            end = max(end, stop)
        if end != array.layout.numel:
            raise ValueError(f"no file holds element {end} of {name!r}, which has {array.layout.numel}")
    return arrays
