"""This module finds the best checkpoint again when a run is resumed, or forgets it; the Trainer and its loop call it.

A checkpoint records the path of the best one, and the hashes of its weights. It is looked for by its name in the folder
that the run is resumed from, which may have been moved or copied, and then by its path.
"""

from __future__ import annotations

import math
import os
import warnings
from pathlib import Path
from typing import Any, Optional

from mindnlp_dp.checkpoint.manifest import MODEL_FILES, hashes_of_weights
from mindnlp_dp.training.trainer.trainer_interface import TrainerInterface


def find_best_model(trainer: TrainerInterface, path: Path, saved: dict[str, Any]) -> None:
    """Set the path of the best checkpoint, or forget it if it is not there any more, with a warning. A collective."""
    state = saved["trainer_state"]
    recorded, value = state["best_model_checkpoint"], state["best_metric"]
    if recorded is not None:

        def find() -> Optional[Path]:
            # Another run may have replaced a checkpoint of this name. Without hashes, it is this checkpoint itself.
            wanted = saved.get("best_weights") or hashes_of_weights(path)
            candidates = [path.parent / Path(recorded).name, Path(recorded)]
            return next((best for best in candidates if hashes_of_weights(best) == wanted), None)

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


def holds_weights(trainer: TrainerInterface, folder: Path) -> bool:
    """Tell whether ``folder`` holds the weights of a model. A collective."""
    found: bool = trainer.world.run_on_rank0(lambda: any(folder.glob(MODEL_FILES)), "looking for the best checkpoint")
    return found


def forget_best_model(state: dict[str, Any]) -> None:
    """Reset what a Trainer's state, as a dict, says about the best model."""
    for name in ("best_model_checkpoint", "best_metric", "best_global_step"):
        if name in state:
            state[name] = None


def record_best_model(run: dict[str, Any], path: Path) -> None:
    """Record in the state of a run, which is saved to ``path``, how the best checkpoint is found again."""
    state = run["trainer_state"]
    best = state["best_model_checkpoint"]
    run["best_weights"] = None
    if best is not None:
        state["best_model_checkpoint"] = os.path.abspath(best)
        run["best_weights"] = None if Path(best) == path else hashes_of_weights(Path(best))
