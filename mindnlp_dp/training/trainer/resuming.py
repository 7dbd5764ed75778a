"""This module writes what the Trainer saves, and opens the data where a resumed run continues."""

from __future__ import annotations

import copy
import math
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

from mindnlp_dp.checkpoint.collective_save import NewCheckpoint, workspace_in, write_together
from mindnlp_dp.checkpoint.directory import checkpoint_path, remove_old_checkpoints
from mindnlp_dp.checkpoint.manifest import MODEL_FILES, run_of
from mindnlp_dp.checkpoint.writer import write_module, write_weights
from mindnlp_dp.data.dataset_adapter import is_batched_pipeline
from mindnlp_dp.parallel.replicated_model import load_checkpoint
from mindnlp_dp.runtime import heartbeat
from mindnlp_dp.runtime.job_context import max_world_size
from mindnlp_dp.training.run_state import check_same_data
from mindnlp_dp.training.trainer.arguments import DataParallelArgumentsBase
from mindnlp_dp.training.trainer.batch_scaling import ElasticBatchSchedule, batch_of
from mindnlp_dp.training.trainer.mindnlp_trainer import TRAINER_STATE_NAME


def make_epoch_loader(trainer: Any, saved: Optional[dict[str, Any]]) -> tuple[Any, ElasticBatchSchedule]:
    """Return the loader of the training data, and the :class:`.ElasticBatchSchedule` of its batches. A collective.

    When the run ``saved`` is resumed, its global batch size is kept, whatever the number of ranks is now. An elastic
    job keeps the global batch of its full size, unless it scales the batch with the number of ranks. This may change
    the accumulation steps in ``trainer.args``. Raises ValueError if the data is not the saved run's, or if a pipeline's
    batches cannot make up that global batch.
    """
    whole, saved = saved, None if restarts_epoch(trainer.args, saved) else saved
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


def load_run(trainer: Any, path: Path) -> dict[str, Any]:
    """Load a checkpoint's weights into the model, and return the state of its run. A collective."""
    saved = load_checkpoint(path, trainer.whole)
    _find_best_model(trainer, path, saved["trainer_state"])
    return saved


# The best checkpoint. A checkpoint knows it by its name if it is in the same folder, so that the folder can be moved
# or copied, and by its path if the run had begun in another folder. Checkpoints of earlier versions have a path only.


def _find_best_model(trainer: Any, path: Path, state: dict[str, Any]) -> None:
    """Set the path of the best checkpoint, or forget it if it is not there any more, with a warning. A collective."""
    recorded, value = state["best_model_checkpoint"], state["best_metric"]
    if recorded is not None:

        def find() -> Optional[Path]:
            beside = path.parent / Path(recorded).name
            is_beside = Path(recorded).name == recorded or run_of(beside) == run_of(path)
            best = beside if is_beside else Path(recorded)
            return best if any(best.glob(MODEL_FILES)) else None

        best = trainer.world.run_on_rank0(find, "looking for the best checkpoint")
        if best is None and trainer.world.is_main:
            warnings.warn(
                f"{recorded}, the best checkpoint so far ({trainer.args.metric_for_best_model}: {value}), is not in "
                f"{path.parent} any more: the best of the next ones counts",
                RuntimeWarning,
                stacklevel=3,
            )
        if best is None:
            forget_best_model(state)
        else:
            state["best_model_checkpoint"] = str(best)
    # NaN was the best metric in checkpoints of earlier versions.
    if value is not None and math.isnan(value):
        forget_best_model(state)


def holds_weights(trainer: Any, folder: Path) -> bool:
    """Tell whether ``folder`` holds the weights of a model. A collective."""
    found: bool = trainer.world.run_on_rank0(lambda: any(folder.glob(MODEL_FILES)), "looking for the best checkpoint")
    return found


def forget_best_model(state: dict[str, Any]) -> None:
    """Reset what a Trainer's state, as a dict, says about the best model."""
    for name in ("best_model_checkpoint", "best_metric", "best_global_step"):
        if name in state:
            state[name] = None


def _recorded_best(best: Optional[str], folder: Path) -> Optional[str]:
    """Return what a checkpoint in ``folder`` records of the best one: its name if it is in the same folder."""
    if best is None:
        return None
    path = Path(os.path.abspath(best))
    return path.name if path.parent.resolve() == folder.resolve() else str(path)


def restarts_epoch(args: DataParallelArgumentsBase, saved: Optional[dict[str, Any]]) -> bool:
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


def save_checkpoint(trainer: Any, model: Any, metrics: Optional[dict[str, float]]) -> None:
    """Write a checkpoint, on the ranks that save; the others return when it is written, or raise the same error."""
    args, state = trainer.args, trainer.state
    folder = Path(args.output_dir)
    path = checkpoint_path(folder, state.global_step)
    trainer.on_checkpoint(path, metrics)
    trainer.store_flos()
    if args.async_save:
        # The state of one checkpoint is in memory at a time.
        trainer.checkpoint_writer.wait()

    def write_whole(folder: Path) -> None:
        trainer.save_model(str(folder), _internal_call=True)
        if not any(folder.glob(MODEL_FILES)):
            write_weights(model, folder)

    def model_writer(workspace: Path) -> Callable[[Path], None]:
        write_model = trainer.whole.model_writer(workspace, write_whole, [trainer.processor])

        def write(folder: Path) -> None:
            write_model(folder)
            state.save_to_json(str(folder / TRAINER_STATE_NAME))

        return write

    keep = [path, *([Path(state.best_model_checkpoint)] if state.best_model_checkpoint else [])]
    request = heartbeat.checkpoint_request()

    def then() -> None:
        remove_old_checkpoints(folder, args.save_total_limit, keep, trainer.run_id)
        heartbeat.has_saved(request)

    run = None
    if not args.save_only_model:
        run = trainer.training_loop.state(sharded=args.sharded_checkpoints)
        run["trainer_state"]["best_model_checkpoint"] = _recorded_best(state.best_model_checkpoint, folder)
    write_together(
        NewCheckpoint(path, run, model_writer, trainer.run_id, then, gathers_model=trainer.whole.is_sharded),
        trainer.world,
        saves=args.should_save,
        sharded=args.sharded_checkpoints,
        background=trainer.checkpoint_writer if args.async_save else None,
    )


def save_parts(trainer: Any, folder: Path) -> None:
    """Write a sharded model as one process would. A collective."""
    with workspace_in(folder, trainer.world) as workspace:
        write = trainer.whole.model_writer(workspace, lambda folder: None, [trainer.processor])
        trainer.world.run_on(trainer.world.is_main, lambda: write(folder), "writing the model")


def save_module(trainer: Any, folder: Path) -> None:
    """Write a model that is not one of the library's, and its tokenizer or processor."""
    folder.mkdir(parents=True, exist_ok=True)
    write_module(trainer.model, folder)
    if trainer.processor is not None:
        trainer.processor.save_pretrained(str(folder))
