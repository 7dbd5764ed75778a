"""This module scales global batches with the number of ranks of an elastic job (``mindnlp-dp run --scale-batch``).

When the batch size changes, it tells the training loop where to continue in the data, how many updates to make, and
the learning rate. The schedule counts planned updates; the rate is the schedule's rate times the ratio of the batch to
the planned one (the linear scaling rule: Goyal and others, Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour,
2017).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Optional

from mindnlp_dp.data.loader import IndexedLoader
from mindnlp_dp.runtime.job_context import max_world_size, scales_batch
from mindnlp_dp.runtime.mindnlp_api import mindnlp_api
from mindnlp_dp.training.run_state import Position
from mindnlp_dp.training.trainer.mindnlp_trainer import has_length


def batch_of(planned: int, num_ranks: int) -> int:
    """Return the samples per update with ``num_ranks`` ranks, if ``planned`` are for this elastic job's full size."""
    full = max_world_size(os.environ)
    return planned if full is None or not scales_batch(os.environ) else max(1, round(planned * num_ranks / full))


class ElasticBatchSchedule:
    """Converts between planned updates and updates of the current batch size, for the training loop.

    Args:
        loader: the loader of the current batches.
        planned: the planned samples per update; None: the loader's.
        size: the samples per update that the loader was asked for; None: no size was asked for.
        saved: the state of the run to resume; None for a new run.

    Attributes:
        planned: the planned samples per update; the loader's if batches are not scaled.
        is_scaled: whether the batch size changes with the number of ranks, or did so earlier in this run.

    Raises:
        ValueError: batches are scaled, and this loader does not support it or has another batch size.
    """

    def __init__(
        self, loader: Any, planned: Optional[int], size: Optional[int], saved: Optional[Mapping[str, Any]]
    ) -> None:
        self._loader = loader
        self.is_scaled = scales_batch(os.environ) or (saved is not None and saved.get("is_scaled", False))
        self.planned = planned if planned is not None and self.is_scaled else loader.global_batch_size
        if not self.is_scaled:
            return
        if not isinstance(loader, IndexedLoader) or loader.digest_of_lengths is not None:
            raise ValueError(
                f"updates that were planned with {self.planned} samples, and whose size changes with the number of "
                "ranks (--scale-batch), are supported for a data set with an index, but not if it "
                "is grouped by length or makes its own batches"
            )
        if size is not None and loader.global_batch_size != size:
            raise ValueError(
                f"this Trainer's own loader has updates of {loader.global_batch_size} samples, and with --scale-batch "
                f"they have {size} now; let it take global_batch_size=trainer.global_batch_size"
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
        """Planned number of updates in an epoch; None for a stream."""
        if self.is_scaled:
            return replace(self._loader.sampler, samples_per_update=self.planned).num_updates
        return len(self._loader) if has_length(self._loader) else None

    def resume(self, position: Position, saved: Mapping[str, Any]) -> Position:
        """Return where this run continues in the data after the saved run's ``position``."""
        if not self.is_scaled:
            return position
        samples_read = min(position.update * saved["global_batch_size"] + position.offset, self._loader.num_samples)
        update, offset = self._loader.sampler.place_of(samples_read)
        return replace(position, update=update, offset=offset)

    def total(self, planned_updates: int, step: int, position: Position) -> int:
        """Return the total number of updates of a run with so many planned, at ``position`` after ``step`` updates."""
        if not self.is_scaled:
            return planned_updates
        loader, size = self._loader, self._loader.global_batch_size
        epochs, rest = divmod(planned_updates, self.planned_per_epoch or 1)
        samples_of_rest = min(rest * self.planned, loader.num_samples)
        if position.epoch > epochs:
            return step
        if position.epoch == epochs:
            return step + max(0, -(-(samples_of_rest - self._samples_read(position)) // size))
        distributed_model = len(loader) - position.update + (epochs - position.epoch - 1) * len(loader)
        return step + distributed_model - (-samples_of_rest // size)

    def _samples_read(self, position: Position) -> int:
        read = position.update * self._loader.global_batch_size + position.offset
        return min(read, self._loader.num_samples)

    def set_rate(self, optimizer: Any, scheduler: Any, position: Position) -> None:
        """Set the learning rate: the schedule's at the equivalent planned update, scaled with the batch size.

        Raises:
            ValueError: the schedule cannot tell its rate at another step.
        """
        if not self.is_scaled:
            return
        kind = mindnlp_api().optim.lr_scheduler.LambdaLR
        if not isinstance(scheduler, kind) or type(scheduler).get_lr is not kind.get_lr:
            raise ValueError(
                f"with --scale-batch the learning rate follows the batch, and a {type(scheduler).__name__} does not "
                "say what it is at another step; use a LambdaLR, such as lr_scheduler_type's schedules"
            )
        per_epoch = self.planned_per_epoch or 0
        is_read = position.update >= len(self._loader)
        count = position.epoch * per_epoch + (per_epoch if is_read else self._samples_read(position) // self.planned)
        share = self._loader.global_batch_size / self.planned
        rates = [base * share * factor(count) for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas)]
        for group, rate in zip(optimizer.param_groups, rates):
            group["lr"] = rate
        scheduler.last_epoch, scheduler._last_lr = count, rates
