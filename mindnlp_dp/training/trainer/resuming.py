"""This module saves and restores the state of the Trainer's loop, and opens the data where a resumed run continues."""

from __future__ import annotations

import copy
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any, Optional

from mindnlp_dp.checkpoint.directory import checkpoint_path, remove_old_checkpoints
from mindnlp_dp.checkpoint.manifest import MODEL_FILES
from mindnlp_dp.checkpoint.writer import write_checkpoint, write_module, write_weights
from mindnlp_dp.data.dataset_adapter import is_batched_pipeline
from mindnlp_dp.runtime.job_context import job_if_restarted, max_world_size
from mindnlp_dp.training.run_state import Position, Run, check_same_data, warn_of_other_settings
from mindnlp_dp.training.train_step import TrainStep
from mindnlp_dp.training.trainer.arguments import DataParallelArgumentsBase
from mindnlp_dp.training.trainer.batch_scaling import ElasticBatchSchedule, batch_of
from mindnlp_dp.training.trainer.callbacks import (
    ControlAgreement,
    callback_states,
    has_lost_patience,
    load_callback_states,
)
from mindnlp_dp.training.trainer.mindnlp_trainer import TRAINER_STATE_NAME, TrainerState


def make_epoch_loader(trainer: Any, saved: Optional[dict[str, Any]]) -> tuple[Any, ElasticBatchSchedule]:
    """Return the loader of the training data, and the :class:`.ElasticBatchSchedule` of its batches. A collective.

    When the run ``saved`` is resumed, its global batch size is kept, whatever the number of ranks is now. An elastic
    job keeps the global batch of its full size, unless it scales the batch with the number of ranks. This may change
    the accumulation steps in ``trainer.args``. Raises ValueError if the data is not the saved run's, or if a pipeline's
    batches cannot make up that global batch.
    """
    whole, saved = saved, None if _begins_its_epoch_anew(trainer.args, saved) else saved
    if trainer.args.gradient_accumulation_steps == trainer.accumulation_steps_set:
        # An earlier call has set them: restore what the user asked for.
        trainer.args = copy.copy(trainer.args)
        trainer.args.gradient_accumulation_steps = trainer.accumulation_steps_asked
    planned = _global_batch(trainer) if saved is None else saved["planned_batch_size"]
    trainer.global_batch_size = None if planned is None else batch_of(planned, trainer.world.world_size)
    loader = trainer.open_training_data()
    pace = ElasticBatchSchedule(loader, planned, trainer.global_batch_size, whole)
    # This collective runs even if nothing is resumed: after a rank was lost, ranks are at different places.
    data = trainer.args.data_order(loader)
    if saved is not None:
        check_same_data(data, saved["data"], "start the epoch again with ignore_data_skip=True")
    if trainer.global_batch_size is not None and loader.micro_steps != trainer.args.gradient_accumulation_steps:
        trainer.accumulation_steps_asked = trainer.args.gradient_accumulation_steps
        trainer.args = copy.copy(trainer.args)
        trainer.args.gradient_accumulation_steps = trainer.accumulation_steps_set = loader.micro_steps
        if trainer.world.is_main and trainer.args.global_batch_size is None and not pace.is_slower:
            whose = "this job's" if saved is None else "the checkpoint's"
            print(
                f"training with {whose} global batch of {loader.global_batch_size} samples: "
                f"gradient_accumulation_steps is {loader.micro_steps}"
            )
    if trainer.world.is_main and pace.is_slower:
        print(f"not all ranks of this job are there: training with {pace}")
    return loader, pace


def _begins_its_epoch_anew(args: DataParallelArgumentsBase, saved: Optional[dict[str, Any]]) -> bool:
    """Tell whether ``ignore_data_skip`` restarts the epoch; never when a run continues in place without a lost rank."""
    return args.ignore_data_skip and not (saved or {}).get("in_place", False)


def _global_batch(trainer: Any) -> Optional[int]:
    """Return the global batch size that was set, or an elastic job's at full size; None: other settings decide."""
    full, args = max_world_size(os.environ), trainer.args
    # The batch size of a batched pipeline does not depend on the number of ranks.
    if args.global_batch_size is not None or full is None or is_batched_pipeline(trainer.train_dataset):
        return args.global_batch_size
    share_out = full * trainer.group.world_size // trainer.world.world_size
    return args.train_batch_size * args.gradient_accumulation_steps * share_out


class ResumableLoop:
    """Saves and restores the state of its subclass :class:`~.training_loop.TrainingLoop`, on every rank."""

    trainer: Any
    args: DataParallelArgumentsBase
    loader: Any
    pace: ElasticBatchSchedule
    parts: Run
    train_step: TrainStep
    # Whether trainer.state and the train step already belong to this loop.
    is_set_up = False
    # The state that the loop continues from; None once an update is done.
    resumed_from: Optional[dict[str, Any]]
    agree: ControlAgreement
    position: Position
    grad_norm: Optional[float]
    checkpoint: Optional[dict[str, Any]]

    @property
    def is_complete(self) -> bool:
        """Whether this rank alone has the full state of the last update that it has finished, to continue from."""
        if self.starts_over or not self.is_set_up:
            return self.starts_over
        return not self.train_step.is_updating and not self.train_step.updater.is_divided

    @property
    def starts_over(self) -> bool:
        """Whether the loop continues after a lost rank and has done no update yet: ``resumed_from`` is its state."""
        return self.resumed_from is not None and "pending" in self.resumed_from

    def abandon(self) -> None:
        """Mark this loop's state as invalid: another rank's weights are about to replace its own."""
        self.resumed_from, self.is_set_up = None, False

    def state(self, *, keep: Optional[bool] = None) -> dict[str, Any]:
        """Return the full state of this run, except the model's weights; the same on every rank.

        ``keep`` says whether this rank needs the optimizer's arrays; by default only ranks that save do.
        """
        trainer = self.trainer
        return {
            **self.parts.state(keep=self.args.should_save if keep is None else keep),
            "callbacks": callback_states(trainer.callback_handler.callbacks),
            "data": self.args.data_order(self.loader),
            "settings": self.args.result_settings(),
            "global_batch_size": self.loader.global_batch_size,
            "planned_batch_size": self.pace.planned,
            "is_scaled": self.pace.is_scaled,
            "position": asdict(self.position),
            "flags": dict(self.agree.agreed),
            "trainer_state": asdict(trainer.state),
            "last_logged": trainer._globalstep_last_logged,
            "grad_norm": self.grad_norm,
        }

    def restore(self, saved: dict[str, Any], planned_updates: int) -> bool:
        """Restore a saved run, and return True if it had ended; :meth:`restore_what_begins_undo` restores the rest."""
        trainer = self.trainer
        self.parts.restore(saved)
        load_callback_states(trainer.callback_handler.callbacks, saved["callbacks"])
        trainer.state = TrainerState(**copy.deepcopy(saved["trainer_state"]))
        trainer._globalstep_last_logged = saved["last_logged"]
        self.grad_norm = saved["grad_norm"]
        position, step = Position(**saved["position"]), trainer.state.global_step
        self.position = position.where_to_go_on()
        if _begins_its_epoch_anew(self.args, saved):
            self.position.update = self.position.offset = 0
        else:
            self.position = self.pace.take_up(self.position, saved)
        if trainer.world.is_main:
            warn_of_other_settings(self.args.result_settings(), saved["settings"])
        total = self.pace.total(planned_updates, step, self.position)
        saved["flags"]["should_training_stop"] = self._stays_stopped(saved, total)
        return position.ending_epoch and (saved["flags"]["should_training_stop"] or step >= total)

    def _stays_stopped(self, saved: dict[str, Any], total: int) -> bool:
        """Tell whether a saved stop still holds: an early stopper's does, and any in a job that restarts by itself.

        A user who resumes a run that was stopped by a signal, a time limit or a callback wants it to continue, and so
        does a user who gives a finished run more steps. Prints which case it is.
        """
        state = self.trainer.state
        if not saved["flags"]["should_training_stop"] or state.global_step >= state.max_steps:
            return False
        is_restarted = saved.get("in_place", False) or job_if_restarted(os.environ) is not None
        stopped_early = any(map(has_lost_patience, self.trainer.callback_handler.callbacks))
        if self.trainer.world.is_main and not saved.get("in_place", False):
            where = f"this run was stopped at update {state.global_step} of {total}"
            if stopped_early:
                print(f"{where} by early stopping, and has ended: nothing is left to train", flush=True)
            elif is_restarted:
                print(f"{where}, before its job was restarted, and has ended: nothing is left to train", flush=True)
            else:
                print(f"{where}; it is resumed there, and goes on to its end", flush=True)
        return is_restarted or stopped_early

    def restore_what_begins_undo(self) -> None:
        """Restore random states and stop flags, which ``on_*_begin`` callbacks and reading to the position change."""
        saved, self.checkpoint = self.checkpoint, None
        if saved is not None:
            self.parts.restore_random_state(saved)
            if not saved["position"]["ending_epoch"]:
                for flag in ("should_training_stop", "should_epoch_stop"):
                    setattr(self.trainer.control, flag, saved["flags"][flag])


def save_checkpoint(trainer: Any, model: Any, metrics: Optional[dict[str, float]]) -> None:
    """Write a checkpoint, on the ranks that save; the others return when it is written, or raise the same error."""
    args, state = trainer.args, trainer.state
    folder = Path(args.output_dir)
    path = checkpoint_path(folder, state.global_step)
    trainer.on_checkpoint(path, metrics)
    trainer.store_flos()
    run = None if args.save_only_model else trainer.training_loop.state()

    def write_whole(folder: Path) -> None:
        trainer.save_model(str(folder), _internal_call=True)
        if not any(folder.glob(MODEL_FILES)):
            write_weights(model, folder)

    write_weights_of_all = trainer.whole.model_writer(folder, write_whole, [trainer.processor])

    def write_model(folder: Path) -> None:
        write_weights_of_all(folder)
        state.save_to_json(str(folder / TRAINER_STATE_NAME))

    def write() -> None:
        write_checkpoint(path, run, write_model, trainer.run_id)
        keep = [path, *([Path(state.best_model_checkpoint)] if state.best_model_checkpoint else [])]
        remove_old_checkpoints(folder, args.save_total_limit, keep, trainer.run_id)

    trainer.world.run_on(args.should_save, write, "saving a checkpoint")


def save_parts(trainer: Any, folder: Path) -> None:
    """Write a sharded model as one process would. A collective."""
    write = trainer.whole.model_writer(folder, lambda folder: None, [trainer.processor])
    trainer.world.run_on(trainer.world.is_main, lambda: write(folder), "writing the model")


def save_module(trainer: Any, folder: Path) -> None:
    """Write a model that is not one of the library's, and its tokenizer or processor."""
    folder.mkdir(parents=True, exist_ok=True)
    write_module(trainer.model, folder)
    if trainer.processor is not None:
        trainer.processor.save_pretrained(str(folder))
