"""A loop of one's own that can be stopped and taken up again: its place in the data, and its checkpoints.

Goes in: what the loop consists of. Comes out: the windows that are left, in the order that the Trainer reads them in,
and checkpoints of the Trainer's kind::

    run = dp.FunctionalRun("outputs/loop", network, step, loader)
    run.resume()                                    # the newest complete checkpoint, if there is one
    for window in run.windows(num_epochs=4):
        loss = step(window)
        if step.num_updates % 100 == 0:
            run.save()
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Optional, Union

from mindnlp_dp.checkpoint.folder_lock import FolderLock, lock_folder
from mindnlp_dp.checkpoint.folders import (
    checkpoint_path,
    checkpoints_in,
    has_checkpoints,
    newest_checkpoint,
    remove_old_checkpoints,
    remove_unfinished_checkpoints,
)
from mindnlp_dp.checkpoint.load import load_checkpoint
from mindnlp_dp.checkpoint.manifest import RunId, run_of
from mindnlp_dp.checkpoint.run_state import Position, Run, check_same_data
from mindnlp_dp.checkpoint.whole_model import whole_model
from mindnlp_dp.checkpoint.write import write_checkpoint, write_weights
from mindnlp_dp.data.loader import Loader
from mindnlp_dp.runtime import progress

from .make_step import FunctionalStep


class FunctionalRun:
    """Every method is called by every rank.

    Args:
        folder: for checkpoints; one run's own.
        model: whose weights are saved, MindNLP's or a cell.
        step: what :func:`~mindnlp_dp.make_train_step` made for it.
        loader: what :func:`~mindnlp_dp.make_loader` made, with the step's ``accumulation_steps``.
        keep: so many checkpoints stay; None keeps all.

    Attributes:
        epoch: the one that is being read.
    """

    def __init__(
        self, folder: Union[str, Path], model: Any, step: FunctionalStep, loader: Loader, *, keep: Optional[int] = 2
    ) -> None:
        self.folder = Path(folder)
        self.model = model
        self.step = step
        self.loader = loader
        self.keep = keep
        self._whole = whole_model(model, step.synchronizer.group)
        self.group = self._whole.world
        self.epoch = 0
        # Updates of the epoch that were done when it was opened, and of the run.
        self._opened_at = (0, step.num_updates)
        self._saved: Optional[dict[str, Any]] = None
        self._parts = Run(self._whole, step.train_step)
        # Read now: all ranks are here.
        self._data = {**loader.order, "seed": step.seed}
        # Given by the first checkpoint, which also takes the right to write to the folder.
        self._run_id: Optional[RunId] = None
        self._lock: Optional[FolderLock] = None

    @property
    def position(self) -> Position:
        """How far the data has been trained on."""
        in_epoch, in_run = self._opened_at
        return Position(self.epoch, in_epoch + self.step.num_updates - in_run)

    def windows(self, num_epochs: int) -> Iterator[Any]:
        """What the step takes, an update each, from here to the end of ``num_epochs`` epochs.

        That is this rank's micro batch, None where it has none; with accumulation, a list of them.
        """
        begin = self.position
        while begin.epoch < num_epochs:
            self.epoch, self._opened_at = begin.epoch, (begin.update, self.step.num_updates)
            windows = self.loader.windows(begin.epoch, begin.update)
            if self._saved is not None:
                # Behind what opening the data drew.
                self._parts.restore_random_state(self._saved)
                self._saved = None
            for window in windows:
                if len(window) > self.step.accumulation_steps:
                    raise ValueError(
                        f"the loader's updates have {len(window)} micro batches, and the step takes "
                        f"{self.step.accumulation_steps} at most: make it with accumulation_steps={len(window)}"
                    )
                yield window if self.step.accumulation_steps > 1 else window[0]
            begin = Position(begin.epoch + 1)
        # Who has come to the end looks at the model: all ranks see the same one.
        self._whole.broadcast_buffers()

    def save(self) -> Path:
        """Write a checkpoint; one rank writes, the others return when it has, or raise what it raised.

        Raises:
            RuntimeError: another job is writing to the folder.
        """
        self.step.synchronizer.forget_errors()
        run_id = self.group.call_where(self.group.is_main, self._become_writer, "preparing the folder of checkpoints")
        path = checkpoint_path(self.folder, self.step.num_updates)
        state = {
            **self._parts.state(keep=self.group.is_main),
            "data": self._data,
            "global_batch_size": self.loader.global_batch_size,
            "position": asdict(self.position),
            "num_updates": self.step.num_updates,
            "grad_norm": self.step.grad_norm,
        }

        write_model = self._whole.model_writer(self.folder, lambda folder: write_weights(self.model, folder))

        def write() -> None:
            assert run_id is not None, "this rank writes"
            write_checkpoint(path, state, write_model, run_id)
            remove_old_checkpoints(self.folder, self.keep, [path], run_id)

        request = progress.checkpoint_request()
        self.group.call_where(self.group.is_main, write, "saving a checkpoint")
        progress.has_saved(request)
        return path

    def _become_writer(self) -> RunId:
        """On the rank that writes: no other job does from now on, until this object or this process is gone."""
        if self._lock is None:
            self._lock = lock_folder(self.folder)
            weakref.finalize(self, self._lock.release)
            remove_unfinished_checkpoints(self.folder)
        if self._run_id is None:
            self._run_id = RunId.new(map(run_of, checkpoints_in(self.folder)))
        return self._run_id

    def resume(self) -> bool:
        """Take up the run from the newest complete checkpoint in ``folder``; False, and nothing done, without any.

        Raises:
            CheckpointError: none of those there is complete, or it is not one of this model.
            ValueError: it was made with other data, other global batches or another optimizer.
        """

        def choose() -> Optional[Path]:
            return newest_checkpoint(self.folder) if has_checkpoints(self.folder) else None

        path = self.group.call_on_main(choose, "looking for a checkpoint")
        if path is None:
            return False
        if self.group.is_main:
            self._run_id = run_of(path)
        saved = load_checkpoint(path, self._whole)
        check_same_data(self._data, saved["data"], "save to another folder")
        if self.loader.global_batch_size != saved["global_batch_size"]:
            raise ValueError(
                f"the checkpoint's updates have {saved['global_batch_size']} samples, this loader's "
                f"{self.loader.global_batch_size}; make it with make_loader(..., "
                f"global_batch_size={saved['global_batch_size']}), or save to another folder"
            )
        self._parts.restore(saved)
        position = Position(**saved["position"])
        self.step.num_updates, self.step.grad_norm = saved["num_updates"], saved["grad_norm"]
        self.epoch, self._opened_at = position.epoch, (position.update, self.step.num_updates)
        self._saved = saved
        return True
