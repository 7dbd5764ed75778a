"""What a run leaves behind: a summary on the terminal, report.json, a plot, the model.

Goes in: the trainer after training. Comes out: files that are complete or not
there at all: each is written beside its place and moved into it.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..files import in_place_of

REPORT_FILE, PLOT_FILE, MODEL_FOLDER = "report.json", "training.png", "model"


def write_results(folder: Path, report: dict[str, Any], save_model: Callable[[str], None]) -> None:
    """Write the model, the plot (where matplotlib is installed) and, last, the report."""
    with in_place_of(folder / MODEL_FOLDER) as model_folder:
        save_model(str(model_folder))
    if importlib.util.find_spec("matplotlib") is None:
        print('no plot was drawn, for matplotlib is missing; pip install "mindnlp-dp[quickstart]"')
    else:
        with in_place_of(folder / PLOT_FILE) as plot:
            title = "{num_labels} labels; {world_size} ranks over {backend}, {global_batch_size} samples an update"
            plot_history(report["history"], plot, title.format_map(report))
    with in_place_of(folder / REPORT_FILE) as file:
        file.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def summary(report: dict[str, Any], folder: Path) -> str:
    """The report as the lines that end a run."""
    rows = {
        "world size": report["world_size"],
        "backend": report["backend"],
        "training": f"{report['train_samples_per_second']:.0f} samples/s, {report['steps']} updates "
        f"of {report['global_batch_size']} samples in {report['train_seconds']:.1f} s",
        "gradient sync": f"{100 * report['gradient_sync_share']:.1f} % of the training time",
        "evaluation": f"accuracy {report['eval_accuracy']:.4f}, loss {report['eval_loss']:.4f} "
        f"on {report['eval_samples']} held-out samples, {report['num_labels']} labels",
        "replicas in sync": f"{'yes' if report['replicas_in_sync'] else 'NO'}, digest {report['replica_digest']}",
        "written to": folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder,
    }
    return "\n".join(f"{name:<18}{value}" for name, value in rows.items())


def plot_history(history: list[dict[str, float]], path: Path, title: str) -> None:
    """Loss (training and held-out) and held-out accuracy over the updates, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    def series(key: str) -> tuple[list[float], list[float]]:
        rows = [row for row in history if key in row]
        return [row["step"] for row in rows], [row[key] for row in rows]

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    left.plot(*series("loss"), label="training", color="tab:blue")
    left.plot(*series("eval_loss"), "o-", label="held-out", color="tab:orange")
    left.set(xlabel="update", ylabel="cross entropy", ylim=(0, None), title="loss")
    left.legend(frameon=False)
    right.plot(*series("eval_accuracy"), "o-", color="tab:orange")
    for step, value in zip(*series("eval_accuracy")):
        right.annotate(f"{value:.3f}", (step, value), textcoords="offset points", xytext=(0, 7), ha="center")
    right.set(xlabel="update", ylabel="share of the held-out samples", ylim=(0, 1.05), title="accuracy")
    right.set_xlim(0, right.get_xlim()[1] * 1.05)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120, format="png")
    pyplot.close(figure)
