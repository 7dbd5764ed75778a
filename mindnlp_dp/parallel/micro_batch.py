"""What goes through a pipeline at a time, and a rank's share of it.

Goes in: a batch that all stages of a row read. Comes out: the rows that a rank computes with, where ranks of a stage
share them out, and the part that they have of the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Optional

import numpy as np

from mindnlp_dp.data.batches import num_rows_of, rows_of


class MicroBatch:
    """What goes through the pipeline at a time.

    Args:
        batch: the columns that all stages read.
        forward: computes the mean loss of a batch by the model; on stages that are not the last, the model ends it
            before.
        weight_of: what the loss of a batch weighs.
        seed: of the randomness in it, on this rank.
        indices: which samples it has, where that is known.

    Attributes:
        weight: of its loss.
        num_rows: its samples.
    """

    def __init__(
        self,
        batch: Any,
        forward: Callable[[Any], Any],
        weight_of: Callable[[Any], float],
        *,
        seed: int,
        indices: Optional[np.ndarray] = None,
    ) -> None:
        self.batch, self.forward, self.weight_of = batch, forward, weight_of
        self.seed, self.indices = seed, indices
        self.weight, self.num_rows = weight_of(batch), num_rows_of(batch)


class Share:
    """This rank's part of a micro batch.

    Its loss is the mean of the shares' losses by ``weight_of``, where the weights of the shares add up to the whole's,
    else by rows.

    Attributes:
        micro: the micro batch.
        number: of it, in the window.
        batch: this rank's rows, all of them where its stage does not share them out; None where there are none.
        part: of the micro batch's loss.
    """

    def __init__(self, micro: MicroBatch, number: int, rows_of_each: Sequence[tuple[int, int]], place: int) -> None:
        self.micro, self.number = micro, number
        self.batch, self.part = micro.batch, 1.0
        if len(rows_of_each) > 1:
            parts = [rows_of(micro.batch, *rows) if rows[0] < rows[1] else None for rows in rows_of_each]
            weights = [0.0 if part is None else float(micro.weight_of(part)) for part in parts]
            if not math.isclose(sum(weights), micro.weight, rel_tol=1e-6):
                # They say what a micro batch counts among others, and not what its rows do in its mean: each as much.
                weights = [float(end - begin) for begin, end in rows_of_each]
            self.batch, self.part = parts[place], weights[place] / (sum(weights) or 1.0)
