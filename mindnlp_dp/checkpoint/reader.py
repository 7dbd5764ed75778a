"""This module reads the files of a checkpoint on rank 0.

parallel/distributed_model.py calls it, and sends the result to every rank. The weights of sharded models are read by
parallel/weights/safetensors_files.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file

from mindnlp_dp.checkpoint.manifest import MODEL_FILES, STATE, CheckpointError, check_checkpoint
from mindnlp_dp.checkpoint.shard_files import open_sharded_arrays
from mindnlp_dp.checkpoint.state_tree import PackedState
from mindnlp_dp.runtime.arrays import dtype_name, from_host, set_weight, to_host
from mindnlp_dp.runtime.named_weights import all_names, transient_buffers


def read_state(path: Path) -> PackedState:
    """Return a checkpoint's state; raise CheckpointError if anything in the folder is not as it was written."""
    manifest = check_checkpoint(path)
    sharded = open_sharded_arrays(path, manifest["state"], manifest["files"])
    return PackedState(manifest["state"], {**load_file(path / STATE), **sharded})


def read_weights(model: Any, folder: Path) -> None:
    """Load ``model*.safetensors`` of a folder into ``model``, by name.

    Raises:
        CheckpointError: the folder has none of these files, or they hold a weight that the model lacks or has in
            another shape, or they lack a weight that the model trains.
    """
    files = sorted(folder.glob(MODEL_FILES))
    if not files:
        raise CheckpointError(f"{folder} has no weights: {MODEL_FILES} is missing")
    by_name = all_names(model)
    # Files from other versions of a library may hold these buffers; today's state dicts do not.
    skipped = {name for name, _ in transient_buffers(model)}
    read: set[int] = set()
    for path in files:
        try:
            with safe_open(path, "np") as file:
                names = file.keys()
                for name in names:
                    if name in skipped:
                        continue
                    _read_weight(by_name.get(name), name, file.get_tensor(name), path)
                    read.add(id(by_name[name]))
        except SafetensorError as error:
            raise CheckpointError(f"{path} is damaged: {error}") from None
    for name, weight in by_name.items():
        if id(weight) not in read and getattr(weight, "requires_grad", False):
            raise CheckpointError(f"{folder} does not hold {name!r}, which the model trains")


def _read_weight(weight: Any, name: str, array: np.ndarray, path: Path) -> None:
    if weight is None:
        raise CheckpointError(f"{path} holds {name!r}, which the model does not have")
    if tuple(weight.shape) != array.shape:
        raise CheckpointError(
            f"{path} holds {name!r} in shape {array.shape}, which the model has in shape {tuple(weight.shape)}"
        )
    set_weight(weight, from_host(to_host(array), dtype_name(weight)))
