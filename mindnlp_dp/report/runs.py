"""Defines the content of a run's report.json, reads and checks such files, and gives the runs distinct names.

``mindnlp-dp report`` calls :func:`read_runs` with the output folders of training or with the files themselves.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, TypedDict


@dataclass(frozen=True)
class RecordedRun:
    """Holds the report of one run.

    Attributes:
        name: distinct name of the run.
        report: the content of its file.
    """

    name: str
    report: RunReport

    def series(self, key: str, over: str = "step") -> tuple[list[float], list[float]]:
        """Return the finite values of ``key`` in the log over "step" or "seconds"; empty if one was not logged."""
        rows = [row for row in self.report["history"] if over in row and math.isfinite(row.get(key, math.nan))]
        return [row[over] for row in rows], [row[key] for row in rows]

    @property
    def processes(self) -> str:
        number = self.report["world_size"]
        return f"{number} processes, {self.report['backend']}" if number > 1 else "one process"


def read_runs(paths: Sequence[Path]) -> list[RecordedRun]:
    """Read the runs in these folders (or files), in this order.

    Raises:
        ValueError: A report is missing, or a file is not a report.
    """
    reports = [_read(path) for path in paths]
    folders = [path.resolve() if path.is_dir() else path.resolve().parent for path in paths]
    names = [folder.name for folder in folders]
    repeated = {name for name, count in Counter(names).items() if count > 1}
    names = [f"{folder.parent.name}/{name}" if name in repeated else name for folder, name in zip(folders, names)]
    return [RecordedRun(name, report) for name, report in zip(names, reports)]


def _read(path: Path) -> RunReport:
    file = path / REPORT_FILE if path.is_dir() else path
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"{file} does not exist; it is written by scripts/finetune.py when a run has ended: give its --output-dir "
            "(a Trainer by itself writes none)"
        ) from None
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    missing = [key for key in NEEDED if not isinstance(report, dict) or key not in report]
    if missing:
        raise ValueError(f"{file} is not the report of a run: it does not have {', '.join(missing)}")
    return report


def speed_up(runs: Sequence[RecordedRun]) -> Optional[tuple[RecordedRun, RecordedRun, float]]:
    """Return the first run of one process, the fastest of several, and the speedup; None unless both exist."""
    single = next((run for run in runs if run.report["world_size"] == 1), None)
    several = [run for run in runs if run.report["world_size"] > 1]
    if single is None or not several or not single.report["train_samples_per_second"]:
        return None
    fastest = max(several, key=lambda run: run.report["train_samples_per_second"])
    return single, fastest, fastest.report["train_samples_per_second"] / single.report["train_samples_per_second"]


REPORT_FILE = "report.json"


class _Needed(TypedDict):
    """Lists the keys that a report must have."""

    world_size: int
    backend: str
    train_samples_per_second: float
    eval_loss: float
    replica_digest: str
    steps: int
    history: list[dict[str, Any]]


class RunReport(_Needed, total=False):
    """Describes the report of one run; the keys below may be missing, for example in a run of another version.

    ``gradient_sync_share`` is the fraction of the training time spent on the gradient exchange, ``peak_memory_bytes``
    the memory of the rank that needs most, on a CPU with its libraries, ``metrics`` those of the run (docs/metrics.md;
    a run of MindNLP's own Trainer has none), ``history`` the lines of the log, each with its
    ``step``, ``confusions`` the classes most often taken for each other, ``classes`` precision, recall and F1 of each
    class, ``config`` the settings, ``pipeline`` the passes of an update through stages if they were traced, and
    ``plan`` the predicted and the measured seconds of an update if the run followed a plan. ``eval_accuracy`` and
    ``eval_macro_f1`` are a classifier's; a language model has ``perplexity``, the
    exponential of ``eval_loss``, and ``samples`` that it generated: for each its ``prompt``, ``completion`` and
    ``expected`` text.
    """

    eval_accuracy: float
    eval_macro_f1: float
    classes: list[dict[str, Any]]
    perplexity: float
    samples: list[dict[str, str]]
    gradient_sync_share: float
    peak_memory_bytes: int
    replicas_in_sync: bool
    replica_digests: list[str]
    train_seconds: float
    train_loss: float
    global_batch_size: int
    train_samples: int
    eval_samples: int
    num_labels: int
    confusions: list[dict[str, Any]]
    command: str
    machine: str
    config: dict[str, Any]
    metrics: dict[str, float]
    pipeline: dict[str, Any]
    plan: dict[str, float]


NEEDED = tuple(_Needed.__annotations__)
