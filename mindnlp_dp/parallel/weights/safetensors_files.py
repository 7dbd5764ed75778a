"""Reads ``model*.safetensors`` files array by array, and produces the parts of such a file for writing.

:func:`~mindnlp_dp.parallelize` and the checkpoints of sharded models use it, so that a rank needs memory for only one
full array at a time. checkpoint/reader.py reads the checkpoints of models that are not sharded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Optional

import numpy as np
from safetensors import SafetensorError, safe_open

from mindnlp_dp.checkpoint.manifest import MODEL_FILES, CheckpointError
from mindnlp_dp.parallel.placement import Placement, Placements
from mindnlp_dp.runtime.arrays import to_host

# The name of each type in safetensors. bfloat16 is written as the upper halves of float32 values.
_TYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


class WeightFiles:
    """Reads the ``model*.safetensors`` files of a folder, array by array, by the names of a model or its base model.

    Args:
        folder: the folder with the files.
        placements: names and shapes of the weights of the model.
        is_complete: whether the files must contain all trainable weights. A pretrained model lacks the head of a new
            task.

    Attributes:
        missing: names of the weights that the files do not contain.

    Raises:
        CheckpointError: files or weights of this model are missing, or an array has another shape.
    """

    def __init__(self, folder: Path, placements: Placements, *, is_complete: bool) -> None:
        paths = sorted(folder.glob(MODEL_FILES))
        if not paths:
            raise CheckpointError(f"{folder} has no weights: {MODEL_FILES} is missing")
        self._files: dict[str, Any] = {}
        for path in paths:
            try:
                file = safe_open(path, "np")
            except SafetensorError as error:
                raise CheckpointError(f"{path} is damaged: {error}") from None
            self._files.update(dict.fromkeys(file.keys(), file))
        found = {name: self._find(placements, name) for name in placements}
        self._names = {name: there for name, there in found.items() if there is not None}
        self.missing = [name for name, there in found.items() if there is None]
        if not self._names:
            raise CheckpointError(f"{folder} has no weight of this model; it has {', '.join(list(self._files)[:3])}")
        for name, there in self._names.items():
            shape, expected = tuple(self._files[there].get_slice(there).get_shape()), placements[name].shape
            if shape != expected:
                raise CheckpointError(
                    f"{folder} holds {there!r} in shape {shape}, which the model has in shape {expected}"
                )
        lacking = [name for name in self.missing if placements[name].trains]
        if is_complete and lacking:
            raise CheckpointError(f"{folder} does not hold {lacking[0]!r}, which the model trains")

    def _find(self, placements: Placements, name: str) -> Optional[str]:
        prefix = placements.prefix
        for known in placements.names_of(name):
            # The names before PEFT wrapped the model and its layers.
            plain = known.removeprefix("base_model.model.").replace(".base_layer.", ".")
            for candidate in (known, plain, plain.removeprefix(prefix), f"{prefix}{plain}"):
                if candidate in self._files:
                    return candidate
        return None

    def get(self, placement: Placement) -> Optional[np.ndarray]:
        """Return a full array, or None if it is missing."""
        name = self._names.get(placement.name)
        return None if name is None else to_host(self._files[name].get_tensor(name))


def host_type(dtype: str) -> Any:
    """Return the NumPy type in which values of a safetensors type are held in memory."""
    return np.dtype(np.float32 if dtype == "bfloat16" else dtype)


def file_header(placements: Iterable[Placement]) -> bytes:
    """Return the header of a safetensors file (its README, "Format"): a length and JSON with types and offsets."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for placement in placements:
        item_bytes = 2 if placement.dtype == "bfloat16" else host_type(placement.dtype).itemsize
        begin, end = end, end + item_bytes * math.prod(placement.shape)
        entries[placement.name] = {
            "dtype": _TYPES[placement.dtype],
            "shape": placement.shape,
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def bytes_of(array: np.ndarray, dtype: str) -> bytes:
    """Return the bytes of an array as safetensors stores the type ``dtype``."""
    if dtype == "bfloat16":
        return (np.ascontiguousarray(array).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return np.ascontiguousarray(array.astype(host_type(dtype), copy=False)).tobytes()
