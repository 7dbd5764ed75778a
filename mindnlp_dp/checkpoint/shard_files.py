"""This module writes the sharded arrays of a checkpoint's state by the ranks that have them, and reads them again.

Each rank writes one file with its pieces, named by the array and the bounds of their elements; the outline in
checkpoint.json has the arrays' shapes. So any number of ranks can read them::

    state.safetensors                   rank 0: all that is not sharded
    state-00001-of-00002.safetensors    rank 0: "optimizer/state/0/exp_avg@0:768", ...
    state-00002-of-00002.safetensors    rank 1: "optimizer/state/0/exp_avg@768:1536", ...
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Optional

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from mindnlp_dp.checkpoint.state_tree import PackedState, sharded_layouts
from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.runtime.sharded_array import FlatLayout

_FILES = "state-*-of-*.safetensors"


@dataclass(frozen=True)
class ShardFiles:
    """The files of one checkpoint in which the ranks write their pieces of its sharded arrays.

    Attributes:
        names: the names of all ranks' files.
        own_name: the name of this rank's file; None if it writes none.
        pieces: what this rank writes.
    """

    names: list[str]
    own_name: Optional[str]
    pieces: dict[str, np.ndarray]

    @classmethod
    def of(cls, packed: PackedState, group: ProcessGroup) -> ShardFiles:
        """Return the files for a state; ranks that have the same pieces agree on the one that writes. A collective."""
        pieces = {
            f"{name}@{start}:{start + len(piece)}": piece
            for name, array in packed.sharded.items()
            for start, piece in array.pieces
            if len(piece)
        }
        writers: dict[str, int] = {}
        for rank, theirs in enumerate(group.all_gather_object(list(pieces))):
            for piece in theirs:
                writers.setdefault(piece, rank)
        names = {rank: f"state-{rank + 1:05}-of-{group.world_size:05}.safetensors" for rank in set(writers.values())}
        mine = {name: piece for name, piece in pieces.items() if writers[name] == group.rank}
        return cls(list(names.values()), names.get(group.rank), mine)

    def write(self, folder: Path) -> None:
        """Write this rank's file, if it has one, into ``folder``."""
        if self.own_name is not None:
            save_file(self.pieces, folder / self.own_name)


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
        return self.layout.full(flat).astype(dtype or flat.dtype, copy=False)


def open_sharded_arrays(path: Path, outline: Any, files: Iterable[str]) -> dict[str, ArrayInFiles]:
    """Return the sharded arrays of a checkpoint, by name; ``files`` are the names of those in its manifest.

    Raises:
        ValueError: a file is damaged, or elements of an array are in none.
    """
    arrays = {name: ArrayInFiles(*layout) for name, layout in sharded_layouts(outline).items()}
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
