"""Every sample once, in data set order, the same answer on every rank.

Goes in: what each rank computed of its slices of every global batch. Comes out:
predictions and labels of the whole data set, in order, and sums that are divided
once at the end. Averages are never averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import numpy as np

from .batches import call_with, num_rows_of
from .process_group import ProcessGroup, get_process_group
from .replicas import broadcast_buffers

if TYPE_CHECKING:
    from .loader import Loader

PADDING = -100
GATHER_EVERY = 16


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
            normalisation wants it, unless :class:`~mindnlp_dp.FunctionalRun` has just ended its epochs.
        has_loss: whether ``predict_fn`` returns a pair, its mean loss and the outputs.
        weight_of: what a batch's loss weighs; by default its number of rows.
    """
    weight_of = weight_of or num_rows_of
    group = group or get_process_group()
    if model is not None:
        broadcast_buffers(model, group)
    run = EvaluationRun(group)
    for window in loader.windows():
        for batch in window:
            if batch is None:
                run.add(None)
                continue
            returned = call_with(predict_fn, batch)
            loss, outputs = returned if has_loss else (None, returned)
            mean_loss = None if loss is None else float(loss.asnumpy())
            run.add(to_numpy(outputs), num_rows_of(batch), mean_loss, float(weight_of(batch)))
    return Evaluation(*run.finish())


class EvaluationRun:
    """One pass over a data set: outputs of all samples, their mean loss, their number.

    ``add`` is called by every rank once a global batch, ``finish`` at the end.
    """

    def __init__(self, group: ProcessGroup, gather_every: Optional[int] = None) -> None:
        self._group = group
        self._rows = OrderedGatherer(group, gather_every)
        # Over this rank's samples: loss * weight, weight, samples.
        self._sums = np.zeros(3, np.float64)

    def add(self, outputs: Any, num_samples: int = 0, loss: Optional[float] = None, weight: float = 0.0) -> None:
        """What this rank computed of a global batch; None and 0 where it had no rows."""
        if loss is not None and weight > 0:
            self._sums[:2] += loss * weight, weight
        self._sums[2] += num_samples
        self._rows.add(outputs)

    def finish(self) -> tuple[Any, Optional[float], int]:
        """Outputs in data set order (None when nobody had any), mean loss (None when there was none), samples."""
        outputs = self._rows.finish()
        loss, weight, samples = self._group.all_reduce(self._sums)
        return outputs, float(loss / weight) if weight > 0 else None, int(samples)


class OrderedGatherer:
    """Collects what the ranks computed, step by step, and puts it into data set order.

    ``add`` takes this rank's outputs of one global batch, nested tuples, lists or dicts of NumPy arrays
    with the rows in front, or None where the rank had no rows. Every ``gather_every`` steps they are
    exchanged, so that what is on its way does not grow with the data set. Rows of another
    length in the second dimension are padded with -100, as MindNLP's Trainer does.
    """

    def __init__(self, group: ProcessGroup, gather_every: Optional[int] = None) -> None:
        self._group = group
        self._gather_every = gather_every or GATHER_EVERY
        self._steps: list[Any] = []
        self._chunks: list[Any] = []

    def add(self, outputs: Any) -> None:
        """A collective every ``gather_every`` calls."""
        self._steps.append(outputs)
        if len(self._steps) == self._gather_every:
            self._gather()

    def finish(self) -> Any:
        """All rows in order, on every rank; None when nobody had any. A collective."""
        self._gather()
        return concatenate(self._chunks) if self._chunks else None

    def _gather(self) -> None:
        by_rank = self._group.all_gather_object(self._steps)
        self._steps = []
        parts = [part for step in zip(*by_rank) for part in step if part is not None]
        if parts:
            self._chunks.append(concatenate(parts))


def concatenate(parts: Sequence[Any]) -> Any:
    """Join nested structures of arrays along the rows, padding the second dimension with -100 where it differs."""
    first = parts[0]
    if isinstance(first, Mapping):
        return {key: concatenate([part[key] for part in parts]) for key in first}
    if isinstance(first, (tuple, list)):
        return type(first)(concatenate(list(items)) for items in zip(*parts))
    arrays = [np.atleast_1d(part) for part in parts]
    if arrays[0].ndim > 1:
        width = max(array.shape[1] for array in arrays)
        arrays = [_pad(array, width) for array in arrays]
    return np.concatenate(arrays)


def _pad(array: np.ndarray, width: int) -> np.ndarray:
    if array.shape[1] == width:
        return array
    padding = [(0, 0)] * array.ndim
    padding[1] = (0, width - array.shape[1])
    return np.pad(array, padding, constant_values=PADDING)


def to_numpy(outputs: Any) -> Any:
    """Turn the tensors of a nested structure into NumPy arrays."""
    if outputs is None or isinstance(outputs, np.ndarray):
        return outputs
    if isinstance(outputs, Mapping):
        return {key: to_numpy(value) for key, value in outputs.items()}
    if isinstance(outputs, (tuple, list)):
        return type(outputs)(to_numpy(value) for value in outputs)
    return outputs.asnumpy()


def with_prefix(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Metrics under names that begin with ``prefix`` and an underscore."""
    start = f"{prefix}_"
    return {name if name.startswith(start) else start + name: value for name, value in metrics.items()}


def accuracy(predictions: np.ndarray, labels: np.ndarray) -> float:
    """The share of rows whose largest of ``predictions`` (rows, classes) is at ``labels`` (rows,)."""
    return float(np.sum(predictions.argmax(-1) == labels) / len(labels))
