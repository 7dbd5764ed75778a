"""Defines a micro-batch of a pipeline and this rank's share of it.

If the ranks of a stage split the rows of a micro-batch, each computes with its share of the rows, which contributes a
fraction of the loss. The trainers and custom loops make micro-batches; the pipeline makes shares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Optional

import numpy as np

from mindnlp_dp.data.batches import num_rows_of, rows_of, streams_of
from mindnlp_dp.runtime.random_state import MaskRecord


class PipelineMicroBatch:
    """One micro-batch of a pipeline.

    Args:
        batch: the columns, which all stages read.
        forward: function that computes the mean loss of a batch with the model; on all stages but the last, the model
            ends it early by raising ``StageOutput``.
        loss_weight_of: function from a batch to the weight of its loss.
        seed: seed of the randomness inside the model, on this rank.
        key: key of the samples' random streams (:class:`~mindnlp_dp.runtime.random_state.SampleStreams`); None if each
            rank draws its own dropout masks.
        indices: indices of the samples, if known.
        masks: what dropout masks were drawn for, in all updates of the run.

    Attributes:
        loss_weight: the weight of the loss.
        num_rows: number of samples.
    """

    def __init__(
        self,
        batch: Any,
        forward: Callable[[Any], Any],
        loss_weight_of: Callable[[Any], float],
        *,
        seed: int,
        key: Optional[int] = None,
        indices: Optional[np.ndarray] = None,
        masks: Optional[MaskRecord] = None,
    ) -> None:
        self.batch, self.forward, self.loss_weight_of, self.masks = (
            batch,
            forward,
            loss_weight_of,
            masks or MaskRecord(),
        )
        self.seed, self.key, self.indices = seed, key, indices
        self.loss_weight, self.num_rows = loss_weight_of(batch), num_rows_of(batch)


class MicroBatchShard:
    """This rank's share of a micro-batch.

    The loss of the micro-batch is the mean of the shares' losses. It is weighted by ``loss_weight_of`` if these weights
    add up to the weight of the micro-batch, otherwise by rows.

    Attributes:
        micro: the micro-batch.
        number: number of the micro-batch in the update.
        batch: this rank's rows: all rows if its stage does not split them, None if this rank has no rows.
        part: fraction of the micro-batch's loss that comes from these rows.
        streams: the random streams of these rows; None if each rank draws its own dropout masks.
        first_call: number of this stage's first dropout call.
    """

    def __init__(
        self, micro: PipelineMicroBatch, number: int, rows_of_each: Sequence[tuple[int, int]], place: int
    ) -> None:
        self.micro, self.number = micro, number
        self.batch, self.part, self.first_call = micro.batch, 1.0, 0
        if len(rows_of_each) > 1:
            parts = [rows_of(micro.batch, *rows) if rows[0] < rows[1] else None for rows in rows_of_each]
            weights = [0.0 if part is None else float(micro.loss_weight_of(part)) for part in parts]
            if not math.isclose(sum(weights), micro.loss_weight, rel_tol=1e-6):
                # These weights only compare micro-batches; within the micro-batch, every row counts the same.
                weights = [float(end - begin) for begin, end in rows_of_each]
            self.batch, self.part = parts[place], weights[place] / (sum(weights) or 1.0)
        self.streams = None if micro.key is None else streams_of(self.batch, micro.key, micro.masks)
