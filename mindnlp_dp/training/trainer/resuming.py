"""Resumes a run of the Trainer: loads its checkpoint, opens its data where it continues, restores its state.

Which checkpoint that is, ``choose_run`` (base_trainer.py) decides, from those that checkpoint/directory.py finds;
saving.py has written it.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any, NamedTuple, Optional

from mindnlp_dp.data.dataset_adapter import is_batched_pipeline
from mindnlp_dp.data.loader import IndexedLoader
from mindnlp_dp.parallel.distributed_model import load_checkpoint
from mindnlp_dp.runtime.job_context import job_if_restarted, max_world_size
from mindnlp_dp.training.run_state import Position, Run, check_same_data, warn_of_other_settings
from mindnlp_dp.training.trainer.batch_scaling import ElasticBatchSchedule, batch_of
from mindnlp_dp.training.trainer.best_model import find_best_model
from mindnlp_dp.training.trainer.callbacks import has_stopped_early
from mindnlp_dp.training.trainer.mindnlp_trainer import TrainerState
from mindnlp_dp.training.trainer.trainer_interface import TrainerInterface


def load_run(trainer: TrainerInterface, path: Path) -> dict[str, Any]:
    """Load a checkpoint's weights into the model, and return the state of its run. A collective."""
    saved = load_checkpoint(path, trainer.distributed_model)
    find_best_model(trainer, path, saved)
    return saved


def make_epoch_loader(trainer: TrainerInterface, saved: Optional[dict[str, Any]]) -> tuple[Any, ElasticBatchSchedule]:
    """Return the loader of the training data, and the :class:`.ElasticBatchSchedule` of its batches. A collective.

    When the run ``saved`` is resumed, its global batch size is kept, whatever the number of ranks is now. An elastic
    job keeps the global batch of its full size, unless it scales the batch with the number of ranks. The accumulation
    steps of the loader may then differ from those of the arguments. Raises ValueError if the data is not the saved
    run's, or if a pipeline's batches cannot make up that global batch.
    """
    as_saved, saved = saved, None if trainer.args.ignore_data_skip else saved
    planned = _global_batch(trainer) if saved is None else saved["planned_batch_size"]
    trainer.global_batch_size = None if planned is None else batch_of(planned, trainer.world.world_size)
    loader = trainer.open_training_data()
    batch_schedule = ElasticBatchSchedule(loader, planned, trainer.global_batch_size, as_saved)
    if saved is not None:
        data = trainer.args.data_order(loader)
        check_same_data(data, saved["data"], "start the epoch again with ignore_data_skip=True")
        size = loader.global_batch_size
        if not batch_schedule.is_scaled and size != saved["global_batch_size"]:
            raise ValueError(
                f"the checkpoint's updates have {saved['global_batch_size']} samples, and those of this Trainer's own "
                f"loader have {size}; let it take global_batch_size=trainer.global_batch_size, or start the epoch "
                "again with ignore_data_skip=True"
            )
    given = trainer.args.global_batch_size
    if given is None:
        is_smaller = loader.micro_batch_size < trainer.args.train_batch_size and isinstance(loader, IndexedLoader)
        is_changed = loader.micro_steps != trainer.args.gradient_accumulation_steps or is_smaller
    else:
        is_changed = given != loader.global_batch_size
    is_changed &= trainer.global_batch_size is not None
    if trainer.world.is_main and batch_schedule.is_slower:
        print(f"not all ranks of this job are there: training with {batch_schedule}")
    elif trainer.world.is_main and is_changed:
        whose = "this job's" if saved is None else "the checkpoint's"
        print(
            f"training with {whose} global batch of {loader.global_batch_size} samples: "
            f"gradient_accumulation_steps is {loader.micro_steps}"
        )
    return loader, batch_schedule


def _global_batch(trainer: TrainerInterface) -> Optional[int]:
    """Return the global batch size that was set, or an elastic job's at full size; None: other settings decide."""
    full, args = max_world_size(os.environ), trainer.args
    # The batch size of a batched pipeline does not depend on the number of ranks.
    if args.global_batch_size is not None or full is None or is_batched_pipeline(trainer.train_dataset):
        return args.global_batch_size
    share_out = full * trainer.group.world_size // trainer.world.world_size
    return args.train_batch_size * args.gradient_accumulation_steps * share_out


class ResumedRun(NamedTuple):
    """Where a resumed run continues, its last gradient norm, and whether it had ended."""

    position: Position
    grad_norm: Optional[float]
    is_over: bool


def restore_run(
    trainer: TrainerInterface,
    run: Run,
    batch_schedule: ElasticBatchSchedule,
    saved: dict[str, Any],
    planned_updates: int,
) -> ResumedRun:
    """Restore the optimizer, random states, callbacks and ``trainer.state`` of the run ``saved``. A collective.

    The saved stop flags, which ``on_*_begin`` callbacks may change, are left to the training loop;
    ``saved["flags"]["should_training_stop"]`` is cleared if the run continues.
    """
    run.restore(saved)
    trainer.state = TrainerState(**copy.deepcopy(saved["trainer_state"]))
    trainer.load_callback_states(saved)
    trainer._globalstep_last_logged = saved["last_logged"]
    position, step = Position(**saved["position"]), trainer.state.global_step
    resumed = position.resume_point()
    if trainer.args.ignore_data_skip:
        resumed.update = resumed.offset = 0
    else:
        resumed = batch_schedule.resume(resumed, saved)
    if trainer.world.is_main:
        warn_of_other_settings(trainer.args.result_settings(), saved["settings"])
    total = batch_schedule.total(planned_updates, step, resumed)
    stays_stopped = saved["flags"]["should_training_stop"] = _stays_stopped(trainer, saved, total)
    return ResumedRun(resumed, saved["grad_norm"], position.ending_epoch and (stays_stopped or step >= total))


def _stays_stopped(trainer: TrainerInterface, saved: dict[str, Any], total: int) -> bool:
    """Tell whether a saved stop still holds: an early stopper's does, and any in a job that restarts by itself.

    A user who resumes a run that was stopped by a signal, a time limit or a callback wants it to continue, and so does
    a user who gives a finished run more steps. Prints which case it is.
    """
    state = trainer.state
    if not saved["flags"]["should_training_stop"] or state.global_step >= state.max_steps:
        return False
    is_restarted = job_if_restarted(os.environ) is not None
    stopped_early = any(map(has_stopped_early, trainer.callback_handler.callbacks))
    if trainer.world.is_main:
        where = f"this run was stopped at update {state.global_step} of {total}"
        if stopped_early:
            print(f"{where} by early stopping, and is complete: there is nothing left to train", flush=True)
        elif is_restarted:
            print(f"{where}, before its job was restarted, and is complete: there is nothing left to train", flush=True)
        else:
            print(f"{where}; it is resumed there, and continues to its end", flush=True)
    return is_restarted or stopped_early
