"""This module writes a checkpoint's manifest, checkpoint.json, and verifies every file in the folder against it."""

from __future__ import annotations

import fnmatch
import json
import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Optional

import xxhash
from safetensors import SafetensorError, safe_open

from mindnlp_dp.checkpoint.shard_files import open_sharded_arrays
from mindnlp_dp.checkpoint.state_tree import array_names
from mindnlp_dp.runtime.atomic_write import atomic_write
from mindnlp_dp.runtime.job_context import job_id

MANIFEST, STATE, MODEL = "checkpoint.json", "state.safetensors", "model.safetensors"
MODEL_FILES = "model*.safetensors"
HASH = "xxh3_128"
# Format 2 had other hashes.
FORMAT = 3


class CheckpointError(ValueError):
    """A folder is not a complete checkpoint, or not one of this model."""


@dataclass(frozen=True)
class RunId:
    """Identifies the run that a checkpoint belongs to; a resumed run keeps its identity.

    Attributes:
        name: 16 hexadecimal digits.
        number: the number of runs that had begun in the folder, including this one.
    """

    name: str
    number: int

    @classmethod
    def new(cls, earlier: Iterable[Optional[RunId]]) -> RunId:
        """Return the id of a new run in a folder that has checkpoints of these ``earlier`` runs."""
        return cls(secrets.token_hex(8), 1 + max((run.number for run in earlier if run is not None), default=0))


def write_manifest(folder: Path, outline: Any, run: Optional[RunId] = None) -> None:
    """Write the manifest: all files' sizes and hashes, the outline of the state, the run and the job.

    Call it after all other files of the folder are written. Without an outline the folder holds the model alone.
    """
    files = {
        str(file.relative_to(folder)): {"bytes": file.stat().st_size, HASH: _hash(file)}
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }
    manifest: dict[str, Any] = {"format": FORMAT, "files": files, "state": outline}
    if run is not None:
        manifest["run"] = asdict(run)
    if (job := job_id(os.environ)) is not None:
        manifest["job"] = job
    _write_json(folder / MANIFEST, manifest)


def job_of(path: Path) -> Optional[str]:
    """Return the name of the job that wrote a checkpoint; None if it is not known."""
    job = _entry(path, "job")
    return job if isinstance(job, str) else None


def run_of(path: Path) -> Optional[RunId]:
    """Return the run that a checkpoint belongs to; None if it is not known."""
    run = _entry(path, "run")
    try:
        return RunId(str(run["name"]), int(run["number"]))
    except (TypeError, KeyError, ValueError):
        return None


def hashes_of_weights(path: Path) -> Optional[dict[str, str]]:
    """Return the hashes of a checkpoint's files of weights, by their names; None if it has none."""
    files = _entry(path, "files")
    if not isinstance(files, dict) or not any(path.glob(MODEL_FILES)):
        return None
    return {name: entry.get(HASH) for name, entry in files.items() if fnmatch.fnmatch(name, MODEL_FILES)}


def set_run(path: Path, run: RunId) -> None:
    """Record that a checkpoint, which is complete, belongs to ``run``."""
    manifest = {**read_manifest(path), "run": asdict(run)}
    with atomic_write(path / MANIFEST) as file:
        _write_json(file, manifest)


def _write_json(file: Path, manifest: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def _entry(path: Path, name: str) -> Any:
    try:
        return json.loads((path / MANIFEST).read_text(encoding="utf-8")).get(name)
    except (OSError, ValueError, AttributeError, RecursionError):
        return None


def _hash(file: Path) -> str:
    # A hash that is fast, not one that is safe against a person who changes a checkpoint: it reveals a faulty disk.
    digest = xxhash.xxh3_128()
    with file.open("rb") as opened:
        while block := opened.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def check_checkpoint(path: Path) -> dict[str, Any]:
    """Return the manifest, after verifying every file of the checkpoint against it.

    Raises:
        CheckpointError: the manifest is missing or damaged, or a file is missing or not as it was written.
    """
    manifest = read_manifest(path)
    for name, expected in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{path} is damaged: {name} is missing")
        if file.stat().st_size != expected["bytes"]:
            raise CheckpointError(
                f"{path} is damaged: {name} has {file.stat().st_size} bytes, {expected['bytes']} were written"
            )
        if _hash(file) != expected[HASH]:
            raise CheckpointError(f"{path} is damaged: {name} is not what was written, its hash differs")
    for file in sorted(path.glob(MODEL_FILES)):
        if file.name not in manifest["files"]:
            raise CheckpointError(f"{path} is damaged: {file.name} was not written with it, and would be read as well")
    try:
        with safe_open(path / STATE, "np") as file:
            sharded = open_sharded_arrays(path, manifest["state"], manifest["files"])
            missing = sorted(set(array_names(manifest["state"])) - set(file.keys()) - set(sharded))
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: its state: {type(error).__name__}: {error}") from None
    if missing:
        raise CheckpointError(f"{path} is damaged: {STATE} lacks {missing[0]!r}, which {MANIFEST} names")
    return manifest


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint, whose other files are not verified.

    Raises:
        CheckpointError: there is no manifest, or it is damaged, or no run can be resumed from it.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        version = manifest["format"]
    except OSError as error:
        raise CheckpointError(_without_manifest(path, error)) from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path / MANIFEST} is damaged: {type(error).__name__}: {error}") from None
    if version != FORMAT:
        raise CheckpointError(
            f"{path} is of format {version}; this mindnlp_dp resumes runs from format {FORMAT}; from_pretrained may "
            "load its weights"
        )
    if manifest.get("state", ...) is None:
        raise CheckpointError(
            f"{path} holds the model alone, so no run can be resumed from it: it was saved with save_only_model; "
            "from_pretrained loads its weights"
        )
    if wrong := _wrong_with(manifest):
        raise CheckpointError(f"{path / MANIFEST} is damaged: {wrong}")
    return manifest


def _without_manifest(path: Path, error: OSError) -> str:
    """Return what is at ``path``, whose manifest could not be read because of ``error``."""
    if isinstance(error, NotADirectoryError):
        return f"{path} is a file, and a checkpoint is a folder"
    if not isinstance(error, FileNotFoundError):
        return f"{path / MANIFEST} could not be read: {error.strerror}"
    if not path.exists():
        return f"{path} does not exist" + ("" if path.is_absolute() else f" in {Path.cwd()}")
    if not any(path.iterdir()):
        return f"{path} is empty, so it is not a checkpoint"
    return (
        f"{path} has no {MANIFEST}, so no run can be resumed from it: it was saved by MindNLP's own Trainer, or in "
        "part; from_pretrained may load its weights"
    )


def _wrong_with(manifest: dict[str, Any]) -> Optional[str]:
    """Return what is missing or malformed in a manifest; None if it is well-formed."""
    if "state" not in manifest:
        return "it has no state"
    files = manifest.get("files")
    if not isinstance(files, dict):
        return f"files is a {type(files).__name__}, expected the names of files"
    for name, entry in files.items():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            return f"{name!r} is not a file in the folder"
        if not isinstance(entry, dict) or not entry.keys() >= {"bytes", HASH}:
            return f"expected bytes and {HASH} of {name!r}, got {entry!r}"
    return None if STATE in files else f"files has no {STATE}"
