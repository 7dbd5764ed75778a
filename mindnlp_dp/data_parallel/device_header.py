"""This module exchanges the header of an update on a device, with one host read for all that the host needs to know.

Losses stay on the device until then: whether one is NaN is a tensor, by which its micro-batch counts or does not. The
gradient synchronizer calls it after it has launched the exchange of the buckets, so that the sum of squares of the
averaged gradients, which clipping needs, is read together with the sums over the ranks::

    summed over the ranks │ used parameters, weight │ skipped, notes │ bad losses, changes, squares
    of this rank          │ its losses

Every rank clips by the same norm, even if each has computed the squares of the same gradients with other last bits, as
a device that is not deterministic may do: then it is the mean of the ranks' values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np

from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.runtime.arrays import read


@dataclass(frozen=True)
class HeaderValues:
    """What the host has read.

    Attributes:
        used: for each parameter, the number of micro-batches that counted and used it, summed over the ranks.
        loss_weight: the weight of the micro-batches that counted, summed over the ranks.
        sums: the sums of the other numbers.
        num_bad: the number of deferred losses of all ranks that are NaN or infinite.
        num_changed: nonzero if a gradient of any rank was changed.
        losses: this rank's deferred losses.
        sum_of_squares: the sum of squares of the averaged gradients.
    """

    used: np.ndarray
    loss_weight: float
    sums: np.ndarray
    num_bad: int
    num_changed: float
    losses: list[float]
    sum_of_squares: float


class DeviceHeader:
    """Collects the deferred losses of an update, and exchanges its header.

    Attributes:
        loss_weight: the weight of the micro-batches whose losses are deferred.
    """

    def __init__(self) -> None:
        self._losses: list[Any] = []
        # A row for each deferred loss: which parameters its micro-batch used, and its weight.
        self._rows: list[np.ndarray] = []
        self.loss_weight = 0.0

    def clear(self) -> None:
        self._losses.clear()
        self._rows.clear()
        self.loss_weight = 0.0

    def add(self, loss: Any, loss_weight: float, used: Sequence[bool]) -> Any:
        """Defer a loss, a scalar tensor; return a boolean scalar tensor that says whether it is finite."""
        from mindspore import float32, ops

        loss = loss.reshape(()).astype(float32)
        self._losses.append(loss)
        self._rows.append(np.array([*used, loss_weight], np.float32))
        self.loss_weight += loss_weight
        return ops.isfinite(loss)

    @property
    def last(self) -> Optional[int]:
        """Return the number of the last deferred loss."""
        return len(self._losses) - 1 if self._losses else None

    def exchange(
        self,
        group: ProcessGroup,
        counted: np.ndarray,
        numbers: np.ndarray,
        *,
        changed: Any,
        squares: Sequence[Any],
        are_slices: bool,
    ) -> HeaderValues:
        """Sum the header over the ranks, and read it. A collective.

        Args:
            counted: float32 row of the micro-batches whose losses are known: used parameters, and their weight.
            numbers: float32 numbers to sum.
            changed: a tensor of one element that is nonzero if a gradient was changed, or a number.
            squares: scalar tensors, whose sum is the sum of squares of the averaged gradients.
            are_slices: whether ``squares`` are of this rank's slices only.
        """
        import mindspore
        from mindspore import Tensor, float32, ops

        first, bad, own = Tensor(counted), Tensor(np.zeros(1, np.float32)), []
        if self._losses:
            losses = ops.stack(self._losses)
            finite = ops.isfinite(losses).astype(float32)
            first = first + (Tensor(np.stack(self._rows)) * finite.reshape(-1, 1)).sum(0)
            bad = (1.0 - finite).sum().reshape(1)
            own.append(losses)
        is_tensor = isinstance(changed, mindspore.Tensor)
        parts = [first, Tensor(numbers), bad, changed if is_tensor else Tensor(np.array([changed], np.float32))]
        if squares:
            share = 1.0 if are_slices else 1.0 / group.world_size
            parts.append((ops.stack(list(squares)).sum() * share).reshape(1))
        else:
            parts.append(Tensor(np.zeros(1, np.float32)))
        sums = group.all_reduce(ops.cat(parts), every_step=True)
        values = read(ops.cat([sums, *own]))
        ends = np.cumsum([len(counted), len(numbers), 1, 1, 1])
        row, others, (num_bad,), (num_changed,), (total,), of_losses = np.split(values, ends)
        return HeaderValues(
            row[:-1], float(row[-1]), others, round(float(num_bad)), float(num_changed), of_losses.tolist(),
            float(total),
        )  # fmt: skip
