"""One optimizer step from this rank's part of one global batch.

Goes in: the micro steps of a window as they are computed, each with its loss, gradients and
weight. Comes out: the same updated weights on every rank. Knows neither models nor trainers::

    micro steps ── accumulate (weight * gradient) ── reduce ── clip ── optimizer ── scheduler
                        no communication         1 all-reduce a bucket    (mindnlp_dp.update)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np

from mindnlp_dp.gradients.window import GradientWindow
from mindnlp_dp.runtime import progress
from mindnlp_dp.update.updater import Updater

from .losses import BadLoss, LossMeter, settle_bad_gradient, settle_bad_losses, warn_of_no_weight
from .timeline import Timeline


@dataclass(frozen=True)
class MicroStep:
    """What one forward and backward pass of this rank gave.

    ``gradients`` are in the order of the synchroniser's parameters; None where nothing in the micro batch counts, so
    that it was not computed. ``indices`` say which samples these were, where that is known. ``is_spoilt`` says that
    another rank's loss, which is no number, is in these gradients: experts get those of several ranks. ``num_sharers``
    ranks have this loss, and each a part of its gradients, as many times as large, which the exchange makes one.
    """

    loss: float
    gradients: Optional[Sequence[Optional[Any]]]
    weight: float
    indices: Optional[np.ndarray] = None
    is_spoilt: bool = False
    num_sharers: int = 1

    @classmethod
    def without_weight(cls, indices: Optional[np.ndarray] = None) -> MicroStep:
        """One that is not computed, for nothing in it counts, such as none of its labels."""
        return cls(0.0, None, 0.0, indices)


class TrainStep:
    """Called by every rank once an update, with its micro steps; they are taken one by one, as they come.

    A loss that is NaN or infinite, and a gradient that holds such numbers, are left out of the update with a warning,
    on every rank alike; or, without ``leave_out_bad_losses``, raise FloatingPointError on every rank. ``settle`` is
    called when weights were updated.
    """

    def __init__(
        self,
        synchronizer: GradientWindow,
        updater: Updater,
        losses: LossMeter,
        *,
        max_grad_norm: Optional[float] = None,
        leave_out_bad_losses: bool = True,
        timeline: Optional[Timeline] = None,
        settle: Optional[Callable[[], None]] = None,
    ) -> None:
        self.synchronizer = synchronizer
        self.updater = updater
        self.losses = losses
        self.max_grad_norm = max_grad_norm
        self.leave_out_bad_losses = leave_out_bad_losses
        self.timeline = timeline or Timeline(synchronizer.group)
        self._settle = settle
        # Updates that are finished here, and whether weights or the optimizer are those of none: an error leaves it so.
        self.num_updates = 0
        self.is_updating = False

    def __call__(self, micro_steps: Iterable[MicroStep], step: int) -> Optional[float]:
        """Do update number ``step``; returns the norm of the averaged gradient, if it is clipped."""
        sync = self.synchronizer
        losses, bad = self._accumulate(micro_steps, step)
        with self.timeline.span("wait for gradients", step=step), progress.waiting("the exchange of gradients"):
            gradients = self.updater.average(sync)
        for name, began, ended in sync.last_window.spans:
            self.timeline.add(name, began, ended, "exchange", step=step)
        if sync.num_skipped and not settle_bad_losses(bad, sync.group, go_on=self.leave_out_bad_losses):
            warn_of_no_weight(sync.total_weight, step)
        norm = None
        if sync.total_weight > 0:
            if self.max_grad_norm and self.max_grad_norm > 0:
                with self.timeline.span("clip", step=step):
                    gradients, norm = self.updater.clip(gradients, self.max_grad_norm)
            problem = self._problem_of(gradients, norm)
            if problem:
                settle_bad_gradient(problem, step, go_on=self.leave_out_bad_losses)
            else:
                self.is_updating = True
                with self.timeline.span("update", step=step), progress.waiting("the update"):
                    self.updater.update(gradients)
                    if self._settle is not None:
                        self._settle()
        self.is_updating = True
        self.updater.finish()
        self.is_updating = False
        self.num_updates += 1
        for loss, weight in losses:
            self.losses.add(loss, weight)
        with progress.waiting("the update"):
            self.updater.release()
        sync.settle()
        progress.finish_update(step + 1, losses, sync.total_weight)
        return norm

    def _accumulate(
        self, micro_steps: Iterable[MicroStep], step: int
    ) -> tuple[list[tuple[float, float]], list[BadLoss]]:
        """Add up the micro steps of a window; return the losses with their weights, and those that are no numbers."""
        sync = self.synchronizer
        losses: list[tuple[float, float]] = []
        bad: list[BadLoss] = []
        try:
            for micro in micro_steps:
                progress.step()
                if micro.gradients is None:
                    sync.skip()
                elif math.isfinite(micro.loss) and not micro.is_spoilt:
                    sync.accumulate(micro.gradients, micro.weight / micro.num_sharers)
                    losses.append((micro.loss, micro.weight))
                else:
                    sync.skip()
                    if not math.isfinite(micro.loss):
                        indices = () if micro.indices is None else tuple(micro.indices.tolist())
                        bad.append(BadLoss(micro.loss, sync.group.label(), step, indices))
        except BaseException:
            # A later window begins empty, and without the hooks that the passes of this one have put into the model,
            # for as long as the traceback keeps their generator.
            sync.drop()
            if isinstance(micro_steps, Generator):
                micro_steps.close()
            raise
        return losses, bad

    def _problem_of(self, gradients: Any, norm: Optional[float]) -> str:
        """Why these averaged gradients, of this norm where it is known, must not reach the weights; else empty."""
        if norm is None:
            return "" if self.updater.are_finite(gradients) else "the averaged gradient holds NaN or infinity"
        return "" if math.isfinite(norm) else f"the norm of the averaged gradient is {norm}"
