"""This module reports a run's log to TensorBoard, SwanLab or MLflow; MindNLP 0.4's Trainer uses it for ``report_to``.

Only the rank that writes the log reports. A resumed run continues the curves of the run that it resumes, without a step
twice: TensorBoard's files are written again from the log that the checkpoint holds; the other trackers get only the
steps that they do not have. A tracker that fails is dropped with a warning: training continues.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import shutil
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Optional, Protocol, Union

from mindnlp_dp.checkpoint.manifest import RunId
from mindnlp_dp.runtime.atomic_write import atomic_write
from mindnlp_dp.training.trainer.mindnlp_trainer import TrainerCallback


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker needs to know of a run.

    Attributes:
        id: identifies the run; a resumed run keeps it.
        name: a name to show.
        folder: where this run's trackers keep their files.
        settings: the training arguments.
        history: the log up to the update that the run continues from, a dict with ``step`` for each line.
    """

    id: RunId
    name: str
    folder: Path
    settings: Mapping[str, Any]
    history: Sequence[Mapping[str, Any]]


class Tracker(Protocol):
    """Receives the log of one run."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Report the values of one log line."""

    def finish(self) -> None:
        """End the report; nothing is logged after it."""


class TensorBoard:
    """Writes event files by tensorboardX, which needs neither TensorFlow nor PyTorch."""

    def __init__(self, run: TrackedRun) -> None:
        from tensorboardX import SummaryWriter

        folder = run.folder / "tensorboard"
        # Later steps than the checkpoint's may be there.
        shutil.rmtree(folder, ignore_errors=True)
        self._writer = SummaryWriter(str(folder))
        self._writer.add_text("settings", f"```\n{json.dumps(run.settings, indent=2, default=str)}\n```")
        for row in run.history:
            self.log(curves_of(row), row["step"])

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        # A killed process keeps what it has logged.
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()


class SwanLab:
    """Reports to SwanLab; its environment variables, such as ``SWANLAB_MODE``, choose the place and the project."""

    def __init__(self, run: TrackedRun) -> None:
        import swanlab

        self._steps = _LoggedSteps(run.folder / "swanlab.json")
        options: dict[str, Any] = {"id": self._steps.id, "resume": "allow"} if self._steps.id else {}
        self._run = swanlab.init(
            project=os.environ.get("SWANLAB_PROJ_NAME", "mindnlp_dp"), name=run.name, config=_plain(run.settings),
            reinit=True, **options,
        )  # fmt: skip
        self._steps.id = self._run.id
        self._log = swanlab.log
        for row in run.history:
            self.log(curves_of(row), row["step"])

    def log(self, values: Mapping[str, float], step: int) -> None:
        if self._steps.is_new(step, values):
            self._log(dict(values), step=step)

    def finish(self) -> None:
        self._run.finish()


class MLflow:
    """Reports to MLflow; its environment variables, such as ``MLFLOW_TRACKING_URI``, choose the place."""

    def __init__(self, run: TrackedRun) -> None:
        import mlflow

        self._steps = _LoggedSteps(run.folder / "mlflow.json")
        self._client = mlflow.MlflowClient()
        if self._steps.id is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "mindnlp_dp")
            experiment = self._client.get_experiment_by_name(name)
            number = experiment.experiment_id if experiment else self._client.create_experiment(name)
            self._steps.id = self._client.create_run(number, run_name=run.name).info.run_id
            for key, value in _plain(run.settings).items():
                # MLflow refuses longer values.
                self._client.log_param(self._steps.id, key, str(value)[:500])
        else:
            self._client.update_run(self._steps.id, status="RUNNING")
        for row in run.history:
            self.log(curves_of(row), row["step"])

    def log(self, values: Mapping[str, float], step: int) -> None:
        if self._steps.is_new(step, values):
            for name, value in values.items():
                self._client.log_metric(self._steps.id, name, value, step=step)

    def finish(self) -> None:
        self._client.set_terminated(self._steps.id)


class _LoggedSteps:
    """Remembers, in a file, a tracker's id of this run and the last step of each curve that was reported to it."""

    def __init__(self, file: Path) -> None:
        self._file = file
        known = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        self._id: Optional[str] = known.get("id")
        self._last: dict[str, int] = known.get("last_steps", {})

    @property
    def id(self) -> Optional[str]:
        return self._id

    @id.setter
    def id(self, value: str) -> None:
        self._id = value
        self._write()

    def is_new(self, step: int, values: Iterable[str]) -> bool:
        """Return whether a line with these values was not reported yet, and remember it."""
        names = [name for name in values if self._last.get(name, -1) < step]
        if names:
            self._last.update(dict.fromkeys(names, step))
            self._write()
        return bool(names)

    def _write(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(self._file) as file:
            file.write_text(json.dumps({"id": self._id, "last_steps": self._last}), encoding="utf-8")


TRACKERS: dict[str, tuple[Callable[[TrackedRun], Tracker], str]] = {
    "tensorboard": (TensorBoard, "tensorboardX"),
    "swanlab": (SwanLab, "swanlab"),
    "mlflow": (MLflow, "mlflow"),
}


def tracker_names(report_to: Union[str, Sequence[str], None]) -> list[str]:
    """Return the trackers that ``report_to`` names: names, "all" for those that are installed, or "none".

    Raises:
        ValueError: a name is unknown, or its package is not installed.
    """
    names = [report_to] if isinstance(report_to, str) else list(report_to or ())
    names = [part.strip() for name in names for part in name.split(",") if part.strip() not in ("", "none")]
    if names == ["all"]:
        return [name for name, (_, package) in TRACKERS.items() if importlib.util.find_spec(package)]
    for name in names:
        if name not in TRACKERS:
            raise ValueError(f"report_to names {name!r}, expected {', '.join(TRACKERS)}, all or none")
        package = TRACKERS[name][1]
        if importlib.util.find_spec(package) is None:
            raise ValueError(
                f"report_to={name!r} needs the package {package}, which is not installed: pip install {package}"
            )
    return list(dict.fromkeys(names))


def curves_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the curves of a log line, finite numbers only, with the names that Transformers gives them.

    >>> curves_of({"loss": 0.5, "eval_loss": 0.25, "train_loss": 0.75, "step": 3, "note": "a"})
    {'train/loss': 0.5, 'eval/loss': 0.25, 'train/train_loss': 0.75}
    """
    found = {}
    for name, value in row.items():
        if name == "step" or isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            continue
        prefix = next((prefix for prefix in ("eval", "test") if name.startswith(f"{prefix}_")), None)
        found[f"{prefix}/{name.removeprefix(f'{prefix}_')}" if prefix else f"train/{name}"] = float(value)
    return found


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    kinds = (bool, int, float, str, type(None))
    return {name: value if isinstance(value, kinds) else str(value) for name, value in settings.items()}


class TrackerCallback(TrainerCallback):
    """Reports a Trainer's log to trackers, on the rank that writes the log.

    ``run_of`` returns the run's id once ``train()`` has chosen the run.
    """

    def __init__(self, names: Sequence[str], run_of: Callable[[], RunId]) -> None:
        self._names, self._run_of = names, run_of
        self._open: dict[str, Tracker] = {}
        # Evaluations after train() are reported, too: the report ends with the Trainer or the process.
        weakref.finalize(self, _finish_at_exit, self._open)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._finish()
        if not state.is_world_process_zero:
            return
        run, folder = self._run_of(), Path(args.output_dir)
        tracked = TrackedRun(
            run, getattr(args, "run_name", None) or f"{folder.name}-{run.number}", folder / "trackers" / run.name,
            args.to_dict(), list(state.log_history),
        )  # fmt: skip
        tracked.folder.mkdir(parents=True, exist_ok=True)
        for name in self._names:
            self._do(name, partial(self._start, name, tracked))

    def _start(self, name: str, run: TrackedRun) -> None:
        self._open[name] = TRACKERS[name][0](run)

    def on_log(self, args: Any, state: Any, control: Any, logs: Optional[Mapping[str, Any]] = None, **_: Any) -> None:
        values = curves_of(logs or {})
        for name, tracker in list(self._open.items()):
            self._do(name, partial(tracker.log, values, state.global_step))

    def _finish(self) -> None:
        for name, tracker in list(self._open.items()):
            self._do(name, tracker.finish)
        self._open.clear()

    def _do(self, name: str, what: Callable[[], Any]) -> None:
        try:
            what()
        except Exception as error:  # noqa: BLE001
            self._open.pop(name, None)
            warnings.warn(
                f"{name} does not log this run any more: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=3
            )


def _finish_at_exit(trackers: dict[str, Tracker]) -> None:
    for tracker in trackers.values():
        # The library's own handler may have ended the report.
        with contextlib.suppress(Exception):
            tracker.finish()
