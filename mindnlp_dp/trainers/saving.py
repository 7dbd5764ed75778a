"""This module writes what the Trainers save: a checkpoint of the run, or the model alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Optional

from mindnlp_dp.checkpoint.folders import checkpoint_path, remove_old_checkpoints
from mindnlp_dp.checkpoint.manifest import MODEL_FILES
from mindnlp_dp.checkpoint.write import write_checkpoint, write_module, write_weights

from .library import TRAINER_STATE_NAME


def save_checkpoint(trainer: Any, model: Any, metrics: Optional[dict[str, float]]) -> None:
    """Write a checkpoint, on the ranks that save; the others return when it is written, or raise the same error."""
    args, state = trainer.args, trainer.state
    folder = Path(args.output_dir)
    path = checkpoint_path(folder, state.global_step)
    trainer.note_checkpoint(path, metrics)
    trainer.store_flos()
    run = None if args.save_only_model else trainer.training_loop.state()

    def write_whole(folder: Path) -> None:
        trainer.save_model(str(folder), _internal_call=True)
        if not any(folder.glob(MODEL_FILES)):
            write_weights(model, folder)

    write_weights_of_all = trainer.whole.model_writer(folder, write_whole, [trainer.beside_model])

    def write_model(folder: Path) -> None:
        write_weights_of_all(folder)
        state.save_to_json(str(folder / TRAINER_STATE_NAME))

    def write() -> None:
        write_checkpoint(path, run, write_model, trainer.run_id)
        keep = [path, *([Path(state.best_model_checkpoint)] if state.best_model_checkpoint else [])]
        remove_old_checkpoints(folder, args.save_total_limit, keep, trainer.run_id)

    trainer.world.call_where(args.should_save, write, "saving a checkpoint")


def save_parts(trainer: Any, folder: Path) -> None:
    """Write a sharded model as one process would. A collective."""
    write = trainer.whole.model_writer(folder, lambda folder: None, [trainer.beside_model])
    trainer.world.call_where(trainer.world.is_main, lambda: write(folder), "writing the model")


def save_module(trainer: Any, folder: Path) -> None:
    """Write a model that is not one of the library's, and its tokenizer or processor."""
    folder.mkdir(parents=True, exist_ok=True)
    write_module(trainer.model, folder)
    if trainer.beside_model is not None:
        trainer.beside_model.save_pretrained(str(folder))
