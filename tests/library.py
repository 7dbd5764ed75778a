"""Export the installed MindNLP's names that the suites use: those of 0.4, or of Transformers for 0.5."""

from __future__ import annotations

from typing import Any

from mindnlp_dp.runtime.mindnlp_api import mindnlp_api
from mindnlp_dp.runtime.versions import mindnlp_series

__all__ = [
    "EarlyStoppingCallback",
    "Stop",
    "Trainer",
    "TrainerCallback",
    "TrainingArguments",
    "autograd",
    "is_0_5",
    "nn",
    "optim",
    "set_seed",
    "settings_here",
]

is_0_5 = mindnlp_series() == "0.5"
autograd, nn, optim = mindnlp_api().autograd, mindnlp_api().nn, mindnlp_api().optim
if is_0_5:
    from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments, set_seed
else:
    from mindnlp.engine import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
    from mindnlp.engine.utils import set_seed

# Names in MindNLP 0.4, and the different names in Transformers.
_NAMES = {"evaluation_strategy": "eval_strategy", "dataset_drop_last": "dataloader_drop_last"}
_VALUES = {("optim", "adamw"): "adamw_torch"}


class Stop(TrainerCallback):
    """Simulates a crash: raises an exception on every rank at the end of update ``step``."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


def settings_here(**settings: Any) -> dict[str, Any]:
    """Translate training arguments of MindNLP 0.4 to the names of the installed MindNLP."""
    if not is_0_5:
        return settings
    return {_NAMES.get(name, name): _VALUES.get((name, str(value)), value) for name, value in settings.items()}
