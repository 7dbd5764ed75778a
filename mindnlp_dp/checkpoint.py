"""Checkpoints: complete or not there, checked when read, and nothing in them can run code.

Goes in: a model, and everything else that a run consists of, as a tree
(:mod:`mindnlp_dp.state_tree`). Comes out: a folder, from which a run is taken up as
if it had never stopped::

    checkpoint-200/
        checkpoint.json      the tree's outline; size and hash of every other file; written last
        state.safetensors    the tree's arrays: optimizer moments, random states
        model.safetensors    the weights (large models: several such files), beside MindNLP's config.json
        ...                  what else the writer of the model puts there

One process writes a folder. It is written under another name and renamed, so that a
killed writer leaves nothing that looks like a checkpoint; a disk that loses or changes
a part of it is found out by the hashes.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any, Callable, Optional, Union

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from .backends.base import Backend
from .backends.dtypes import dtype_name
from .files import clean_up_after_a_kill, in_place_of
from .process_group import ProcessGroup
from .replicas import all_names, broadcast_parameters, named_weights, set_weight
from .state_tree import PackedState, broadcast_state, pack_state, unpack_state

MANIFEST, STATE, MODEL = "checkpoint.json", "state.safetensors", "model.safetensors"
MODEL_FILES = "model*.safetensors"
PREFIX = "checkpoint"
FORMAT = 1


class CheckpointError(ValueError):
    """A folder is no complete checkpoint, or not one of this model."""


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"{PREFIX}-{step}"


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoint folders in ``folder``, by step; not checked."""
    found = [(re.fullmatch(rf"{PREFIX}-(\d+)", path.name), path) for path in folder.glob(f"{PREFIX}-*")]
    return [path for _, path in sorted((int(name[1]), path) for name, path in found if name and path.is_dir())]


# What all ranks do together.


def load_checkpoint(path: Path, model: Any, group: ProcessGroup) -> dict[str, Any]:
    """Rank 0 reads, and every rank gets it: the weights, in ``model``, and the state.

    Raises:
        CheckpointError: on every rank, when the folder is not complete, or not of this model.
    """

    def read() -> PackedState:
        state = read_state(path)
        read_weights(model, path)
        return state

    packed = group.call_where(group.is_main, read, "reading a checkpoint")
    broadcast_parameters(model, group)
    return unpack_state(broadcast_state(packed or PackedState(None), group))


# Writing.


def write_checkpoint(path: Path, state: Optional[dict[str, Any]], write_model: Callable[[Path], None]) -> None:
    """Write a checkpoint to ``path``, in place of one that is there.

    ``write_model`` is called with the folder to write weights (files ``model*.safetensors``) and whatever else
    belongs to the model into. Without a state the folder holds the model alone, and no run can be taken up from it.
    """
    packed = None if state is None else pack_state(state)
    with in_place_of(path) as folder:
        folder.mkdir()
        write_model(folder)
        if packed is None:
            return
        save_file({name: _contiguous(array) for name, array in packed.arrays.items()}, folder / STATE)
        files = {
            str(file.relative_to(folder)): {"bytes": file.stat().st_size, "blake2b": _hash(file)}
            for file in sorted(folder.rglob("*"))
            if file.is_file()
        }
        manifest = {"format": FORMAT, "files": files, "state": packed.outline}
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def write_weights(model: Any, folder: Path) -> None:
    """Write ``model.safetensors``: every weight by its name; of a model with adapters, what is not frozen."""
    has_adapters = hasattr(model, "peft_config")
    arrays = {
        name: _contiguous(Backend.to_host(weight))
        for name, weight in named_weights(model)
        if not has_adapters or getattr(weight, "requires_grad", True)
    }
    save_file(arrays, folder / MODEL, metadata={"format": "np"})


def write_module(model: Any, folder: Path) -> None:
    """Write a model that is no PreTrainedModel: adapters as PeftModel.from_pretrained reads them, else all weights."""
    if hasattr(model, "peft_config"):
        model.save_pretrained(str(folder))
    else:
        write_weights(model, folder)


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


def _contiguous(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(array.shape)


def _hash(file: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with file.open("rb") as opened:
        while block := opened.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


# Reading.


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=3)


def choose_checkpoint(folder: Path, wanted: Union[str, bool, None], saves: bool = True) -> Optional[Path]:
    """What to resume from: a path as it is, the newest complete checkpoint in ``folder`` for True, else nothing.

    Warns when a run that ``saves`` begins anew in a folder that holds checkpoints.

    Raises:
        CheckpointError: there is no complete one.
    """
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


def check_checkpoint(path: Path) -> dict[str, Any]:
    """Read the manifest, and hold every file against it.

    Raises:
        CheckpointError: there is no manifest, or it is damaged, or a file is missing, or not what was written.
    """
    manifest = _read_manifest(path)
    for name, expected in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{path} is damaged: {name} is missing")
        if file.stat().st_size != expected["bytes"]:
            raise CheckpointError(
                f"{path} is damaged: {name} has {file.stat().st_size} bytes, {expected['bytes']} were written"
            )
        if _hash(file) != expected["blake2b"]:
            raise CheckpointError(f"{path} is damaged: {name} is not what was written, its hash differs")
    return manifest


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        version = manifest["format"]
    except OSError:
        raise CheckpointError(
            f"{path} has no {MANIFEST}, so no run can be resumed from it: it was saved with save_only_model, by "
            "MindNLP's own Trainer, or in part; from_pretrained may load its weights"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / MANIFEST} is damaged: {type(error).__name__}: {error}") from None
    if version != FORMAT:
        raise CheckpointError(f"{path} is of format {version}; this mindnlp_dp reads format {FORMAT}")
    if wrong := _wrong_with(manifest):
        raise CheckpointError(f"{path / MANIFEST} is damaged: {wrong}")
    return manifest


def _wrong_with(manifest: dict[str, Any]) -> Optional[str]:
    """What is missing in a manifest, or of another form than was written; None when nothing is."""
    if "state" not in manifest:
        return "it lacks state"
    files = manifest.get("files")
    if not isinstance(files, dict):
        return f"files is a {type(files).__name__}, expected the names of files"
    for name, entry in files.items():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            return f"{name!r} is no file in the folder"
        if not isinstance(entry, dict) or not entry.keys() >= {"bytes", "blake2b"}:
            return f"expected bytes and blake2b of {name!r}, got {entry!r}"
    return None if STATE in files else f"files lacks {STATE}"


def read_state(path: Path) -> PackedState:
    """The state of a checkpoint; CheckpointError when anything in the folder is not as it was written."""
    manifest = check_checkpoint(path)
    return PackedState(manifest["state"], load_file(path / STATE))


def read_weights(model: Any, folder: Path) -> None:
    """Load ``model*.safetensors`` of a folder into ``model``, by name.

    Raises:
        CheckpointError: there are no such files, or they hold a weight that the model lacks or has in another shape,
            or lack one that it trains.
    """
    files = sorted(folder.glob(MODEL_FILES))
    if not files:
        raise CheckpointError(f"{folder} holds no weights: there is no {MODEL_FILES}")
    by_name = all_names(model)
    read: set[int] = set()
    for path in files:
        try:
            with safe_open(path, "np") as file:
                names = file.keys()
                for name in names:
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
    set_weight(weight, Backend.from_host(Backend.to_host(array), dtype_name(weight)))
