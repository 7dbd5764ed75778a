"""This module weighs the loss that a Trainer's ``compute_loss`` returns; the Trainers of both MindNLP series use it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Optional

from mindnlp_dp.data.column_checks import column_checks
from mindnlp_dp.data.loss_weight import LossMean, LossWeigher, Task, loss_mean
from mindnlp_dp.training.span_loss import SpanLoss
from mindnlp_dp.training.trainer.mindnlp_trainer import Trainer, is_causal
from mindnlp_dp.training.trainer.trainer_interface import TrainerInterface

# Packages whose prediction_step returns the model's loss.
_LIBRARIES = ("mindnlp", "mindnlp_dp", "transformers")


class TrainerLoss:
    """Tells what the loss of ``trainer`` weighs, for the model that it has at the time of each call."""

    def __init__(self, trainer: TrainerInterface) -> None:
        self._trainer = trainer
        self._weigher: Optional[LossWeigher] = None

    def weight(self, inputs: Any) -> float:
        """Return the weight of a micro-batch's loss, by the model's class, or its number of rows if that is unknown."""
        mean, whose = self._mean(inputs)
        # A new weigher would repeat its warning.
        if self._weigher is None or self._weigher.mean != mean:
            self._weigher = LossWeigher(mean, whose)
        return self._weigher(inputs)

    def span_loss(self, *, evaluates: bool = False) -> SpanLoss:
        """Return what makes a question answering loss exact; it acts if loss and weight are not the user's own."""
        is_models = self._is_the_librarys and self.is_weighed_by_default
        if evaluates:
            is_models &= getattr(self._trainer.prediction_step, "__module__", "").split(".")[0] in _LIBRARIES
        return SpanLoss(self._trainer.model if is_models else None, self._trainer.group)

    @property
    def is_known(self) -> bool:
        """Whether the model's class, or the user's own ``loss_weight``, tells what the loss is a mean of."""
        is_models = self._is_the_librarys and loss_mean(self._trainer.model) is not None
        return is_models or not self.is_weighed_by_default

    def column_checks(self) -> Callable[[Any], None]:
        """Return a function that raises ValueError if a batch has labels or ids that the model cannot take."""
        trainer = self._trainer
        checks = column_checks(
            trainer.model, has_own_loss=not self._is_the_librarys, is_sharded=trainer.distributed_model.is_sharded
        )
        return functools.partial(checks, rank=trainer.world.label())

    @property
    def is_weighed_by_default(self) -> bool:
        """Whether ``loss_weight`` is this package's method, not one of a subclass."""
        return getattr(self._trainer.loss_weight, "__module__", "").startswith(__package__)

    @property
    def _is_the_librarys(self) -> bool:
        """Whether the library's Trainer computes the loss, not a subclass or the user's ``compute_loss_func``."""
        has_own_function = getattr(self._trainer, "compute_loss_func", None) is not None
        return not has_own_function and getattr(self._trainer.compute_loss, "__func__", None) is Trainer.compute_loss

    def _mean(self, inputs: Any) -> tuple[Optional[LossMean], str]:
        """Return what a batch's loss is a mean over (None if unknown), and a name of the loss for messages."""
        trainer = self._trainer
        if not self._is_the_librarys:
            return None, f"the loss of {type(trainer).__name__}'s own compute_loss"
        if trainer.label_smoother is not None and "labels" in inputs:
            # The smoother computes the loss from the logits, and shifts the labels of the library's causal models.
            return LossMean(Task.TOKEN_CLASSIFICATION, is_shifted=is_causal(trainer.model)), "the smoothed loss"
        return loss_mean(trainer.model), f"the loss of {type(trainer.model).__name__}"
