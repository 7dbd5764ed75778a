"""Makes the loss of extractive question answering equal to that of one process; train steps and evaluation use it.

The loss is half the mean over start positions plus half the mean over end positions. Positions outside of the text are
ignored, and the two means may ignore different rows. Then no single weight per loss gives the loss of one process. If
that happens in an update, :class:`SpanLoss` replaces the loss that the model returns by

    (W / w) (S / N_start + E / N_end) / 2

S and E are the sums of the cross-entropies of a micro-batch and w is its weight; N_start, N_end and W are the counts
and the weight of the whole update over all ranks. The weighted mean of these losses is the loss of one process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Callable, Optional

import numpy as np

from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.data.loss_weight import Task, loss_mean, span_counts
from mindnlp_dp.runtime.arrays import number_of
from mindnlp_dp.runtime.mindnlp_api import mindnlp_api

Terms = tuple[Any, Any]


class SpanLoss:
    """Makes the loss of a question answering model exact over ranks and micro-batches; has no effect on other models.

    Args:
        model: a model with ``start_logits`` and ``end_logits`` in its output, called with columns as keyword arguments.
        group: the ranks that split the samples.
    """

    def __init__(self, model: Any, group: ProcessGroup) -> None:
        mean = None if model is None else loss_mean(model)
        self._applies = mean is not None and mean.task is Task.QUESTION_ANSWERING
        self._model, self._group = model, group

    @contextlib.contextmanager
    def correct_losses(self, batches: Iterable[Any]) -> Iterator[None]:
        """Correct the losses of the update whose forward passes run in this block. A collective.

        Args:
            batches: this rank's micro-batches of the update; None replaces a batch that this rank does not have.
        """
        if not self._applies:
            yield
            return
        mine = [counts for counts in map(_counts_of, batches) if counts is not None]
        differs = any(starts != ends for starts, ends in mine)
        sums = np.array([*np.sum([np.zeros(2), *mine], 0), differs], np.float64)
        *counts, num_differing = self._group.all_reduce(sums)
        if not num_differing:
            yield
            return
        total = np.array(counts)

        def scaled(sums: Terms, counts: np.ndarray) -> Any:
            scales = 0.5 * total.mean() / max(counts.mean(), 0.5) / np.maximum(total, 1)
            return sums[0] * float(scales[0]) + sums[1] * float(scales[1])

        with self._each_forward_pass(scaled):
            yield

    @contextlib.contextmanager
    def terms(self) -> Iterator[list[tuple[np.ndarray, np.ndarray]]]:
        """Record the two means and the two counts of every forward pass in this block, for an evaluation."""
        found: list[tuple[np.ndarray, np.ndarray]] = []

        def record(sums: Terms, counts: np.ndarray) -> None:
            found.append((np.array([number_of(each) for each in sums]) / np.maximum(counts, 1), counts))

        with self._each_forward_pass(record) if self._applies else contextlib.nullcontext():
            yield found

    @contextlib.contextmanager
    def _each_forward_pass(self, function: Callable[[Terms, np.ndarray], Any]) -> Iterator[None]:
        """Call ``function`` with the sums and counts of each forward pass; its result, if any, replaces the loss."""

        def hook(module: Any, args: Any, kwargs: Mapping[str, Any], output: Any) -> Any:
            counts = span_counts(kwargs)
            logits = None if counts is None else _logits_of(output, kwargs)
            if counts is None or logits is None:
                return None
            loss = function(_sums(logits, kwargs), counts)
            if loss is None:
                return output
            if isinstance(output, tuple):
                return (loss, *output[1:])
            output["loss"] = loss
            return output

        handle = self._model.register_forward_hook(hook, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()


def _counts_of(batch: Any) -> Optional[np.ndarray]:
    return span_counts(batch) if isinstance(batch, Mapping) else None


def _logits_of(output: Any, columns: Mapping[str, Any]) -> Optional[Terms]:
    """Return the logits of the starts and ends in a model's output, a tuple or with keys; None if they are not there.

    A tuple is (loss, start logits, end logits, ...), as with ``config.return_dict=False``.
    """
    if hasattr(output, "keys"):
        return (output["start_logits"], output["end_logits"]) if "end_logits" in output else None
    rows = len(columns["start_positions"])
    is_plain = isinstance(output, tuple) and len(output) > 2 and output[0].ndim == 0
    if is_plain and all(each.ndim == 2 and each.shape[0] == rows for each in output[1:3]):
        return output[1], output[2]
    return None


def _sums(logits: Terms, columns: Mapping[str, Any]) -> Terms:
    """Return the summed cross-entropies of the start and of the end positions; ignore those outside of the text."""
    cross_entropy = mindnlp_api().nn.functional.cross_entropy
    sums = []
    for name, logits_of_name in zip(("start", "end"), logits):
        positions = columns[f"{name}_positions"]
        length = logits_of_name.shape[1]
        positions = positions.reshape(-1).clamp(0, length)
        sums.append(cross_entropy(logits_of_name, positions, ignore_index=length, reduction="sum"))
    return sums[0], sums[1]
