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


# Versions: MindNLP 0.4.1. Cause: the error of an unknown ``optim`` does not say how to use another optimizer.
# Remove when: this package makes the optimizers that Transformers has names for.
@around("mindnlp.engine.train_args.base")
def _names_of_optimizers(module: types.ModuleType) -> Iterator[None]:
    yield

    def missing(cls: Any, value: Any) -> Any:
        names = " or ".join(repr(member.value) for member in cls)
        raise ValueError(
            f"optim={value!r}: MindNLP 0.4.1 has {names}, and mindnlp_dp adds 'muon', 'lamb' and 'lars'; make any "
            "other optimizer yourself, and pass it to the Trainer: optimizers=(optimizer, None)"
        )

    module.OptimizerNames._missing_ = classmethod(missing)
