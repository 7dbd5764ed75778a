"""One optimizer step from this rank's part of one global batch.

Goes in: the micro steps of a window as they are computed, each with its loss, gradients and
weight. Comes out: the same updated weights on every rank. Knows neither models nor trainers::

    micro steps ── accumulate (weight * gradient) ── reduce ── clip ── optimizer ── scheduler
                        no communication         1 all-reduce a bucket
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np
from mindnlp.core import nn, optim

from .gradient_sync import GradientSynchronizer
from .losses import BadLoss, LossMeter, settle_bad_losses, settle_bad_norm
from .trace import Timeline


@dataclass(frozen=True)
class MicroStep:
    """What one forward and backward pass of this rank gave.

    ``gradients`` are in the order of the synchroniser's parameters; ``indices`` say which samples these were.
    """

    loss: float
    gradients: Sequence[Optional[Any]]
    weight: float
    indices: np.ndarray


class TrainStep:
    """Called by every rank once an update, with its micro steps; they are taken one by one, as they come.

    A loss that is NaN or infinite, and a gradient whose norm is, are left out of the update with a warning, on every
    rank alike; or, without ``leave_out_bad_losses``, raise FloatingPointError on every rank.
    """

    def __init__(
        self,
        synchronizer: GradientSynchronizer,
        optimizer: Any,
        scheduler: Any,
        losses: LossMeter,
        *,
        max_grad_norm: Optional[float] = None,
        leave_out_bad_losses: bool = True,
        timeline: Optional[Timeline] = None,
    ) -> None:
        self.synchronizer = synchronizer
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.losses = losses
        self.max_grad_norm = max_grad_norm
        self.leave_out_bad_losses = leave_out_bad_losses
        self.timeline = timeline or Timeline(synchronizer.group)

    def __call__(self, micro_steps: Iterable[MicroStep], step: int) -> Optional[float]:
        """Do update number ``step``; returns the norm of the averaged gradient, if it is clipped."""
        sync, bad = self.synchronizer, []
        for micro in micro_steps:
            if math.isfinite(micro.loss):
                sync.accumulate(micro.gradients, micro.weight)
                self.losses.add(micro.loss, micro.weight)
            else:
                sync.skip()
                bad.append(BadLoss(micro.loss, sync.group.rank, step, tuple(micro.indices.tolist())))
        with self.timeline.span("wait for gradients", step=step):
            gradients = sync.reduce()
        for name, began, ended in sync.last_window.spans:
            self.timeline.add(name, began, ended, "exchange", step=step)
        if sync.num_skipped:
            settle_bad_losses(bad, sync.group, go_on=self.leave_out_bad_losses)
        norm = None
        if sync.total_weight > 0:
            for parameter, gradient in zip(sync.parameters, gradients):
                parameter.grad = gradient
            with self.timeline.span("clip", step=step):
                norm = self._clip()
            if norm is None or settle_bad_norm(norm, step, go_on=self.leave_out_bad_losses):
                with self.timeline.span("update", step=step):
                    self.optimizer.step()
        # A plateau scheduler steps when there is a metric to look at.
        if not isinstance(self.scheduler, optim.lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step()
        return norm

    def _clip(self) -> Optional[float]:
        if not self.max_grad_norm or self.max_grad_norm < 0:
            return None
        norm = nn.utils.clip_grad_norm_(self.synchronizer.parameters, self.max_grad_norm)
        return float(norm.asnumpy())
