"""This module prints the log of a recipe's run as lines of one width, in place of the library's dictionaries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional

from mindnlp_dp.training.trainer.mindnlp_trainer import PrinterCallback, ProgressCallback

# The metrics of an update, in the order of a line: their names there, and their formats.
_OF_UPDATE = {
    "loss": "loss {:8.4f}",
    "grad_norm": "norm {:8.3f}",
    "learning_rate": "rate {:8.2e}",
    "samples_per_second": "{:7.0f} samples/s",
}
# The times of an evaluation are in the report.
_LEFT_OUT = ("_runtime", "_per_second", "epoch", "_seconds")


def log_line(logs: Mapping[str, float], step: int, num_steps: int) -> Optional[str]:
    """Return a record of the log as a line; None for the record at the end, which the summary repeats.

    >>> log_line({"loss": 0.51, "grad_norm": 1, "learning_rate": 2e-3, "epoch": 0.5}, 7, 100)
    'update   7/100  epoch   0.50  loss   0.5100  norm    1.000  rate 2.00e-03'
    """
    if "train_runtime" in logs:
        return None
    start = [f"update {step:>{len(str(num_steps))}}/{num_steps}", f"epoch {logs.get('epoch', 0.0):6.2f}"]
    if not any(key.startswith("eval_") for key in logs):
        return "  ".join([*start, *(form.format(logs[key]) for key, form in _OF_UPDATE.items() if key in logs)])
    metrics = {key.removeprefix("eval_"): value for key, value in logs.items() if not key.endswith(_LEFT_OUT)}
    return "  ".join([*start, "eval", *(f"{name.replace('_', ' ')} {value:.4f}" for name, value in metrics.items())])


class ProgressLines(ProgressCallback):
    """The library's progress bar, with the log as lines of text."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        line = log_line(logs, state.global_step, state.max_steps)
        if state.is_world_process_zero and line:
            print(line, flush=True) if self.training_bar is None else self.training_bar.write(line)


def print_lines(trainer: Any) -> None:
    """Let a Trainer print its log as lines."""
    for kind in (PrinterCallback, ProgressCallback):
        if any(type(callback) is kind for callback in trainer.callback_handler.callbacks):
            trainer.remove_callback(kind)
            trainer.add_callback(ProgressLines)
