"""Every sample once, in data set order, the same answer on every rank.

Goes in: what each rank computed of its slices of every global batch. Comes out:
predictions and labels of the whole data set, in order, and sums that are divided
once at the end. Averages are never averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Optional, Union

import numpy as np

from mindnlp_dp.communication.collectives import ProcessGroup
from mindnlp_dp.communication.process_group import get_data_group
from mindnlp_dp.data.batches import call_with, num_rows_of
from mindnlp_dp.data.loader import Loader
from mindnlp_dp.replicas.broadcast import broadcast_buffers
from mindnlp_dp.step.model_of import BatchWeigher, model_of
from mindnlp_dp.step.span_loss import SpanLoss

from .gather import OrderedGatherer, to_numpy


class Evaluation(NamedTuple):
    """Of a whole data set, the same on every rank: outputs in its order, mean loss (None without any), samples."""

    outputs: Any
    loss: Optional[float]
    num_samples: int


def evaluate(
    predict_fn: Callable[..., Any],
    loader: Loader,
    *,
    model: Any = None,
    has_loss: bool = False,
    weight_of: Optional[Callable[[Any], float]] = None,
    group: Optional[ProcessGroup] = None,
) -> Evaluation:
    """Run a function over every sample of a loader, once; a collective.

    Args:
        predict_fn: from a batch, as :func:`~mindnlp_dp.make_train_step`'s ``forward_fn`` takes it, to outputs: nested
            tuples, lists or dicts of tensors with the rows in front. What shall be compared with them, such as
            labels, it returns beside them.
        loader: what :func:`~mindnlp_dp.make_loader` made, without ``shuffle``.
        model: the one that ``predict_fn`` calls, whose buffers are made rank 0's first; a model with a batch
            normalisation wants it, unless :class:`~mindnlp_dp.FunctionalRun` has just ended its epochs. So does one
            whose experts are spread over ranks, which wait for those that have no rows left.
        has_loss: whether ``predict_fn`` returns a pair, its mean loss and the outputs.
        weight_of: what a batch's loss weighs; by default as for :func:`~mindnlp_dp.make_train_step`, by ``model``.

    Raises:
        ValueError: an output does not have a row for each sample, such as a loss without ``has_loss``.
    """
    group = group or get_data_group()
    called = model_of(predict_fn) if model is None else model
    is_default, weight_of = weight_of is None, weight_of or BatchWeigher(predict_fn, called)
    span_loss = SpanLoss(called, group)
    if model is not None:
        broadcast_buffers(model, group)
    parallel = getattr(model, "parallel", None)
    lend = parallel.lend if parallel is not None and parallel.has_experts else lambda batch: batch
    run = EvaluationRun(group)
    for window in loader.windows():
        for mine in window:
            batch = lend(mine)
            if batch is None:
                run.add(None)
                continue
            with span_loss.terms() as terms:
                returned = call_with(predict_fn, batch)
            if mine is None:
                # A batch that was lent: its outputs are another rank's.
                run.add(None)
                continue
            loss, outputs = returned if has_loss else (None, returned)
            num_rows, outputs = num_rows_of(mine), to_numpy(outputs)
            _check_rows(outputs, num_rows, group.label())
            if loss is None:
                run.add(outputs, num_rows)
            elif is_default and terms:
                run.add(outputs, num_rows, *terms[-1])
            else:
                run.add(outputs, num_rows, float(loss.asnumpy()), float(weight_of(mine)))
    return Evaluation(*run.finish())


def _check_rows(outputs: Any, num_rows: int, rank: str) -> None:
    """Raise ValueError unless every array of a nested structure has a row for each sample of the batch."""
    if isinstance(outputs, (tuple, list, Mapping)):
        for part in outputs.values() if isinstance(outputs, Mapping) else outputs:
            _check_rows(part, num_rows, rank)
    elif outputs is not None and (outputs.ndim == 0 or outputs.shape[0] != num_rows):
        raise ValueError(
            f"predict_fn returned an array of shape {outputs.shape} for a batch of {num_rows} rows (rank {rank}), and "
            "outputs have a row for each sample; if it returns a pair, its loss and the outputs, pass has_loss=True"
        )


class EvaluationRun:
    """One pass over a data set: outputs of all samples, their mean loss, their number.

    ``add`` is called by every rank once a global batch, ``finish`` at the end.
    """

    def __init__(self, group: ProcessGroup, gather_every: Optional[int] = None) -> None:
        self._group = group
        self._rows = OrderedGatherer(group, gather_every)
        # Over this rank's samples: loss * weight and weight, of each of the two terms that a loss may have.
        self._sums = np.zeros((2, 2), np.float64)
        self._num_samples = 0

    def add(
        self,
        outputs: Any,
        num_samples: int = 0,
        loss: Union[float, np.ndarray, None] = None,
        weight: Union[float, np.ndarray] = 0.0,
    ) -> None:
        """Add what this rank computed of a global batch; None and 0 where it had no rows.

        A loss that is half one mean and half another comes as both, of shape ``(2,)``, with a weight for each.
        """
        weights = np.broadcast_to(np.asarray(weight, np.float64), 2)
        if loss is not None:
            # A mean of nothing is not a number.
            self._sums += np.where(weights > 0, loss * weights, 0.0), weights
        self._num_samples += num_samples
        self._rows.add(outputs)

    def finish(self) -> tuple[Any, Optional[float], int]:
        """Outputs in data set order (None when nobody had any), mean loss (None when there was none), samples."""
        outputs = self._rows.finish()
        sums = self._group.all_reduce(np.append(self._sums.ravel(), self._num_samples))
        losses, weights, num_samples = sums[:2], sums[2:4], int(sums[4])
        loss = float(np.mean(losses / np.where(weights > 0, weights, 1.0))) if weights.any() else None
        return outputs, loss, num_samples
