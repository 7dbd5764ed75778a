"""Loads the checkpoint from which the Trainer resumes a run, opens its data where it continues, and writes checkpoints.

Which checkpoint that is, checkpoint/directory.py chooses.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

from mindnlp_dp.checkpoint.collective_save import NewCheckpoint, workspace_in, write_together
from mindnlp_dp.checkpoint.directory import checkpoint_path, remove_old_checkpoints
from mindnlp_dp.checkpoint.manifest import MODEL_FILES
from mindnlp_dp.checkpoint.writer import write_weights
from mindnlp_dp.data.dataset_adapter import is_batched_pipeline
from mindnlp_dp.parallel.distributed_model import load_checkpoint
from mindnlp_dp.runtime import heartbeat
from mindnlp_dp.runtime.adapters import has_adapters
from mindnlp_dp.runtime.job_context import max_world_size
from mindnlp_dp.training.run_state import check_same_data
from mindnlp_dp.training.trainer.batch_scaling import ElasticBatchSchedule, batch_of
from mindnlp_dp.training.trainer.best_model import find_best_model, record_best_model
from mindnlp_dp.training.trainer.mindnlp_trainer import TRAINER_STATE_NAME
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


def save_checkpoint(trainer: TrainerInterface, model: Any, metrics: Optional[dict[str, float]]) -> None:
    """Write a checkpoint, on the ranks that save; the others return when it is written, or raise the same error."""
    args, state = trainer.args, trainer.state
    folder = Path(args.output_dir)
    step = state.global_step
    path = checkpoint_path(folder, step)
    trainer.on_checkpoint(path, metrics)
    trainer.store_flos()
    if args.async_save:
        # The state of one checkpoint is in memory at a time.
        trainer.checkpoint_writer.wait()

    def write_full(folder: Path) -> None:
        trainer.save_model(str(folder), _internal_call=True)
        if not any(folder.glob(MODEL_FILES)):
            write_weights(model, folder)

    def model_writer(workspace: Path) -> Callable[[Path], None]:
        write_model = trainer.distributed_model.model_writer(workspace, write_full, [trainer.processor])

        def write(folder: Path) -> None:
            write_model(folder)
            state.save_to_json(str(folder / TRAINER_STATE_NAME))

        return write

    keep = [path, *([Path(state.best_model_checkpoint)] if state.best_model_checkpoint else [])]
    request = heartbeat.checkpoint_request()

    def then() -> None:
        remove_old_checkpoints(folder, args.save_total_limit, keep, trainer.run_id, step=step)
        if heartbeat.wants_checkpoint():
            print(
                f"wrote {path}, as the launcher asked; to resume from there add --resume to a recipe's command, or "
                "call train(resume_from_checkpoint=True)",
                flush=True,
            )
        heartbeat.has_saved(request)

    run = None
    if not args.save_only_model:
        run = trainer.training_loop.state(sharded=args.sharded_checkpoints)
        record_best_model(run, path)
    write_together(
        NewCheckpoint(
            path, run, model_writer, trainer.run_id, then, gathers_model=trainer.distributed_model.is_sharded
        ),
        trainer.world,
        saves=args.should_save,
        sharded=args.sharded_checkpoints,
        background=trainer.checkpoint_writer if args.async_save else None,
    )


def save_parts(trainer: TrainerInterface, folder: Path) -> None:
    """Write a sharded model as one process would. A collective."""
    with workspace_in(folder, trainer.world) as workspace:
        write = trainer.distributed_model.model_writer(workspace, lambda folder: None, [trainer.processor])
        trainer.world.run_on(trainer.world.is_main, lambda: write(folder), "writing the model")


def save_module(trainer: TrainerInterface, folder: Path) -> None:
    """Write a model that is not one of the library's, and its tokenizer or processor.

    Adapters are written as PeftModel.from_pretrained reads them; of other modules, all weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if has_adapters(trainer.model):
        trainer.model.save_pretrained(str(folder), safe_serialization=trainer.args.save_safetensors)
    elif trainer.args.save_safetensors:
        write_weights(trainer.model, folder)
    else:
        trainer.write_pickled_weights(folder)
    if trainer.processor is not None:
        trainer.processor.save_pretrained(str(folder))
