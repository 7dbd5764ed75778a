"""Finds out whether a loss is the mean that its weight says: several ranks train one process's model only if it is.

The loss of a model of MindNLP or Transformers is known by its class. Any other loss is compared in the first updates:
that of a micro-batch with the weighted mean of the losses of its two halves. ForwardBackward calls it.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

import numpy as np

from mindnlp_dp.communication.batch_across_ranks import BatchAcrossRanks
from mindnlp_dp.data.batches import Batch, num_rows_of, rows_of
from mindnlp_dp.runtime.arrays import number_of
from mindnlp_dp.runtime.mindnlp_api import mindnlp_api
from mindnlp_dp.runtime.random_state import seeded

# By chance, the halves of a small micro-batch may weigh the same although the weights of their rows differ.
NUM_UPDATES, NUM_ROWS = 4, 32

# Rounding is about 1e-6.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Comparison:
    """The loss of a micro-batch, and the mean of its halves' losses by their weights."""

    loss: float
    mean: float
    weights: tuple[float, float]
    num_rows: int

    @property
    def differs(self) -> bool:
        return not math.isclose(self.loss, self.mean, rel_tol=TOLERANCE, abs_tol=1e-6)


@dataclass
class LossCheck:
    """Compares the losses of micro-batches in the first updates, and warns once if they are not weighted means.

    Attributes:
        loss_of: function from a batch's inputs to its loss.
        loss_weight_of: function from a batch's inputs to the weight of its loss.
        models: the models and cells that the loss uses, in evaluation mode meanwhile, so that dropout is off and no
            running statistics change. If none is known, nothing is compared.
        across_ranks: the rows of all ranks; a loss that looks at them is not compared.
        whose: name of the loss in the warning.
        inputs_of: function from a batch to what the other functions take.
    """

    loss_of: Callable[[Any], Any]
    loss_weight_of: Callable[[Any], float]
    models: Sequence[Any]
    across_ranks: BatchAcrossRanks
    whose: str
    inputs_of: Callable[[Any], Any] = field(default=lambda batch: batch)
    _updates_left: int = field(default=NUM_UPDATES, init=False)
    _rows_left: int = field(default=NUM_ROWS, init=False)

    def __call__(self, batches: Sequence[Optional[Any]]) -> None:
        """Compare the first of this rank's micro-batches of an update. A collective in the first updates only."""
        group = self.across_ranks.group
        if not self.models or self._updates_left == 0 or (group.world_size == 1 and len(batches) == 1):
            return
        self._updates_left -= 1
        batch = _of_several_rows([each for each in batches if each is not None])
        can = batch is not None and not self.across_ranks.has_local_router_loss
        # A loss may contain collectives: either all ranks compute it, or none.
        if not all(group.all_gather_object(can)):
            if self._updates_left == 0 and self._rows_left == NUM_ROWS and group.is_main and batch is None:
                warnings.warn(
                    f"{self.whose} could not be compared with its loss weights, because micro-batches have one row; "
                    "the mean over micro-batches and ranks is the loss of one process only if the loss is a mean over "
                    "rows. Otherwise return what it divides by from loss_weight(inputs) of the Trainer, or from "
                    "loss_weight_of= of make_train_step",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return
        found: list[Optional[Comparison]] = group.all_gather_object(self._compared(batch))
        compared = [each for each in found if each is not None]
        self._rows_left -= min((each.num_rows for each in compared), default=NUM_ROWS)
        if self._rows_left <= 0:
            self._updates_left = 0
        different = next((each for each in compared if each.differs), None)
        if different is not None:
            self._updates_left = 0
            if group.is_main:
                self._warn(different)

    def _compared(self, batch: Any) -> Optional[Comparison]:
        """Return the comparison for a micro-batch; None if its loss is drawn at random, or is of all ranks' rows."""
        size = num_rows_of(batch)
        halves = [rows_of(batch, 0, size // 2), rows_of(batch, size // 2, size)]
        try:
            with _evaluating(self.models), self.across_ranks.probing():
                loss, *losses = (self._loss(each, seed=1) for each in (batch, *halves))
                weights = [float(self.loss_weight_of(self.inputs_of(half))) for half in halves]
                if not sum(weights) or not math.isfinite(loss):
                    return None
                mean = sum(each * loss_weight for each, loss_weight in zip(losses, weights) if loss_weight) / sum(
                    weights
                )
                found = Comparison(loss, mean, (weights[0], weights[1]), size)
                is_drawn = found.differs and self._loss(batch, seed=2) != loss
        except Exception:  # noqa: BLE001
            # Some losses cannot be computed of half a batch. If that of the batch cannot, training will say so.
            return None
        return None if is_drawn else found

    def _loss(self, batch: Any, seed: int) -> float:
        with seeded(seed):
            return number_of(self.loss_of(self.inputs_of(batch)))

    def _warn(self, found: Comparison) -> None:
        first, second = found.weights
        warnings.warn(
            f"{self.whose} is not a mean with its loss weights: for a micro-batch of {found.num_rows} rows it is "
            f"{found.loss:.6g}, and the mean of its halves' losses, with the weights {first:.6g} and {second:.6g}, is "
            f"{found.mean:.6g} (dropout off). Training on several ranks or micro-batches then differs from training on "
            "one. Let loss_weight(inputs) of the Trainer, or loss_weight_of= of make_train_step, return what the loss "
            "divides by, as dp.count_labels(inputs, weight=class_weights) does; or compute a loss that is a mean over "
            "rows. A loss that compares samples with each other needs dp.all_gather_with_grad",
            RuntimeWarning,
            stacklevel=2,
        )


def _of_several_rows(batches: Sequence[Any]) -> Optional[Any]:
    """Return the first batch of several rows, or else two of one row joined; None if they do not fit."""
    several = next((each for each in batches if num_rows_of(each) > 1), None)
    if several is not None or len(batches) < 2:
        return several
    first, second = batches[:2]
    try:
        # Other arrays, such as class weights, belong to the batch.
        columns = {n: np.concatenate([x, second[n]]) if len(x) == 1 == len(second[n]) else x for n, x in first.items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        # They are not dicts of arrays, or their rows have different lengths.
        return None
    return Batch(columns, np.arange(2))


@contextlib.contextmanager
def _evaluating(models: Sequence[Any]) -> Iterator[None]:
    """Set models of MindNLP and cells to evaluation in this block, without recording gradients."""
    modules: list[tuple[Any, bool]] = []
    for model in models:
        if hasattr(model, "modules"):
            modules += [(module, module.training) for module in model.modules()]
            model.eval()
        else:
            modules += [(cell, cell.training) for _, cell in model.cells_and_names()]
            model.set_train(False)
    try:
        with mindnlp_api().no_grad():
            yield
    finally:
        # Models may share modules: the first record of one is from before.
        for module, is_training in reversed(modules):
            module.training = is_training
