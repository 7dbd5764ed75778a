"""Does one optimizer step from this rank's part of a global batch; the Trainer and custom loops call it.

After the step all ranks have the same weights. It does not depend on models or trainers::

    for each micro-batch:                                                           (forward_backward.py)
        forward and backward pass ── accumulate loss_weight * gradient              no communication
    reduce                                                                          one all-reduce per bucket
    clip ── optimizer ── scheduler                                                  (mindnlp_dp.optim)
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from mindnlp_dp.data_parallel.synchronizer_base import MicroStep, Synchronizer
from mindnlp_dp.optim.updater import Updater
from mindnlp_dp.parallel.mixed_precision import MixedPrecision
from mindnlp_dp.runtime import heartbeat
from mindnlp_dp.training.adapter_gradients import AdapterCheck
from mindnlp_dp.training.metrics import (
    LossMeter,
    NonFiniteLoss,
    report_nonfinite_gradient,
    report_nonfinite_loss,
    warn_of_no_weight,
)
from mindnlp_dp.training.timeline import StepTimeline

# From an update's micro-batches and its number to the results of their passes, one by one.
ForwardBackwardPasses = Callable[[Sequence[Optional[Any]], int], Iterable[MicroStep]]


@dataclass
class _SeenLoss:
    """The loss of a micro-step; a deferred one is None until the exchange has read it."""

    value: Optional[float]
    loss_weight: float
    indices: tuple[int, ...]
    is_counted: bool = True


class TrainStep:
    """Accumulates gradients, exchanges them and updates the weights; every rank calls it once per update.

    If a loss is NaN or infinite, its micro-step is left out with a warning; if the averaged gradient is, the update
    is left out. Without ``leave_out_bad_losses`` both raise FloatingPointError on every rank.
    ``resync_tied_weights`` is called after every update of the weights, and ``adapters`` checks the gradients of
    the first one. ``before_update`` and ``after_update`` are called around the optimizer's step, the latter before
    the scheduler steps. An overflow that the scale of ``precision`` explains halves it, and is not reported.
    """

    def __init__(
        self,
        synchronizer: Synchronizer,
        updater: Updater,
        losses: LossMeter,
        *,
        max_grad_norm: Optional[float] = None,
        leave_out_bad_losses: bool = True,
        timeline: Optional[StepTimeline] = None,
        resync_tied_weights: Callable[[], None] = lambda: None,
        adapters: Optional[AdapterCheck] = None,
        before_update: Optional[Callable[[], None]] = None,
        after_update: Callable[[], None] = lambda: None,
        precision: Optional[MixedPrecision] = None,
    ) -> None:
        self.synchronizer = synchronizer
        self.updater = updater
        self.losses = losses
        self.max_grad_norm = max_grad_norm
        self.leave_out_bad_losses = leave_out_bad_losses
        self.timeline = timeline or StepTimeline(synchronizer.group)
        self._resync_tied_weights = resync_tied_weights
        self._adapters = adapters
        self._before_update, self._after_update = before_update, after_update
        self.precision = precision
        # The losses of this rank's micro-steps in the last update, with their weights; also of those that were left
        # out.
        self.last_losses: list[tuple[float, float]] = []

    def __call__(
        self, micro_batches: Sequence[Optional[Any]], step: int, forward_backward: ForwardBackwardPasses
    ) -> Optional[float]:
        """Do update number ``step``; return the norm of the averaged gradient, or None if it is not clipped.

        Args:
            micro_batches: This rank's micro-batches; None replaces one that it does not have.
            forward_backward: A function of the micro-batches and the step that runs the passes of one after another,
                and yields each result.
        """
        seen = self._accumulate(forward_backward(micro_batches, step))
        if self._adapters is not None and self._adapters.report():
            self._adapters = None
        gradients = self._reduce(step)
        sync = self.synchronizer
        losses, bad = self._read(seen, step)
        if sync.num_skipped and not report_nonfinite_loss(bad, sync.group, continues=self.leave_out_bad_losses):
            warn_of_no_weight(sync.total_loss_weight, step)
        with heartbeat.waiting("the update"):
            result = self.updater.step(
                gradients if sync.total_loss_weight > 0 else None, self.max_grad_norm,
                span=functools.partial(self.timeline.span, step=step),
                on_problem=functools.partial(self._report_nonfinite_gradient, step),
                before_update=self._before_update, after_update=self._complete_update,
            )  # fmt: skip
        for loss, loss_weight in losses:
            self.losses.add(loss, loss_weight)
        sync.repack_if_learned()
        heartbeat.finish_update(step + 1, losses)
        return result.norm

    def _report_nonfinite_gradient(self, step: int, problem: str) -> None:
        if self.precision is None or not self.precision.reduce_scale():
            report_nonfinite_gradient(problem, step=step, continues=self.leave_out_bad_losses)

    def _complete_update(self) -> None:
        if self.precision is not None:
            self.precision.count_update()
        self._resync_tied_weights()
        self._after_update()

    def _reduce(self, step: int) -> Any:
        """Average the accumulated gradients over the ranks. A collective."""
        sync = self.synchronizer
        with self.timeline.span("wait for gradients", step=step), heartbeat.waiting("the exchange of gradients"):
            gradients = self.updater.receive(sync.reduce(in_place=self.updater.reads_buckets), sync)
        for name, began, ended in sync.last_exchange.spans:
            self.timeline.add(name, began, ended, "exchange", step=step)
        return gradients

    def _read(self, seen: list[_SeenLoss], step: int) -> tuple[list[tuple[float, float]], list[NonFiniteLoss]]:
        """Return the finite losses of an update with their weights, and the bad losses; its header is here."""
        deferred = iter(self.synchronizer.losses)
        for loss in seen:
            if loss.value is None:
                loss.value = next(deferred)
        known = [(loss, math.nan if loss.value is None else loss.value) for loss in seen]
        self.last_losses = [(value, loss.loss_weight) for loss, value in known if loss.loss_weight > 0]
        label = self.synchronizer.group.label()
        bad = [NonFiniteLoss(value, label, step, loss.indices) for loss, value in known if not math.isfinite(value)]
        return [(value, loss.loss_weight) for loss, value in known if loss.is_counted and math.isfinite(value)], bad

    def _accumulate(self, micro_steps: Iterable[MicroStep]) -> list[_SeenLoss]:
        """Run the micro-steps of an update and accumulate their gradients; return their losses."""
        sync = self.synchronizer
        seen: list[_SeenLoss] = []
        try:
            for micro in micro_steps:
                heartbeat.step()
                if micro.gradients is None:
                    sync.skip()
                    continue
                is_deferred = not isinstance(micro.loss, numbers.Real)
                indices = () if micro.indices is None else tuple(micro.indices.tolist())
                loss = _SeenLoss(None if is_deferred else float(micro.loss), micro.loss_weight, indices)
                seen.append(loss)
                if is_deferred or (math.isfinite(micro.loss) and not micro.has_nonfinite_peer):
                    if self._adapters is not None:
                        self._adapters.observe(micro.gradients)
                    # A parameter may have been frozen after training began: as in PyTorch, it is not updated.
                    pairs = zip(sync.parameters, micro.gradients)
                    gradients = [gradient if parameter.requires_grad else None for parameter, gradient in pairs]
                    loss_weight = micro.loss_weight / micro.loss_replication
                    if is_deferred:
                        sync.accumulate(gradients, loss_weight, loss=micro.loss)
                    else:
                        sync.accumulate(gradients, loss_weight)
                else:
                    sync.skip()
                    loss.is_counted = False
        except BaseException:
            # The next update must begin empty. Close the generator to remove its hooks from the model now: the
            # traceback would keep it alive.
            sync.reset()
            if isinstance(micro_steps, Generator):
                micro_steps.close()
            raise
        return seen
