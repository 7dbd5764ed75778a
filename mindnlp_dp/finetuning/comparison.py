"""Compares runs that differ in their number of ranks: losses, weights, and the time of an update.

``scripts/quickstart.sh --compare`` calls ``python -m mindnlp_dp.finetuning.comparison OUTPUT_DIR RUN RUN...``. Every
run was made with ``--save-initial-model``; the first one is what the others are compared with.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mindnlp_dp.finetuning.results import INITIAL_MODEL_FOLDER
from mindnlp_dp.finetuning.saved_model import MODEL_FOLDER
from mindnlp_dp.report.figures import draw_comparison, ranks
from mindnlp_dp.report.runs import read_runs
from mindnlp_dp.runtime.atomic_write import atomic_write

COMPARISON = "compare"


def compare_runs(folders: Sequence[Path]) -> dict[str, Any]:
    """Return the losses of all runs, the difference of their weights from those of the first run, and times.

    Raises:
        ValueError: a run has no report or no initial model, or the runs do not have the same initial weights, updates
            and global batch size.
    """
    runs = read_runs(folders)
    initial, trained = read_weights(folders[0] / INITIAL_MODEL_FOLDER), read_weights(folders[0] / MODEL_FOLDER)
    changed_by = {name: trained[name] - initial[name] for name in trained}
    first = runs[0].report
    compared = []
    for folder, run in zip(folders, runs):
        for key in ("steps", "global_batch_size"):
            if run.report[key] != first[key]:
                raise ValueError(f"{folder} has {key} {run.report[key]}, and {folders[0]} has {first[key]}")
        if difference(read_weights(folder / INITIAL_MODEL_FOLDER), initial)[0] != 0:
            raise ValueError(f"{folder} and {folders[0]} started from other weights; train both with the same seed")
        largest, norm = difference(read_weights(folder / MODEL_FOLDER), trained)
        steps, losses = run.series("loss")
        compared.append(
            {
                "world_size": run.report["world_size"],
                "steps": steps,
                "losses": losses,
                "eval_loss": run.report["eval_loss"],
                "eval_accuracy": run.report["eval_accuracy"],
                # The fastest line of the log: what else the machine does makes the others slower.
                "seconds_per_update": min(run.series("step_seconds")[1]),
                "largest_weight_difference": largest,
                "relative_weight_difference": norm / _norm(changed_by),
            }
        )
    return {
        "machine": first["machine"],
        "backend": runs[-1].report["backend"],
        "updates": first["steps"],
        "global_batch_size": first["global_batch_size"],
        "largest_weight_change": max(float(np.abs(change).max()) for change in changed_by.values()),
        "runs": compared,
    }


def read_weights(folder: Path) -> dict[str, np.ndarray]:
    """Return the weights in a model's folder by name."""
    from safetensors.numpy import load_file

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} has no *.safetensors; train with --save-initial-model, to the end")
    return {name: array for file in files for name, array in load_file(file).items()}


def difference(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> tuple[float, float]:
    """Return the largest difference of two weights, and the norm of the difference of all."""
    if ours.keys() != theirs.keys():
        raise ValueError(f"the models differ in their weights: {sorted(ours.keys() ^ theirs.keys())[:3]}")
    differences = {name: ours[name] - theirs[name] for name in ours}
    return max(float(np.abs(array).max()) for array in differences.values()), _norm(differences)


def _norm(arrays: dict[str, np.ndarray]) -> float:
    return float(np.sqrt(sum(np.square(array, dtype=np.float64).sum() for array in arrays.values())))


def comparison_text(comparison: dict[str, Any]) -> str:
    """Return the comparison as two tables with a column for each run."""
    runs = comparison["runs"]
    losses = zip(runs[0]["steps"], *(run["losses"] for run in runs))
    rows = {
        "loss, mean until update": [ranks(run["world_size"]) for run in runs],
        **{str(step): [f"{loss:.4f}" for loss in row] for step, *row in losses},
        "": [],
        "accuracy, held-out": [f"{run['eval_accuracy']:.4f}" for run in runs],
        "largest difference of a weight": [f"{run['largest_weight_difference']:.1e}" for run in runs],
        "difference, share of the change": [f"{run['relative_weight_difference']:.1e}" for run in runs],
        "seconds per update": [f"{run['seconds_per_update']:.3f}" for run in runs],
    }
    table = [f"{name:>34}{''.join(f'{cell:>12}' for cell in cells)}".rstrip() for name, cells in rows.items()]
    return "\n".join(
        [
            *table,
            "",
            f"{comparison['updates']} updates of {comparison['global_batch_size']} samples on {comparison['machine']}, "
            "whose cores all ranks share.",
            "Weights are compared with those of the first run. The share is the norm of the difference of all weights,",
            "divided by the norm of their change by training, in which the largest change of a weight is "
            f"{comparison['largest_weight_change']:.1e}.",
        ]
    )


def main(output_dir: Path, folders: Sequence[Path]) -> None:
    """Compare the runs, print the comparison, and write it as compare.json, compare.png and compare.svg."""
    try:
        comparison = compare_runs(folders)
    except ValueError as error:
        sys.exit(f"error: {error}")
    with atomic_write(output_dir / f"{COMPARISON}.json") as file:
        file.write_text(json.dumps(comparison, indent=2) + "\n", encoding="utf-8")
    for kind in ("png", "svg"):
        with atomic_write(output_dir / f"{COMPARISON}.{kind}") as file:
            draw_comparison(file, comparison, kind)
    print(f"\n{comparison_text(comparison)}\n\nwritten to {output_dir}: {COMPARISON}.json, .png and .svg")


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(folder) for folder in sys.argv[2:]])
