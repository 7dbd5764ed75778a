"""This module evaluates every sample once, in data set order; the Trainers and custom training loops call it.

Each rank computes its slices of every global batch. All ranks get the predictions and labels of the full data set, in
order (evaluation_gather.py), and a mean loss from sums that are divided once, at the end: averages are never averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Optional, Union

import numpy as np

from mindnlp_dp.communication.default_group import get_data_group
from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.communication.replicas import broadcast_buffers
from mindnlp_dp.data.batches import call_with, num_rows_of
from mindnlp_dp.data.loader import Loader
from mindnlp_dp.parallel.distributed_model import distributed_model_of
from mindnlp_dp.runtime.arrays import number_of
from mindnlp_dp.training.evaluation_gather import OrderedGatherer, to_numpy
from mindnlp_dp.training.find_model import BatchWeigher, model_of
from mindnlp_dp.training.span_loss import SpanLoss


class Evaluation(NamedTuple):
    """The result of :func:`evaluate`, the same on every rank: outputs in data set order, mean loss or None, samples."""

    outputs: Any
    loss: Optional[float]
    num_samples: int


def evaluate(
    predict_fn: Callable[..., Any],
    loader: Loader,
    *,
    model: Any = None,
    has_loss: bool = False,
    loss_weight_of: Optional[Callable[[Any], float]] = None,
    group: Optional[ProcessGroup] = None,
) -> Evaluation:
    """Run a function once over every sample of a loader. A collective.

    It does not change the model's mode: call ``model.eval()`` or ``network.set_train(False)`` before, and back after.

    Args:
        predict_fn: a function that takes a batch, as :func:`~mindnlp_dp.make_train_step`'s ``forward_fn`` does, and
            returns outputs: nested tuples, lists or dicts of tensors with rows as the first dimension. It also
            returns what the outputs are to be compared with, such as labels.
        loader: a loader from :func:`~mindnlp_dp.make_loader`, without ``shuffle``.
        model: the model that ``predict_fn`` calls, whose buffers are first broadcast from rank 0. Pass it if the model
            has batch normalization, unless :class:`~mindnlp_dp.FunctionalRun` has just ended its epochs, or if its
            experts are sharded: then ranks without rows must run dummy batches for the others.
        has_loss: whether ``predict_fn`` returns a pair of the mean loss and the outputs.
        loss_weight_of: the weight of a batch's loss; by default by ``model``, as in
            :func:`~mindnlp_dp.make_train_step`.

    Raises:
        ValueError: an output does not have a row for each sample, such as a loss without ``has_loss``.
    """
    group = group or get_data_group()
    called = model_of(predict_fn) if model is None else model
    is_default, loss_weight_of = loss_weight_of is None, loss_weight_of or BatchWeigher(predict_fn, called)
    span_loss = SpanLoss(called, group)
    if model is not None:
        broadcast_buffers(model, group)
    replicated = distributed_model_of(model, group)
    run = EvaluationRun(group)
    for micro_batches in loader.updates():
        for mine in micro_batches:
            batch = replicated.dummy_batch_for(mine)
            if batch is None:
                run.add(None)
                continue
            with span_loss.terms() as terms:
                returned = call_with(predict_fn, batch)
            if mine is None:
                # A dummy batch: its samples belong to another rank.
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
                run.add(outputs, num_rows, number_of(loss), float(loss_weight_of(mine)))
    return Evaluation(*run.finish())


def _check_rows(outputs: Any, num_rows: int, rank: str) -> None:
    """Raise ValueError unless every array in a nested structure has a row for each sample of the batch."""
    if isinstance(outputs, (tuple, list, Mapping)):
        for part in outputs.values() if isinstance(outputs, Mapping) else outputs:
            _check_rows(part, num_rows, rank)
    elif outputs is not None and (outputs.ndim == 0 or outputs.shape[0] != num_rows):
        raise ValueError(
            f"predict_fn returned an array of shape {outputs.shape} for a batch of {num_rows} rows (rank {rank}), and "
            "outputs have a row for each sample; if it returns a pair, its loss and the outputs, pass has_loss=True"
        )


class EvaluationRun:
    """Collects the outputs, mean loss and number of samples of one pass over a data set.

    Every rank calls ``add`` once per global batch, and ``finish`` at the end.
    """

    def __init__(self, group: ProcessGroup, gather_every: Optional[int] = None) -> None:
        self._group = group
        self._rows = OrderedGatherer(group, gather_every)
        # The sums of loss * weight and of weight over this rank's samples, for each of the two terms of a loss.
        self._sums = np.zeros((2, 2), np.float64)
        self._num_samples = 0

    def add(
        self,
        outputs: Any,
        num_samples: int = 0,
        loss: Union[float, np.ndarray, None] = None,
        weight: Union[float, np.ndarray] = 0.0,
    ) -> None:
        """Add what this rank computed for a global batch; None and 0 if it had no rows.

        A loss that is the average of two means is passed as both, of shape ``(2,)``, with a weight for each.
        """
        weights = np.broadcast_to(np.asarray(weight, np.float64), 2)
        if loss is not None:
            # A mean over no items is NaN.
            self._sums += np.where(weights > 0, loss * weights, 0.0), weights
        self._num_samples += num_samples
        self._rows.add(outputs)

    def finish(self) -> tuple[Any, Optional[float], int]:
        """Return the outputs in data set order (or None), the mean loss (or None), and the number of samples."""
        outputs = self._rows.finish()
        sums = self._group.all_reduce(np.append(self._sums.ravel(), self._num_samples))
        losses, weights, num_samples = sums[:2], sums[2:4], int(sums[4])
        loss = float(np.mean(losses / np.where(weights > 0, weights, 1.0))) if weights.any() else None
        return outputs, loss, num_samples


def with_prefix(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Return the metrics under names that begin with ``prefix`` and an underscore."""
    start = f"{prefix}_"
    return {name if name.startswith(start) else start + name: value for name, value in metrics.items()}


def accuracy(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Return the fraction of rows whose largest of ``predictions`` (rows, classes) is at ``labels`` (rows,)."""
    return float(np.sum(predictions.argmax(-1) == labels) / len(labels))
