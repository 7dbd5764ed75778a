"""These patches correct MindNLP 0.4.1's own Trainer and its arguments in a job of several processes."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

from mindnlp_dp.compat.import_hook import around
from mindnlp_dp.compat.multi_process_guard import refused_in_several_processes

# Versions: MindNLP 0.4.1. Cause: its own Trainer exchanges no gradients, so each of several processes silently
# trains a separate model.
# Remove when: MindNLP's Trainer is data parallel itself.
around("mindnlp.engine.trainer.base")(refused_in_several_processes("MindNLP's"))


# Versions: MindNLP 0.4.1. Cause: of all losses only "loss" and "eval_loss" are better when they are smaller, and not
# those of one of several evaluation sets ("eval_NAME_loss"): the worst model is kept as the best.
# Remove when: MindNLP decides by the end of the name, as Transformers does.
@around("mindnlp.engine.train_args.base")
def _losses_are_better_when_smaller(module: types.ModuleType) -> Iterator[None]:
    yield
    post_init = module.TrainingArguments.__post_init__

    @functools.wraps(post_init)
    def __post_init__(self: Any) -> None:  # noqa: N807
        metric = self.metric_for_best_model
        if self.greater_is_better is None and metric is not None:
            self.greater_is_better = not metric.endswith("loss")
        post_init(self)

    module.TrainingArguments.__post_init__ = __post_init__
