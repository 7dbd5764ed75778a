"""Lets a custom training loop stop and resume: it tracks the position in the data and writes checkpoints.

The user's loop reads the remaining updates from :class:`FunctionalRun`, in the Trainer's order. Its checkpoints have
the Trainer's format::

    run = dp.FunctionalRun("outputs/loop", network, step, loader)
    run.resume()                                    # the newest complete checkpoint, if there is one
    for update in run.updates(num_epochs=4):
        loss = step(update)
        if step.num_updates % 100 == 0:
            run.save()
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Optional, Union

from mindnlp_dp.checkpoint.collective_save import NewCheckpoint, write_together
from mindnlp_dp.checkpoint.directory import (
    checkpoint_path,
    checkpoints_in,
    claim_checkpoint,
    has_checkpoints,
    named_checkpoint,
    newest_checkpoint,
    remove_old_checkpoints,
    remove_unfinished_checkpoints,
    run_that_continues,
)
from mindnlp_dp.checkpoint.folder_lock import FolderLock, lock_folder
from mindnlp_dp.checkpoint.manifest import RunId, run_of
from mindnlp_dp.checkpoint.writer import write_weights
from mindnlp_dp.data.loader import Loader
from mindnlp_dp.parallel.distributed_model import distributed_model_of, load_checkpoint
from mindnlp_dp.runtime import heartbeat
from mindnlp_dp.runtime.random_state import seed_between_updates
from mindnlp_dp.training.make_train_step import FunctionalStep
from mindnlp_dp.training.run_state import Position, Run, check_same_data


class FunctionalRun:
    """A custom training loop that can be resumed from checkpoints. Every rank must call every method.

    Args:
        folder: folder for the checkpoints, used by this run only.
        model: the model whose weights are saved: a MindNLP model or a cell.
        step: the train step that :func:`~mindnlp_dp.make_train_step` returned for the model.
        loader: the loader that :func:`~mindnlp_dp.make_loader` returned, made with the step's ``accumulation_steps``.
        keep: number of newest checkpoints to keep; None, 0 or less keeps all.
        sharded: every rank writes its part of the optimizer state; all hosts must share ``folder``.

    Attributes:
        epoch: number of the current epoch.
    """

    def __init__(
        self,
        folder: Union[str, Path],
        model: Any,
        step: FunctionalStep,
        loader: Loader,
        *,
        keep: Optional[int] = 2,
        sharded: bool = False,
    ) -> None:
        self.folder = Path(folder)
        self.model = model
        self.step = step
        self.loader = loader
        self.keep = keep
        self.sharded = sharded
        self._distributed_model = distributed_model_of(model, step.synchronizer.group)
        self.group = self._distributed_model.world
        self.epoch = 0
        # The updates of the epoch that are done, without the one that the loop has now, and what the step had done when
        # the loop got that one.
        self._updates_done = 0
        self._updates_before: Optional[int] = None
        # The checkpoint of another run that this one has gone back to.
        self._unclaimed: Optional[Path] = None
        self._run_state = Run(self._distributed_model, step.train_step)
        # Read in the constructor, which every rank calls: reading it may be a collective.
        self._data = {**loader.order, "seed": step.seed}
        # Set by the first checkpoint that this process writes; resume() sets the run id, too.
        self._run_id: Optional[RunId] = None
        self._lock: Optional[FolderLock] = None

    @property
    def position(self) -> Position:
        """The position in the data: the epoch, and the number of its updates that are done.

        The update that the loop has is done when the step has made an update since the loop got it, or when the loop
        asks for the next one. Other updates of the step, between two epochs or of other data, are not counted.
        """
        is_done = self._updates_before is not None and self.step.num_updates > self._updates_before
        return Position(self.epoch, self._updates_done + is_done)

    def updates(self, num_epochs: int) -> Iterator[Any]:
        """Yield the step's argument for every update, from the current position to the end of ``num_epochs`` epochs.

        It is this rank's micro-batch, or None if it has none; with accumulation, a list of these.
        """
        begin = self.position
        while begin.epoch < num_epochs:
            self._stand_at(begin)
            updates = self.loader.updates(begin.epoch, begin.update)
            for micro_batches in updates:
                if len(micro_batches) > self.step.accumulation_steps:
                    raise ValueError(
                        f"the loader's updates have {len(micro_batches)} micro-batches, and the step takes "
                        f"{self.step.accumulation_steps} at most: make it with accumulation_steps={len(micro_batches)}"
                    )
                self._claim_checkpoint()
                self._updates_before = self.step.num_updates
                seed_between_updates(self.step.seed, self._distributed_model.seed_rank, self.step.num_updates)
                yield micro_batches if self.step.accumulation_steps > 1 else micro_batches[0]
                self._stand_at(Position(begin.epoch, self._updates_done + 1))
            begin = Position(begin.epoch + 1)
        # The user may evaluate or save the model after the last epoch: give all ranks the same buffers.
        self._distributed_model.broadcast_buffers()

    def _stand_at(self, position: Position) -> None:
        self.epoch, self._updates_done, self._updates_before = position.epoch, position.update, None

    def save(self) -> Path:
        """Write a checkpoint on one rank; the others wait for it, and raise its error if it fails.

        Raises:
            RuntimeError: another job is writing to the folder.
        """
        self.step.synchronizer.reset_error_feedback()
        run_id = self.group.run_on(self.group.is_main, self._become_writer, "preparing the folder of checkpoints")
        num_updates = self.step.num_updates
        path = checkpoint_path(self.folder, num_updates)
        state: Any = {
            **self._run_state.state(keep=self.group.is_main, sharded=self.sharded),
            "data": self._data,
            "global_batch_size": self.loader.global_batch_size,
            "position": asdict(self.position),
            "num_updates": num_updates,
            "grad_norm": self.step.grad_norm,
        }

        request = heartbeat.checkpoint_request()

        def then() -> None:
            assert run_id is not None, "this rank writes"
            remove_old_checkpoints(self.folder, self.keep, [path], run_id, step=num_updates)

        def model_writer(workspace: Path) -> Callable[[Path], None]:
            return self._distributed_model.model_writer(workspace, lambda folder: write_weights(self.model, folder))

        write_together(
            NewCheckpoint(path, state, model_writer, run_id, then, gathers_model=self._distributed_model.is_sharded),
            self.group,
            saves=self.group.is_main,
            sharded=self.sharded,
        )
        heartbeat.has_saved(request)
        return path

    def _claim_checkpoint(self) -> None:
        """Let a run that went back to an earlier checkpoint own that one from now on. A collective."""
        path, self._unclaimed = self._unclaimed, None
        if path is not None:
            self.group.run_on(
                self.group.is_main, lambda: claim_checkpoint(path, self.folder, self._become_writer()), "resuming"
            )

    def _become_writer(self) -> RunId:
        """Lock the folder against other jobs until this object or process ends; called on the rank that writes."""
        if self._lock is None:
            self._lock = lock_folder(self.folder)
            weakref.finalize(self, self._lock.release)
            remove_unfinished_checkpoints(self.folder)
        if self._run_id is None:
            self._run_id = RunId.new(map(run_of, checkpoints_in(self.folder)))
        return self._run_id

    def resume(self, checkpoint: Union[str, Path, None] = None) -> bool:
        """Resume from a checkpoint, by default the newest complete one in ``folder``; return False if there is none.

        Going back to an earlier checkpoint begins another run, which is then the one that :meth:`resume` continues.

        Raises:
            CheckpointError: no checkpoint is complete, or the checkpoint belongs to another model.
            ValueError: the checkpoint was made with other data, another global batch size or another optimizer.
        """

        def choose() -> Optional[tuple[Path, RunId, bool]]:
            if checkpoint is None and not has_checkpoints(self.folder):
                return None
            path = newest_checkpoint(self.folder) if checkpoint is None else named_checkpoint(Path(checkpoint))
            run = run_that_continues(path, self.folder, is_newest=checkpoint is None)
            return path, run, run == run_of(path)

        found = self.group.run_on_rank0(choose, "looking for a checkpoint")
        if found is None:
            return False
        path, self._run_id, is_own = found
        saved = load_checkpoint(path, self._distributed_model)
        check_same_data(self._data, saved["data"], "save to another folder")
        if self.loader.global_batch_size != saved["global_batch_size"]:
            raise ValueError(
                f"the checkpoint's updates have {saved['global_batch_size']} samples, this loader's "
                f"{self.loader.global_batch_size}; make it with make_loader(..., "
                f"global_batch_size={saved['global_batch_size']}), or save to another folder"
            )
        self._run_state.restore(saved)
        self._stand_at(Position(**saved["position"]))
        self.step.num_updates, self.step.grad_norm = saved["num_updates"], saved["grad_norm"]
        self._unclaimed = None if is_own else path
        return True
