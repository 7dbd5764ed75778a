"""What a checkpoint holds of the Trainer's loop, and how a run is taken up: its state, and its place in the data."""

from __future__ import annotations

import copy
import os
from dataclasses import asdict
from typing import Any, Optional

from mindnlp_dp.checkpoint.run_state import Position, Run, check_same_data, warn_of_other_settings
from mindnlp_dp.data.source import brings_batches
from mindnlp_dp.launch.environment import full_size, job_if_restarted
from mindnlp_dp.step.train_step import TrainStep
from mindnlp_dp.trainers.control import ControlAgreement

from .arguments import RankArguments
from .batch_scaling import Pace, batch_of
from .callbacks import callback_states, has_lost_patience, load_callback_states
from .library import TrainerState


def open_data(trainer: Any, saved: Optional[dict[str, Any]]) -> tuple[Any, Pace]:
    """The loader; when the run ``saved`` is taken up, with its global batch, whatever the number of ranks is now.

    So has an elastic job the one that all of its ranks would have, unless it scales that with their number. That may
    set other accumulation steps in ``trainer.args``. Raises ValueError when the data is not the run's, or a pipeline's
    own batches do not make up that global batch. A collective.
    """
    whole, saved = saved, None if _begins_its_epoch_anew(trainer.args, saved) else saved
    if trainer.args.gradient_accumulation_steps == trainer.accumulation_steps_set:
        # By an earlier call.
        trainer.args = copy.copy(trainer.args)
        trainer.args.gradient_accumulation_steps = trainer.accumulation_steps_asked
    planned = _global_batch(trainer) if saved is None else saved["planned_batch_size"]
    trainer.global_batch_size = None if planned is None else batch_of(planned, trainer.world.world_size)
    loader = trainer.open_training_data()
    pace = Pace(loader, planned, trainer.global_batch_size, whole)
    # Read on every run: later, when a rank was lost, ranks are at different places.
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


def _begins_its_epoch_anew(args: RankArguments, saved: Optional[dict[str, Any]]) -> bool:
    """As who resumes a run may want it; one that goes on without a lost rank does not."""
    return args.ignore_data_skip and not (saved or {}).get("in_place", False)


def _global_batch(trainer: Any) -> Optional[int]:
    """What was set; of an elastic job, what all of its ranks would have; None: as the other settings make it."""
    full, args = full_size(os.environ), trainer.args
    # Batches that a pipeline brings do not depend on the number of ranks.
    if args.global_batch_size is not None or full is None or brings_batches(trainer.train_dataset):
        return args.global_batch_size
    share_out = full * trainer.group.world_size // trainer.world.world_size
    return args.train_batch_size * args.gradient_accumulation_steps * share_out


class ResumableLoop:
    """The state of a :class:`~.training_loop.TrainingLoop`; every method is called by every rank."""

    trainer: Any
    args: RankArguments
    loader: Any
    pace: Pace
    parts: Run
    train_step: TrainStep
    # Whether trainer.state and the training step are this loop's.
    is_set_up = False
    # The state that it goes on with, until an update is done.
    taken_up: Optional[dict[str, Any]]
    agree: ControlAgreement
    position: Position
    grad_norm: Optional[float]
    checkpoint: Optional[dict[str, Any]]

    @property
    def is_whole(self) -> bool:
        """Whether this rank by itself has the state of the last update that it has finished, to go on from."""
        if self.begins_anew or not self.is_set_up:
            return self.begins_anew
        return not self.train_step.is_updating and not self.train_step.updater.is_divided

    @property
    def begins_anew(self) -> bool:
        """Whether it goes on behind the loss of a rank, and has done nothing yet: ``taken_up`` is its state."""
        return self.taken_up is not None and "pending" in self.taken_up

    def give_up(self) -> None:
        """Its weights are no state any more."""
        self.taken_up, self.is_set_up = None, False

    def state(self, *, keep: Optional[bool] = None) -> dict[str, Any]:
        """All that this run consists of, besides the model's weights; the same on every rank.

        Ranks that do not save do not ``keep`` the optimizer's arrays, unless it is said.
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
        """Take a run up; True when it had come to its end. What a begin would undo waits for its end."""
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
        """Whether a stop that was saved holds: an early stopper's does, and any in a job that restarts by itself.

        Who resumes a run that was stopped by a signal, a time limit or a callback wants it to go on, and so does who
        gives a finished run more steps. Says which it is.
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
        """Random states and stops: callbacks that begin, and reading up to the position, change them."""
        saved, self.checkpoint = self.checkpoint, None
        if saved is not None:
            self.parts.restore_random_state(saved)
            if not saved["position"]["ending_epoch"]:
                for flag in ("should_training_stop", "should_epoch_stop"):
                    setattr(self.trainer.control, flag, saved["flags"][flag])
