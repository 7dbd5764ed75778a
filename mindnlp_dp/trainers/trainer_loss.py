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
        mean, whose = self._mean()
        # A new one would warn once more.
        if self._weigher is None or self._weigher.mean != mean:
            self._weigher = LossWeigher(mean, whose)
        return self._weigher(inputs)

    def span_loss(self) -> SpanLoss:
        """Return what makes the loss of question answering exact, where it is the model's, and weighed by default."""
        mean = self._mean()[0]
        is_models = mean is not None and mean == loss_mean(self._trainer.model)
        return SpanLoss(self._trainer.model if is_models and self.is_weighed_by_default else None, self._trainer.group)

    @property
    def is_weighed_by_default(self) -> bool:
        """Whether ``loss_weight`` is the method of this package's Trainers."""
        return getattr(self._trainer.loss_weight, "__module__", "").startswith(__package__)

    def _mean(self) -> tuple[Optional[LossMean], str]:
        """What the loss is a mean of, where that is known; and whose loss it is, for a message."""
        trainer = self._trainer
        if getattr(trainer.compute_loss, "__func__", None) is not Trainer.compute_loss:
            return None, f"the loss of {type(trainer).__name__}'s own compute_loss"
        if trainer.label_smoother is not None:
            # It computes the loss from the logits, and asks the library which models predict the next token.
            return LossMean(Task.TOKEN_CLASSIFICATION, is_shifted=is_causal(trainer.model)), "the smoothed loss"
        return loss_mean(trainer.model), f"the loss of {type(trainer.model).__name__}"
