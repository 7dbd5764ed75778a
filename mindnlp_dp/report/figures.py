"""Draws the plots of a report with matplotlib: one SVG per panel for the page, and one PNG with all panels.

A run has the same color and the same dashes in all plots, so that runs can be told apart in gray as well.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Optional

from mindnlp_dp.report.pipeline_figure import draw_pipeline
from mindnlp_dp.report.runs import RecordedRun

# The colors of Okabe and Ito, which color-blind readers can tell apart.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("-", "--", "-.", ":")
_INK, _GRID = "#333333", "#dddddd"
_OVER = {"step": "", "seconds": " over time"}
# Of a perplexity; larger losses are drawn as if they were this one.
_LARGEST_EXPONENT = 80.0

Panel = Callable[[Any, Sequence[RecordedRun]], None]


def losses(axes: Any, runs: Sequence[RecordedRun], over: str) -> None:
    """Draw the training loss (thin) and held-out loss of every run, over "step" or "seconds"."""
    scale, unit = _unit(runs, over)
    for place, run in enumerate(runs):
        color, dashes = _COLORS[place % len(_COLORS)], _DASHES[place % len(_DASHES)]
        at, values = run.series("loss", over)
        axes.plot([scale * x for x in at], values, color=color, linestyle=dashes, linewidth=0.9, alpha=0.55)
        at, values = run.series("eval_loss", over)
        axes.plot([scale * x for x in at], values, "o", color=color, linestyle=dashes, markersize=4, label=run.name)
    axes.set(ylim=(0, _end(1.06 * axes.dataLim.ymax)), xlim=(0, _end(1.04 * axes.dataLim.xmax)))
    axes.set(xlabel=unit, ylabel="cross entropy (thin: training)", title="loss" + _OVER[over])
    _name_runs(axes, runs)


def _name_runs(axes: Any, runs: Sequence[RecordedRun]) -> None:
    """Add a legend; a single run's only label goes beside the title, where it hides no point."""
    if len(runs) > 1:
        axes.legend(frameon=False, loc="best")
    else:
        # matplotlib hides labels that begin with an underscore.
        labels = axes.get_legend_handles_labels()[1] or [runs[0].name]
        axes.set_title(labels[0], loc="right", fontweight="normal")


def _end(value: float) -> Optional[float]:
    """Return the end of an axis from 0; None, matplotlib's own choice, if there is nothing to draw on it."""
    return value if math.isfinite(value) and value > 0 else None


def accuracies(axes: Any, runs: Sequence[RecordedRun], over: str) -> None:
    """Draw the held-out accuracy of every run, over "step" or "seconds"."""
    scale, unit = _unit(runs, over)
    for place, run in enumerate(runs):
        color, dashes = _COLORS[place % len(_COLORS)], _DASHES[place % len(_DASHES)]
        at, values = run.series("eval_accuracy", over)
        label = f"{run.name}: {values[-1]:.4f}" if values else run.name
        axes.plot([scale * x for x in at], values, "o", color=color, linestyle=dashes, markersize=4, label=label)
    axes.set(ylim=(0, 1.02), xlim=(0, _end(1.04 * axes.dataLim.xmax)))
    axes.set(xlabel=unit, ylabel="share of correct held-out samples", title="accuracy" + _OVER[over])
    _name_runs(axes, runs)


def perplexities(axes: Any, runs: Sequence[RecordedRun], over: str) -> None:
    """Draw the held-out perplexity of every run, over "step" or "seconds"."""
    from matplotlib import ticker

    scale, unit = _unit(runs, over)
    for place, run in enumerate(runs):
        color, dashes = _COLORS[place % len(_COLORS)], _DASHES[place % len(_DASHES)]
        at, losses_ = run.series("eval_loss", over)
        values = [math.exp(min(loss, _LARGEST_EXPONENT)) for loss in losses_]
        label = f"{run.name}: {values[-1]:.2f}" if values else run.name
        axes.plot([scale * x for x in at], values, "o", color=color, linestyle=dashes, markersize=4, label=label)
    axes.set(yscale="log", xlim=(0, _end(1.04 * axes.dataLim.xmax)))
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    axes.set(xlabel=unit, ylabel="perplexity of the held-out samples", title="perplexity" + _OVER[over])
    _name_runs(axes, runs)


def throughput(axes: Any, runs: Sequence[RecordedRun]) -> None:
    """Draw a bar per run with its samples per second; the hatched part is the fraction spent on communication."""
    rates = [run.report["train_samples_per_second"] for run in runs]
    shares = [run.report.get("gradient_sync_share") or 0.0 for run in runs]
    places = range(len(runs))
    for place, rate, share in zip(places, rates, shares):
        color = _COLORS[place % len(_COLORS)]
        axes.barh(place, rate * (1 - share), color=color, height=0.6)
        axes.barh(place, rate * share, left=rate * (1 - share), height=0.6, facecolor="white", edgecolor=color,
                  hatch="////")  # fmt: skip
        axes.annotate(f" {rate:.0f}", (rate, place), va="center")
    axes.set_yticks(places, [run.name for run in runs])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(rates, default=1.0) or 1.0)
    axes.grid(axis="y", visible=False)
    axes.set(xlabel="samples per second (hatched: share of communication)", title="throughput")


def pipelines(axes: Any, runs: Sequence[RecordedRun]) -> None:
    """Draw the pipeline of the first run that has a traced one."""
    draw_pipeline(axes, next(run.report["pipeline"] for run in runs if "pipeline" in run.report))


PANELS: dict[str, Panel] = {
    "loss": partial(losses, over="step"),
    "accuracy": partial(accuracies, over="step"),
    "perplexity": partial(perplexities, over="step"),
    "loss_over_time": partial(losses, over="seconds"),
    "perplexity_over_time": partial(perplexities, over="seconds"),
    "accuracy_over_time": partial(accuracies, over="seconds"),
    "throughput": throughput,
    "pipeline": pipelines,
}


def panels_for(runs: Sequence[RecordedRun]) -> list[str]:
    """Return the panels that these runs have data for; runs of older versions did not log their time."""
    timed = any(run.series("eval_loss", "seconds")[0] for run in runs)
    lacks = {
        "pipeline": not any("pipeline" in run.report for run in runs),
        "accuracy": not any("eval_accuracy" in run.report for run in runs),
        "perplexity": not any("perplexity" in run.report for run in runs),
    }
    kinds = {name: name.removesuffix("_over_time") for name in PANELS}
    return [name for name in PANELS if (timed or kinds[name] == name) and not lacks.get(kinds[name], False)]


def num_stages(runs: Sequence[RecordedRun]) -> int:
    """Return the number of pipeline stages of these runs."""
    return next((len(run.report["pipeline"]["stages"]) for run in runs if "pipeline" in run.report), 0)


def draw_svg(name: str, runs: Sequence[RecordedRun]) -> str:
    """Draw one panel, and return it as an ``<svg>`` element that scales with its container."""
    height = 0.8 + 0.45 * len(runs) if name == "throughput" else 3.2
    if name == "pipeline":
        height = 1.0 + 0.5 * num_stages(runs)
    with _figure(figsize=(5.4, max(height, 1.6))) as figure:
        PANELS[name](figure.subplots(), runs)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def draw_png(path: Path, runs: Sequence[RecordedRun], title: str) -> None:
    """Draw all panels into one PNG file."""
    names = panels_for(runs)
    curves = [name for name in names if name not in ("throughput", "pipeline")]
    rows = len(curves) // 2
    heights = [*[3.2] * rows, 0.5 + 0.35 * len(runs)]
    heights += [1.0 + 0.5 * num_stages(runs)] * ("pipeline" in names)
    with _figure(figsize=(10, sum(heights) + 0.4)) as figure:
        grid = figure.add_gridspec(len(heights), 2, height_ratios=heights)
        for number, name in enumerate(curves):
            PANELS[name](figure.add_subplot(grid[number // 2, number % 2]), runs)
        for number, name in enumerate(name for name in names if name not in curves):
            PANELS[name](figure.add_subplot(grid[rows + number, :]), runs)
        figure.suptitle(title, fontsize=12)
        figure.savefig(path, format="png", dpi=130)


def ranks(number: int) -> str:
    """Return the number of ranks as it is shown.

    >>> ranks(1), ranks(2)
    ('1 process', '2 ranks')
    """
    return "1 process" if number == 1 else f"{number} ranks"


def draw_comparison(path: Path, comparison: dict[str, Any], file_format: str) -> None:
    """Draw the losses of runs on different numbers of ranks over each other, and the time per update beside them."""
    runs = comparison["runs"]
    names = [ranks(run["world_size"]) for run in runs]
    with _figure(figsize=(9, 3.4)) as figure:
        curves, bars = figure.subplots(1, 2, width_ratios=(3, 2))
        for place, (name, run) in enumerate(zip(names, runs)):
            # The curves lie on each other: each next one is thinner, and the last one is points.
            is_last = place == len(runs) - 1
            style = {"marker": "o", "markersize": 3.5, "linestyle": ""} if is_last else {"linewidth": 7 - 5 * place}
            curves.plot(run["steps"], run["losses"], color=_COLORS[place], alpha=0.45 if place == 0 else 1, label=name,
                        **style)  # fmt: skip
            seconds = run["seconds_per_update"]
            bars.barh(place, 1000 * seconds, color=_COLORS[place], alpha=0.45 if place == 0 else 1, height=0.6)
            bars.annotate(f" {1000 * seconds:.0f}", (1000 * seconds, place), va="center")
        curves.set(ylim=(0, None), xlim=(0, None), xlabel="update", ylabel="training loss")
        curves.set_title("the same losses")
        curves.legend(frameon=False, loc="lower left")
        largest = max(abs(a - b) for run in runs for a, b in zip(run["losses"], runs[0]["losses"]))
        of_weights = max(run["largest_weight_difference"] for run in runs)
        text = f"largest difference of a loss: {largest:.4f}\nof a weight, after training: {of_weights:.4f}"
        curves.text(0.98, 0.97, text, transform=curves.transAxes, ha="right", va="top")
        bars.set_yticks(range(len(runs)), names)
        bars.invert_yaxis()
        bars.set_xlim(0, 1.18e3 * max(run["seconds_per_update"] for run in runs))
        bars.grid(axis="y", visible=False)
        bars.set(xlabel=f"milliseconds ({comparison['machine'].partition(', Python')[0]})")
        bars.set_title("time per update")
        options = {"metadata": {"Date": None, "Creator": None}} if file_format == "svg" else {"dpi": 130}
        figure.savefig(path, format=file_format, **options)


@contextmanager
def _figure(**options: Any) -> Iterator[Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style = {
        "font.size": 9, "axes.titlesize": 10, "axes.titleweight": "bold", "axes.titlelocation": "left",
        "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": _GRID,
        "grid.linewidth": 0.6, "axes.edgecolor": _INK, "text.color": _INK, "axes.labelcolor": _INK,
        "xtick.color": _INK, "ytick.color": _INK, "axes.axisbelow": True, "svg.hashsalt": "mindnlp_dp",
        # Labels of datasets may be Chinese.
        "font.family": ["DejaVu Sans", "Noto Sans CJK SC", "sans-serif"],
        # Names of folders and labels may contain two dollar signs.
        "text.parse_math": False,
    }  # fmt: skip
    with matplotlib.rc_context(style):
        import logging

        # A missing font is replaced by another one; the warning is not useful.
        logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
        figure = pyplot.figure(layout="constrained", **options)
        try:
            yield figure
        finally:
            pyplot.close(figure)


def _unit(runs: Sequence[RecordedRun], over: str) -> tuple[float, str]:
    """Return the factor for values on this axis, and the axis label."""
    if over == "step":
        return 1.0, "update"
    longest = max((seconds for run in runs for seconds in run.series("eval_loss", over)[0]), default=0.0)
    return (1.0, "seconds since the start") if longest < 300 else (1 / 60, "minutes since the start")
