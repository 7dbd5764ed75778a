"""This module finds the best checkpoint again when a run is resumed, or forgets it; the Trainer and its loop call it.

A checkpoint records the best one by its name if both are in the same folder, so that the folder can be moved or copied,
and by its path if the run had begun in another folder. Checkpoints of earlier versions have paths only.
"""

from __future__ import annotations

import math
import os
import warnings
from pathlib import Path
from typing import Any, Optional

from mindnlp_dp.checkpoint.manifest import MODEL_FILES, run_of
from mindnlp_dp.parallel.replicated_model import load_checkpoint


def load_run(trainer: Any, path: Path) -> dict[str, Any]:
    """Load a checkpoint's weights into the model, and return the state of its run. A collective."""
    saved = load_checkpoint(path, trainer.whole)
    _find_best_model(trainer, path, saved["trainer_state"])
    return saved


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


def recorded_best(best: Optional[str], folder: Path) -> Optional[str]:
    """Return what a checkpoint in ``folder`` records of the best one: its name if it is in the same folder."""
    if best is None:
        return None
    path = Path(os.path.abspath(best))
    return path.name if path.parent.resolve() == folder.resolve() else str(path)
