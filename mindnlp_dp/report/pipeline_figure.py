"""Draws what each stage of a pipeline did when in one update, next to the ideal pipeline.

``scripts/finetune.py`` reads the passes from the trace of a run (:mod:`mindnlp_dp.training.timeline`); the report draws
them and states the fraction of the time that stages were idle.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any, Optional

from mindnlp_dp.pipeline_schedules.schedules import BACKWARD, FORWARD, ideal_bubble
from mindnlp_dp.pipeline_schedules.simulation import simulate_pipeline

# A pass: kind, micro-batch, start and end in milliseconds since the first pass.
Pass = tuple[str, int, float, float]

_COLORS = {FORWARD: "#0072B2", BACKWARD: "#E69F00"}


def pipeline_of(trace: Path, schedule: str) -> Optional[dict[str, Any]]:
    """Return the schedule, and the passes by stage of the update of median length; None without several stages."""
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    updates: dict[int, dict[int, dict[int, list[Pass]]]] = {}
    for event in events:
        details = event.get("args", {})
        if event.get("name") in (FORWARD, BACKWARD) and "stage" in details:
            stages = updates.setdefault(details["step"], {}).setdefault(details["stage"], {})
            began, ended = event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3
            stages.setdefault(event["pid"], []).append((event["name"], details["micro_step"], began, ended))
    if not updates or max(map(len, updates.values())) < 2:
        return None
    # Use the first of several rows of stages: one rank per stage.
    rows = [[min(stages[stage].items())[1] for stage in sorted(stages)] for stages in updates.values()]
    row = sorted(rows, key=_length)[len(rows) // 2]
    zero = min(span[2] for passes in row for span in passes)
    stages_ = [[(kind, number, began - zero, ended - zero) for kind, number, began, ended in passes] for passes in row]
    return {"schedule": schedule, "stages": stages_}


def _length(row: list[list[Pass]]) -> float:
    spans = [span for passes in row for span in passes]
    return max(span[3] for span in spans) - min(span[2] for span in spans)


def bubble(stages: list[list[Pass]]) -> float:
    """Return the fraction of an update that its stages were idle, from the first pass to the last one.

    >>> bubble([[("forward", 0, 0, 1), ("backward", 0, 3, 4)], [("forward", 0, 1, 2), ("backward", 0, 2, 3)]])
    0.5
    """
    busy = sum(ended - began for passes in stages for _, _, began, ended in passes)
    return 1 - busy / (len(stages) * _length(stages))


def caption(pipeline: dict[str, Any]) -> str:
    """Return a caption for the diagram."""
    stages = pipeline["stages"]
    num_micro_batches = len(stages[0]) // 2
    return (
        f"One update of {num_micro_batches} micro-batches through {len(stages)} stages ({pipeline['schedule']}): they "
        f"were idle for {100 * bubble(stages):.1f} % of it. The ideal, below, has equal stages and no communication "
        f"time: {100 * ideal_bubble(len(stages), num_micro_batches):.1f} %."
    )


def draw_pipeline(axes: Any, pipeline: dict[str, Any]) -> None:
    """Draw the measured update above the ideal one, on the same time axis."""
    stages = pipeline["stages"]
    num = len(stages)
    seconds = {
        kind: statistics.fmean(span[3] - span[2] for passes in stages for span in passes if span[0] == kind)
        for kind in (FORWARD, BACKWARD)
    }
    equal = {kind: [seconds[kind]] * num for kind in seconds}
    ideal_run = simulate_pipeline(equal[FORWARD], equal[BACKWARD], len(stages[0]) // 2, pipeline["schedule"])
    ideal = [[(e.kind, e.number, e.began, e.ended) for e in ideal_run.of_stage(stage)] for stage in range(num)]
    longest = max(_length(stages), _length(ideal))
    for place, passes in enumerate([*stages, *ideal]):
        y = place + (0.6 if place >= num else 0.0)
        for kind, number, began, ended in passes:
            axes.barh(y, ended - began, left=began, height=0.9, color=_COLORS[kind], edgecolor="white", linewidth=0.6)
            if ended - began > 0.02 * longest:
                axes.text((began + ended) / 2, y, str(number), ha="center", va="center", fontsize=7, color="white")
    names = [*(f"stage {number}" for number in range(num)), *(f"ideal {number}" for number in range(num))]
    axes.set_yticks([place + (0.6 if place >= num else 0.0) for place in range(2 * num)], names)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set(xlabel="milliseconds (blue: forward, orange: backward, numbers: micro-batches)", title="pipeline")
