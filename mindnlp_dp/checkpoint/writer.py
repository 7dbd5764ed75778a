"""This module writes a checkpoint from one process, complete or not at all; Trainers and FunctionalRun call it."""

from __future__ import annotations

import itertools
import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Callable, Optional, Union

import numpy as np
from safetensors.numpy import save_file

from mindnlp_dp.checkpoint.manifest import MANIFEST, MODEL, STATE, RunId, write_manifest
from mindnlp_dp.checkpoint.state_tree import PackedState, pack_state
from mindnlp_dp.runtime.adapters import has_adapters
from mindnlp_dp.runtime.arrays import from_host, to_host
from mindnlp_dp.runtime.atomic_write import atomic_write, link_or_copy
from mindnlp_dp.runtime.named_weights import named_weights

# The state of a run, packed or not.
State = Union[dict[str, Any], PackedState]


def write_checkpoint(
    path: Path, state: Optional[State], write_model: Callable[[Path], None], run: Optional[RunId] = None
) -> None:
    """Write a checkpoint of ``run`` to ``path``, replacing one that exists there.

    ``write_model`` is called with a folder, and writes the weights (files ``model*.safetensors``) and other files of
    the model into it. Without a state the folder holds the model alone, and no run can be resumed from it.
    """
    _keep_folder_of_others(path)
    with atomic_write(path) as folder:
        outline = write_files(folder, state, write_model)
        write_manifest(folder, outline, run)


def write_files(folder: Path, state: Optional[State], write_model: Callable[[Path], None]) -> Any:
    """Write a checkpoint's files, except the manifest, into a new folder; return the outline of the state."""
    packed = None if state is None else pack_state(state)
    folder.mkdir()
    write_model(folder)
    if packed is None:
        return None
    save_file({name: _contiguous(array) for name, array in packed.arrays.items()}, folder / STATE)
    return packed.outline


def publish_checkpoint(
    files: Path,
    path: Path,
    outline: Any,
    run: Optional[RunId] = None,
    put_others: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Write a checkpoint to ``path`` from the folder and the outline of :func:`write_files`.

    ``put_others`` puts other ranks' files into the folder that it is called with.
    """
    _keep_folder_of_others(path)
    with atomic_write(path) as folder:
        shutil.copytree(files, folder, copy_function=link_or_copy)
        put_others(folder)
        write_manifest(folder, outline, run)


def _keep_folder_of_others(path: Path) -> None:
    """Rename what is at ``path`` if it is not a checkpoint of this package, which the new one may replace."""
    if not os.path.lexists(path) or (path / MANIFEST).is_file() or (path / STATE).is_file():
        return
    names = itertools.chain([f"{path.name}-kept"], (f"{path.name}-kept-{number}" for number in itertools.count(2)))
    other = next(new for name in names if not os.path.lexists(new := path.with_name(name)))
    path.rename(other)
    warnings.warn(
        f"{path} is not a checkpoint of mindnlp_dp, and is kept as {other.name}", RuntimeWarning, stacklevel=3
    )


def write_weights(model: Any, folder: Path) -> None:
    """Write ``model.safetensors``: every weight by its name; for a model with adapters, only those not frozen."""
    skips_frozen = has_adapters(model)
    arrays = {
        name: _contiguous(to_host(weight))
        for name, weight in named_weights(model)
        if not skips_frozen or getattr(weight, "requires_grad", True)
    }
    # Transformers 4 on PyTorch refuses the word "np"; it reads the same bytes with "pt".
    save_file(arrays, folder / MODEL, metadata={"format": "pt"})


def write_adapters(model: Any, arrays: Mapping[str, np.ndarray], folder: Path) -> None:
    """Write adapters, given as full arrays by their parameters' names, as PeftModel.from_pretrained reads them."""
    from mindnlp.peft.utils.save_and_load import get_data_list

    entries = get_data_list({name: from_host(array, str(array.dtype)) for name, array in arrays.items()})
    model.save_pretrained(str(folder), state_dict=entries)


def _contiguous(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(array.shape)
