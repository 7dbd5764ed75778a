"""Loads the checkpoint from which the Trainer resumes a run, and opens its data where it continues.

Which checkpoint that is, checkpoint/directory.py chooses; saving.py has written it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Optional

from mindnlp_dp.data.dataset_adapter import is_batched_pipeline
from mindnlp_dp.parallel.distributed_model import load_checkpoint
from mindnlp_dp.runtime.job_context import max_world_size
from mindnlp_dp.training.run_state import check_same_data
from mindnlp_dp.training.trainer.batch_scaling import ElasticBatchSchedule, batch_of
from mindnlp_dp.training.trainer.best_model import find_best_model
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
    is_derived = trainer.global_batch_size is not None and trainer.args.global_batch_size is None
    is_changed = is_derived and loader.micro_steps != trainer.args.gradient_accumulation_steps
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
