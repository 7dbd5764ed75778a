"""Writes the page and the picture of ``mindnlp-dp report``.

The page is one HTML file that needs no other file, because styles and plots are embedded. The picture is a PNG file.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

from mindnlp_dp.report.pipeline_figure import caption
from mindnlp_dp.report.runs import RecordedRun, read_runs, speed_up
from mindnlp_dp.runtime.atomic_write import atomic_write
from mindnlp_dp.runtime.printable import printable

CAPTIONS = {
    "loss": "Loss over updates: points are evaluations, thin lines the training loss of all ranks. Runs with the same "
    "global batch do the same updates.",
    "accuracy": "Accuracy on the held-out samples, after each epoch.",
    "loss_over_time": "Loss over wall-clock time, evaluations included.",
    "accuracy_over_time": "Accuracy over wall-clock time, evaluations included.",
    "perplexity": "Perplexity of the held-out samples, after each epoch.",
    "perplexity_over_time": "Perplexity over wall-clock time, evaluations included.",
    "throughput": "Samples per second over all processes, without evaluations.",
}


def run_report(paths: Sequence[Path], output: Optional[Path]) -> int:
    """Write the page and the picture next to it; return the exit code of the command.

    Raises:
        ValueError: A run cannot be read, or ``output`` is not an .html file.
    """
    missing = [name for name in ("matplotlib", "jinja2") if importlib.util.find_spec(name) is None]
    if missing:
        print(f'mindnlp-dp report needs {" and ".join(missing)}; pip install "mindnlp-dp[report]"', file=sys.stderr)
        return 2
    runs = read_runs(paths)
    first = paths[0] if paths[0].is_dir() else paths[0].parent
    output = output or first / "report.html"
    if output.suffix != ".html":
        raise ValueError(f"--output must name a file that ends in .html, got {output}")
    write_report(runs, output)
    print(printable(f"written to {output} and {output.with_suffix('.png')}"))
    return 0


def write_report(runs: Sequence[RecordedRun], output: Path) -> None:
    """Write the page to ``output`` and the picture next to it; each file is written atomically."""
    from mindnlp_dp.report.figures import draw_png

    with atomic_write(output.with_suffix(".png")) as temporary:
        draw_png(temporary, runs, _title(runs))
    with atomic_write(output) as temporary:
        temporary.write_text(render(runs), encoding="utf-8")


def render(runs: Sequence[RecordedRun]) -> str:
    """Return the page as HTML text."""
    import jinja2
    import markupsafe

    from mindnlp_dp.report.figures import draw_svg, panels_for

    stages = next((run.report["pipeline"] for run in runs if "pipeline" in run.report), None)
    captions = {**CAPTIONS, "pipeline": caption(stages) if stages else ""}
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["share"] = lambda value: f"{100 * value:.1f} %"
    environment.filters["duration"] = _duration
    # Names of classes are long, and may be broken after an underscore.
    environment.filters["breakable"] = lambda name: markupsafe.escape(name).replace("_", markupsafe.Markup("_<wbr>"))
    return environment.get_template("page.html").render(
        title=_title(runs),
        runs=runs,
        verdicts=_verdicts(runs),
        figures=[(name, draw_svg(name, runs), captions[name]) for name in panels_for(runs)],
        settings=_settings(runs),
    )


def _title(runs: Sequence[RecordedRun]) -> str:
    report = runs[0].report
    parts = [f"{report['num_labels']} classes"] if "num_labels" in report else []
    if "train_samples" in report:
        parts.append(f"{report['train_samples']:,} training samples")
    return f"Training report: {', '.join(parts)}" if parts else "Training report"


def _verdicts(runs: Sequence[RecordedRun]) -> list[tuple[str, str, str]]:
    """Return what a reader wants to know first: (name, number, meaning) of each."""
    has_accuracy = all("eval_accuracy" in run.report for run in runs)
    best = max(runs, key=lambda run: run.report["eval_accuracy"] if has_accuracy else -run.report["eval_loss"])
    report = best.report
    samples = f" on {report['eval_samples']:,} held-out samples" if "eval_samples" in report else ""
    what, number = "loss", f"{report['eval_loss']:.4f}"
    if has_accuracy:
        what, number = "accuracy", f"{report['eval_accuracy']:.4f}"
    elif "perplexity" in report:
        what, number = "perplexity", f"{report['perplexity']:.2f}"
    shown = [(what, number, f"{best.name},{samples}".rstrip(","))]
    compared = speed_up(runs)
    if compared is not None:
        single, several, factor = compared
        shown.append(("faster", f"{factor:.2f} x", f"{several.name} than {single.name}, in samples per second"))
        key, name = ("eval_accuracy", "accuracy") if has_accuracy else ("eval_loss", "held-out loss")
        gap = several.report[key] - single.report[key]  # type: ignore[literal-required]
        shown.append(("difference", f"{gap:+.4f}", f"in {name}, {several.name} to {single.name}"))
    parallel = [run for run in runs if run.report["world_size"] > 1]
    if parallel:
        agree = all(run.report.get("replicas_in_sync") for run in parallel)
        shares = [run.report.get("gradient_sync_share") or 0.0 for run in parallel]
        shown.append(("communication", f"{100 * max(shares):.1f} %", "of the training time, at most"))
        shown.append(
            ("replicas", "agree", "all processes have bitwise identical weights")
            if agree
            else ("replicas", "DIFFER", "processes have different weights: this was not data-parallel training")
        )
    return shown


def _settings(runs: Sequence[RecordedRun]) -> list[tuple[str, list[Any]]]:
    """Return a row for each setting that all runs have, if the runs differ in it or it is an important one."""
    configs = [run.report.get("config") or {} for run in runs]
    keys = [key for key in configs[0] if all(key in config for config in configs)]
    always = ("model", "learning_rate", "num_epochs", "max_length", "seed")
    rows = []
    for key in keys:
        values = [config[key] for config in configs]
        if (key in always or any(value != values[0] for value in values)) and key != "output_dir":
            rows.append((key, values))
    return rows


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.1f} s"
