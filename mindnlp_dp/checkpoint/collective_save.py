"""This module lets the ranks of a job write one checkpoint together; Trainers and FunctionalRun call it.

Rank 0 writes the weights and the state. With ``sharded``, every rank writes its pieces of the optimizer's state to a
workspace in the output folder, from which they are put into the checkpoint::

    rank 1, ...   pieces ── workspace ─┐
    rank 0        pieces ── workspace ─┴─ weights, the rest of the state ── manifest ── rename

With a :class:`~.background.BackgroundWriter`, all of it is first copied to memory, on every rank, and then written by
threads.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from mindnlp_dp.checkpoint.background import BackgroundWriter, Step
from mindnlp_dp.checkpoint.directory import WORKSPACE
from mindnlp_dp.checkpoint.manifest import RunId
from mindnlp_dp.checkpoint.shard_files import ShardFiles
from mindnlp_dp.checkpoint.state_tree import PackedState, pack_state
from mindnlp_dp.checkpoint.writer import publish_checkpoint, write_checkpoint, write_files
from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.runtime.atomic_write import link_or_copy

_DOING = "saving a checkpoint"


@dataclass(frozen=True)
class NewCheckpoint:
    """A checkpoint to be written.

    Attributes:
        path: its folder.
        state: the run's state; None: the model alone.
        model_writer: a collective that takes a folder for temporary files, and returns the function that writes the
            model's files into a folder; the ranks that save call that function.
        run: the run that it belongs to; only the ranks that save need it.
        then: called on the ranks that save, when it is complete.
        gathers_model: whether ``model_writer`` writes to its folder.
    """

    path: Path
    state: Optional[dict[str, Any]]
    model_writer: Callable[[Path], Callable[[Path], None]]
    run: Optional[RunId]
    then: Callable[[], None]
    gathers_model: bool = False


def write_together(
    checkpoint: NewCheckpoint,
    group: ProcessGroup,
    *,
    saves: bool,
    sharded: bool = False,
    background: Optional[BackgroundWriter] = None,
) -> None:
    """Write a checkpoint, or let ``background`` write it, which must have completed the one before. A collective.

    ``saves`` says whether this rank writes all that is not sharded; with ``sharded``, rank 0 alone does.

    Raises:
        OSError: on every rank, if a rank cannot write.
    """
    folder = checkpoint.path.parent
    if not sharded or checkpoint.state is None:
        with workspace_in(folder, group, checkpoint.gathers_model) as workspace:
            write_model = checkpoint.model_writer(workspace)
            group.run_on(saves, lambda: _save_full(checkpoint, write_model, background), _DOING)
    elif background is None:
        with workspace_in(folder, group) as workspace:
            _save_shards(checkpoint, group, workspace)
    else:
        _start_saving_shards(checkpoint, group, background)


def _save_full(
    checkpoint: NewCheckpoint, write_model: Callable[[Path], None], background: Optional[BackgroundWriter]
) -> None:
    path, run, then = checkpoint.path, checkpoint.run, checkpoint.then
    if background is None:
        write_checkpoint(path, checkpoint.state, write_model, run)
        then()
        return
    state = None if checkpoint.state is None else pack_state(checkpoint.state)
    # The thread must not keep the state, which is copied, in memory.
    outline = None if state is None else state.outline

    def write(files: Path) -> None:
        publish_checkpoint(files, path, outline, run)
        then()

    background.start(lambda files: write_files(files, state, write_model), write, spare=path.parent)


def _save_shards(checkpoint: NewCheckpoint, group: ProcessGroup, workspace: Path) -> None:
    state, shards = _shards_of(checkpoint, group, workspace)
    group.run_on(True, lambda: shards.write(workspace), _DOING)
    write_model = checkpoint.model_writer(workspace)

    def write(files: Path) -> None:
        write_model(files)
        _put(shards.names, files, workspace)

    def save() -> None:
        write_checkpoint(checkpoint.path, state, write, checkpoint.run)
        checkpoint.then()

    group.run_on(group.is_main, save, _DOING)


def _start_saving_shards(checkpoint: NewCheckpoint, group: ProcessGroup, background: BackgroundWriter) -> None:
    # Not a block: the workspace is needed until rank 0's thread has put the checkpoint together.
    workspace = make_workspace(checkpoint.path.parent, group)
    try:
        state, shards = _shards_of(checkpoint, group, workspace)
        write_model = checkpoint.model_writer(workspace)

        def copy(files: Path) -> None:
            if group.is_main:
                write_files(files, state, write_model)
            else:
                files.mkdir()
            shards.write(files)

        def start() -> None:
            if group.is_main:
                last = _last_step(checkpoint, state.outline, shards, workspace)
                background.start(copy, last=last, spare=workspace, cleanup=lambda: remove_workspace(workspace))
            elif shards.own_name is not None:
                background.start(copy, functools.partial(_put, [shards.own_name], workspace), spare=workspace)

        group.run_on(True, start, _DOING)
    except BaseException:
        background.drop()
        if group.is_main:
            remove_workspace(workspace)
        raise


def _last_step(checkpoint: NewCheckpoint, outline: Any, shards: ShardFiles, workspace: Path) -> Step:
    # As above, what it returns has no reference to the state.
    path, run, then = checkpoint.path, checkpoint.run, checkpoint.then
    put_others = functools.partial(_put, [name for name in shards.names if name != shards.own_name])

    def put_together(files: Path) -> None:
        publish_checkpoint(files, path, outline, run, lambda folder: put_others(folder, workspace))
        then()

    return put_together


def _put(names: Iterable[str], target: Path, source: Path) -> None:
    for name in names:
        link_or_copy(source / name, target / name)


def _shards_of(checkpoint: NewCheckpoint, group: ProcessGroup, workspace: Path) -> tuple[PackedState, ShardFiles]:
    """Return the packed state and the files of its shards. A collective."""

    def pack() -> PackedState:
        if not workspace.is_dir():
            raise OSError(f"{workspace.parent} is not the same folder on all hosts, which sharded checkpoints need")
        return pack_state(checkpoint.state)

    state = group.run_on(True, pack, _DOING)
    assert state is not None, "packed on every rank"
    return state, ShardFiles.of(state, group)


# Workspaces: folders in the output folder, in which ranks write files for a checkpoint. If rank 0 is killed, the next
# run removes them by their names.


@contextlib.contextmanager
def workspace_in(folder: Path, group: ProcessGroup, is_needed: bool = True) -> Iterator[Path]:
    """Make a workspace in ``folder`` for this block. A collective.

    Yields its path on every rank, or ``folder`` itself if it is not needed.
    """
    if not is_needed:
        yield folder
        return
    path = make_workspace(folder, group)
    try:
        yield path
    finally:
        if group.is_main:
            remove_workspace(path)


def make_workspace(folder: Path, group: ProcessGroup) -> Path:
    """Make a workspace in ``folder``, and return its path on every rank. A collective."""

    def make() -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=WORKSPACE, dir=folder))

    return group.run_on_rank0(make, "preparing a checkpoint")


def remove_workspace(path: Path) -> None:
    """Remove a workspace with all that is in it."""
    shutil.rmtree(path, ignore_errors=True)
