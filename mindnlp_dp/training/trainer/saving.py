"""Writes the Trainer's checkpoints, and models that the library's own ``save_model`` cannot write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

from mindnlp_dp.checkpoint.collective_save import NewCheckpoint, workspace_in, write_together
from mindnlp_dp.checkpoint.directory import checkpoint_path, remove_old_checkpoints
from mindnlp_dp.checkpoint.manifest import MODEL_FILES
from mindnlp_dp.checkpoint.writer import write_weights
from mindnlp_dp.runtime import heartbeat
from mindnlp_dp.runtime.adapters import has_adapters
from mindnlp_dp.training.trainer.best_model import record_best_model
from mindnlp_dp.training.trainer.mindnlp_trainer import TRAINER_STATE_NAME
from mindnlp_dp.training.trainer.trainer_interface import TrainerInterface


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
