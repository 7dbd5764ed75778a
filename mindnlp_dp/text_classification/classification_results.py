"""This module adds what a text classifier's results have to those of every run: accuracy, classes and confusions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindnlp_dp.finetuning import results
from mindnlp_dp.report.runs import RunReport
from mindnlp_dp.text_classification.classification_config import TaskConfig
from mindnlp_dp.text_classification.classification_task import TextClassificationTask

if TYPE_CHECKING:
    from mindnlp_dp.text_classification.classification_recorder import RunRecorder


def make_report(
    trainer: Any, output: Any, recorder: RunRecorder, config: TaskConfig, task: TextClassificationTask
) -> RunReport:
    """Return the report of a run that has ended with an evaluation, by MindNLP's Trainer or by ours. A collective."""
    sizes = {"train_samples": len(task.train["labels"]), "eval_samples": len(task.test["labels"])}
    report = results.make_report(trainer, output, recorder, config, **sizes)
    evaluation = next(row for row in reversed(trainer.state.log_history) if "eval_accuracy" in row)
    report["eval_accuracy"] = evaluation["eval_accuracy"]
    report["eval_macro_f1"] = evaluation["eval_macro_f1"]
    report["num_labels"] = len(task.label_names)
    # An empty list means "no confusions"; a run that has not evaluated leaves the key out.
    if recorder.confusions is not None:
        report["confusions"], report["classes"] = recorder.confusions, recorder.classes
    return report


def write_results(folder: Path, report: RunReport, save_model: Callable[[str], None]) -> None:
    """Write the model, the plot (if matplotlib is installed) and, last, the report."""
    results.write_results(folder, report, save_model, f"{report['num_labels']} labels")


def summary(report: RunReport, folder: Path) -> str:
    """Return the report as the lines that are printed at the end of a run."""
    evaluation = (
        "accuracy {eval_accuracy:.4f}, macro F1 {eval_macro_f1:.4f}, loss {eval_loss:.4f} on {eval_samples} held-out "
        "samples, {num_labels} labels"
    ).format_map(report)
    return results.summary(report, folder, evaluation)
