"""What the loss that a Trainer's ``compute_loss`` returns is a mean of. Used by the Trainers of both MindNLPs."""

from __future__ import annotations

from typing import Any, Optional

from mindnlp_dp.step.loss_weight import LossMean, LossWeigher, Task, loss_mean
from mindnlp_dp.step.span_loss import SpanLoss

from .library import Trainer, is_causal


class TrainerLoss:
    """The loss of ``trainer``, for its model as it is at each call."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._weigher: Optional[LossWeigher] = None

    def weight(self, inputs: Any) -> float:
        """Return what the loss of a micro batch weighs, by the model's class, or by rows where that says nothing."""
        mean, whose = self._mean(inputs)
        # A new one would warn once more.
        if self._weigher is None or self._weigher.mean != mean:
            self._weigher = LossWeigher(mean, whose)
        return self._weigher(inputs)

    def span_loss(self) -> SpanLoss:
        """Return what makes the loss of question answering exact, where it is the model's, and weighed by default."""
        is_models = self._is_the_librarys and self.is_weighed_by_default
        return SpanLoss(self._trainer.model if is_models else None, self._trainer.group)

    @property
    def is_weighed_by_default(self) -> bool:
        """Whether ``loss_weight`` is the method of this package's Trainers."""
        return getattr(self._trainer.loss_weight, "__module__", "").startswith(__package__)

    @property
    def _is_the_librarys(self) -> bool:
        """Whether ``compute_loss`` is the method of the library's Trainer."""
        return getattr(self._trainer.compute_loss, "__func__", None) is Trainer.compute_loss

    def _mean(self, inputs: Any) -> tuple[Optional[LossMean], str]:
        """What the loss of a batch is a mean of, where that is known; and whose loss it is, for a message."""
        trainer = self._trainer
        if not self._is_the_librarys:
            return None, f"the loss of {type(trainer).__name__}'s own compute_loss"
        if trainer.label_smoother is not None and "labels" in inputs:
            # It computes the loss from the logits, and asks the library which models predict the next token.
            return LossMean(Task.TOKEN_CLASSIFICATION, is_shifted=is_causal(trainer.model)), "the smoothed loss"
        return loss_mean(trainer.model), f"the loss of {type(trainer.model).__name__}"
