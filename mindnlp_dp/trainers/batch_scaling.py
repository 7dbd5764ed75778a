"""Global batches in proportion to the ranks that an elastic job has (``mindnlp-dp run --scale-batch``).

Goes in: the loader of the batches that updates have now, what they were planned to have, and where a run stands whose
batches were others. Comes out: its place in the data, how many updates it makes, and the learning rate. The schedule
counts planned updates; the rate is the schedule's times what a batch is of a planned one (the linear scaling rule:
Goyal and others, Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour, 2017).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Optional

from mindnlp_dp.checkpoint.run_state import Position
from mindnlp_dp.data.loader import IndexedLoader
from mindnlp_dp.launch.environment import full_size, scales_batch
from mindnlp_dp.runtime.torch_like import torch_like

from .library import has_length


def batch_of(planned: int, num_ranks: int) -> int:
    """Samples in an update of so many ranks of this process's job, when ``planned`` are for all that it may have."""
    full = full_size(os.environ)
    return planned if full is None or not scales_batch(os.environ) else max(1, round(planned * num_ranks / full))


class Pace:
    """How far an update gets a run.

    Attributes:
        planned: samples that its updates were planned to have.
        ahead: updates that it has made besides those that it would have, had its batches always been those of now.

    Raises:
        ValueError: batches may be others than planned, and the data cannot be cut so.
    """

    def __init__(self, loader: Any, planned: Optional[int], saved: Optional[Mapping[str, Any]] = None) -> None:
        self._loader = loader
        size = loader.global_batch_size
        self.planned = planned or size
        self.ahead = 0
        before = size if saved is None else saved["global_batch_size"]
        self._is_scaled = scales_batch(os.environ) or not size == before == self.planned
        if self._is_scaled and (not isinstance(loader, IndexedLoader) or loader.digest_of_lengths is not None):
            raise ValueError(
                f"updates of {size} samples that were planned with {self.planned} (--scale-batch) are cut from the "
                "order of a data set with an index, and not of one that is grouped by length or has batches of its "
                "own; leave the option out"
            )

    def __str__(self) -> str:
        size = self._loader.global_batch_size
        return f"global batches of {size} samples, and {size / self.planned:.3g} times the learning rate"

    @property
    def is_slower(self) -> bool:
        """Whether batches are smaller than planned."""
        return self._loader.global_batch_size < self.planned

    @property
    def planned_per_epoch(self) -> Optional[int]:
        """Updates in an epoch, as it was planned; None for a stream."""
        if self._is_scaled:
            return replace(self._loader.sampler, samples_per_update=self.planned).num_updates
        return len(self._loader) if has_length(self._loader) else None

    def total(self, planned_updates: int) -> int:
        """How many updates a run will have made at its end that was planned with so many."""
        if not self._is_scaled:
            return planned_updates + self.ahead
        return -(-planned_updates * len(self._loader) // (self.planned_per_epoch or 1)) + self.ahead

    def take_up(self, position: Position, saved: Mapping[str, Any], step: int) -> Position:
        """Where updates go on behind ``position`` of a saved run, which has made ``step`` of them."""
        loader, before = self._loader, saved["global_batch_size"]
        if before == loader.global_batch_size:
            self.ahead = saved.get("ahead", 0)
            return position
        samples_read = min(position.update * before + position.offset, loader.num_samples)
        update, offset = loader.sampler.place_of(samples_read)
        self.ahead = step - (position.epoch * len(loader) + update)
        return replace(position, update=update, offset=offset)

    def set_rate(self, optimizer: Any, scheduler: Any, position: Position) -> None:
        """The schedule's behind as many planned updates as have read what was read, in proportion to the batch.

        Raises:
            ValueError: nobody knows the schedule's rate at another step.
        """
        if not (self._is_scaled or self.ahead):
            return
        if not isinstance(scheduler, torch_like().optim.lr_scheduler.LambdaLR):
            raise ValueError(
                f"with --scale-batch the learning rate follows the batch, and a {type(scheduler).__name__} does not "
                "say what it is at another step; use one of lr_scheduler_type's schedules, or leave the option out"
            )
        size, per_epoch = self._loader.global_batch_size, self.planned_per_epoch or 0
        is_read = position.update >= len(self._loader)
        in_epoch = per_epoch if is_read else (position.update * size + position.offset) // self.planned
        count, share = position.epoch * per_epoch + in_epoch, size / self.planned
        rates = [base * share * factor(count) for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas)]
        for group, rate in zip(optimizer.param_groups, rates):
            group["lr"] = rate
        scheduler.last_epoch, scheduler._last_lr = count, rates
