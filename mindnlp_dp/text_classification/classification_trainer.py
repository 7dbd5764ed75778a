"""This module makes the Trainer of a classifier, whose loss may have class weights; finetune_classifier.py calls it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Optional

import numpy as np

import mindnlp_dp as dp
from mindnlp_dp.data.batches import default_collate
from mindnlp_dp.runtime.mindnlp_api import mindnlp_api


def balanced_weights(labels: np.ndarray, num_labels: int) -> np.ndarray:
    """Return a weight for each class, float32: samples / (classes * samples of the class, at least 1).

    >>> balanced_weights(np.array([0, 0, 0, 1]), 2).tolist()
    [0.6666666865348816, 2.0]
    """
    return (len(labels) / (num_labels * np.maximum(np.bincount(labels, minlength=num_labels), 1))).astype(np.float32)


def trimmed(samples: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Return a micro-batch without the columns of tokens that are padding in all its rows."""
    batch = default_collate(samples)
    mask = batch["attention_mask"]
    used = np.flatnonzero(mask.any(axis=0))
    return {
        name: column[:, used[0] : used[-1] + 1] if column.shape == mask.shape else column
        for name, column in batch.items()
    }


def _first_output(outputs: Any, labels: Any) -> Any:
    """Return the logits alone: models with an encoder and a decoder, such as BART, also return encoder states."""
    return outputs[0] if isinstance(outputs, (tuple, list)) else outputs


def make_trainer(class_weights: Optional[np.ndarray], *args: Any, **options: Any) -> Any:
    """Return the Trainer; its loss is the mean over rows, or over their class weights if these are given."""
    options["preprocess_logits_for_metrics"] = _first_output
    if class_weights is None:
        return dp.DataParallelTrainer(*args, **options)
    from mindspore import Tensor

    cross_entropy, weight = mindnlp_api().nn.functional.cross_entropy, Tensor(class_weights)

    class WeightedTrainer(dp.DataParallelTrainer):
        """Weighs every sample by its class."""

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
            outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
            loss = cross_entropy(outputs.logits, inputs["labels"], weight=weight)
            return (loss, outputs) if return_outputs else loss

        def loss_weight(self, inputs: Any) -> float:
            return dp.count_labels(inputs, weight=class_weights)

    return WeightedTrainer(*args, **options)
