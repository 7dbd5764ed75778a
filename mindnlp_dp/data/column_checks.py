"""Checks that the labels and token ids of a batch are those that the model can take; training and evaluation call it.

MindSpore takes a negative id for one that counts from the end, and MindNLP's classifiers take labels that are not
int32 or int64 for several labels per sample: without these checks another loss is trained.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np

from mindnlp_dp.data.loss_weight import LossMean, Task, loss_mean
from mindnlp_dp.runtime.arrays import to_host

_TOKENS = ("input_ids", "decoder_input_ids")


@dataclass(frozen=True)
class ColumnChecks:
    """What the columns of a model's batches must be.

    Attributes:
        mean: what the model's loss is a mean of; None if that is unknown, and labels may be anything.
        num_classes: the number of classes of the labels; None if unknown.
        vocab_size: the number of token ids; None if unknown.
        takes_tokens: whether the model looks up ``input_ids`` as they are.
        may_be_multi_label: whether a classifier takes several labels per sample if they are not integers.
    """

    mean: Optional[LossMean]
    num_classes: Optional[int] = None
    vocab_size: Optional[int] = None
    takes_tokens: bool = False
    may_be_multi_label: bool = False

    def __call__(self, batch: Any, rank: str) -> None:
        """Raise ValueError, naming column, value and sample, if a label or id of the batch is none."""
        if not isinstance(batch, Mapping):
            return
        if self.takes_tokens:
            for name in _TOKENS:
                if (ids := _array(batch, name)) is not None and ids.dtype.kind in "iu":
                    end = self.vocab_size if name == "input_ids" else None
                    _check_range(name, ids, end, batch, expected="a token id", rank=rank)
        labels = _array(batch, "labels")
        if self.mean is not None and self.mean.ignored is not None and labels is not None:
            self._check_labels(labels, batch, rank)

    def _check_labels(self, labels: np.ndarray, batch: Mapping[str, Any], rank: str) -> None:
        num_classes, wants_one = self.num_classes, self.mean is not None and self.mean.task is Task.CLASSIFICATION
        ids = _array(batch, "input_ids")
        if wants_one and ids is not None and ids.ndim == 3:
            # Multiple choice.
            num_classes = ids.shape[1]
        is_multi_label = self.may_be_multi_label and labels.dtype.kind in "fb" and labels.shape[1:] == (num_classes,)
        if is_multi_label:
            return
        if labels.dtype.kind not in "iu" or labels.dtype.itemsize < np.dtype(np.int32).itemsize:
            raise ValueError(
                f"column 'labels' has {labels.dtype} numbers, {labels.reshape(-1)[:1].tolist()} in sample "
                f"{_sample(batch, 0)} (rank {rank}); this model's loss takes classes, which are int32 or int64. For "
                'several labels per sample set config.problem_type = "multi_label_classification", for numbers '
                '"regression"'
            )
        if wants_one and math.prod(labels.shape[1:]) != 1:
            raise ValueError(
                f"column 'labels' has {math.prod(labels.shape[1:])} integers for sample {_sample(batch, 0)} (rank "
                f"{rank}), and this model's loss takes one class; for several labels per sample set "
                'config.problem_type = "multi_label_classification"'
            )
        ignored = self.mean.ignored if self.mean is not None else None
        _check_range("labels", labels, num_classes, batch, expected="a class", rank=rank, ignored=ignored)


def column_checks(model: Any, *, has_own_loss: bool = False, is_sharded: bool = False) -> ColumnChecks:
    """Return the checks for a model of MindNLP or Transformers; for any other model they check nothing.

    Args:
        model: the model, or a PEFT model.
        has_own_loss: whether another loss than the model's own takes the labels, which may then be anything.
        is_sharded: whether this rank has shards of the embeddings.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    mean, config = loss_mean(model), getattr(base, "config", None)
    if mean is None:
        return ColumnChecks(None)
    in_config = getattr(config, "vocab_size", None)
    embeddings = _rows_of(base, "get_input_embeddings")
    has_classes = getattr(config, "problem_type", None) != "multi_label_classification" and not has_own_loss
    if mean.task in (Task.CLASSIFICATION, Task.TOKEN_CLASSIFICATION):
        # The classes of sentence pairs are two, whatever the configuration says.
        is_counted = "NextSentence" not in type(base).__name__
        num_classes = getattr(config, "num_labels", None) if is_counted else None
    else:
        num_classes = in_config if is_sharded else _rows_of(base, "get_output_embeddings")
    return ColumnChecks(
        mean if has_classes else None,
        num_classes,
        vocab_size=in_config if is_sharded else embeddings,
        # Models of several kinds of inputs replace some ids, which need not be tokens.
        takes_tokens=embeddings is not None and "pixel_values" not in inspect.signature(base.forward).parameters,
        may_be_multi_label=getattr(config, "problem_type", None) is None,
    )


def _rows_of(model: Any, getter: str) -> Optional[int]:
    """Return the number of rows of a model's input or output embeddings; None if it has none, or of another kind."""
    try:
        weight = getattr(getattr(model, getter)(), "weight", None)
    except (AttributeError, NotImplementedError, TypeError):
        return None
    return int(weight.shape[0]) if weight is not None and weight.ndim == 2 else None


def _check_range(
    name: str,
    values: np.ndarray,
    end: Optional[int],
    batch: Mapping[str, Any],
    *,
    expected: str,
    rank: str,
    ignored: Optional[int] = None,
) -> None:
    # One pass for most batches.
    if not values.size or (values.min() >= 0 and (end is None or values.max() < end)):
        return
    is_wrong = values < 0 if end is None else (values < 0) | (values >= end)
    if ignored is not None:
        is_wrong &= values != ignored
    if not is_wrong.any():
        return
    row = int(np.argwhere(is_wrong)[0][0]) if values.ndim else 0
    limits = f"from 0 to {end - 1}" if end is not None else "not negative"
    unless = "" if ignored is None else f", or {ignored} for a label that does not count"
    raise ValueError(
        f"column {name!r} has {values[is_wrong][0]} in sample {_sample(batch, row)} (rank {rank}), expected {expected} "
        f"{limits}{unless}"
    )


def _array(batch: Mapping[str, Any], name: str) -> Optional[np.ndarray]:
    column = batch.get(name)
    return None if column is None or not hasattr(column, "dtype") else to_host(column)


def _sample(batch: Any, row: int) -> int:
    """Return the number of a batch's row in the data set, or in the batch if that is unknown."""
    indices = getattr(batch, "indices", None)
    return row if indices is None or row >= len(indices) else int(indices[row])
