"""Runs the forward and backward passes of an update, for replicated and for sharded models.

:class:`~mindnlp_dp.training.make_train_step.FunctionalStep` calls it with the micro-batches of an update.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Optional

from mindnlp_dp.data.batches import call_with
from mindnlp_dp.data_parallel.accumulation import GradientAccumulator
from mindnlp_dp.data_parallel.micro_step import MicroStep
from mindnlp_dp.parallel.pipeline_parallel.micro_batch import MicroBatch
from mindnlp_dp.runtime.random_state import seeded

if TYPE_CHECKING:
    from mindnlp_dp.parallel.parallel_model import ParallelModel


class ForwardBackward:
    """Runs ``forward_fn`` and its backward pass on the micro-batches of an update.

    Args:
        forward_fn: function from a batch to its mean loss.
        gradient_fn: function from a batch to that loss and the gradients of ``parameters``.
        parallel: the sharded model; None if every rank has the full model.
        data_rank: this rank's number among the ranks that split the samples.

    Attributes:
        seed_rank: the rank from which the seed of the randomness inside the model is computed, besides the step.
    """

    def __init__(
        self,
        forward_fn: Callable[..., Any],
        gradient_fn: Callable[..., tuple[Any, Sequence[Any]]],
        parameters: Sequence[Any],
        parallel: Optional[ParallelModel],
        data_rank: int,
    ) -> None:
        self._forward_fn = forward_fn
        self._gradient_fn = gradient_fn
        self._parameters = parameters
        self._parallel = parallel
        self.seed_rank = data_rank if parallel is None else parallel.seed_rank

    def micro_steps(
        self,
        window: Sequence[Any],
        weight_of: Callable[[Any], float],
        seed_of: Callable[[int], int],
        exchange: GradientAccumulator,
    ) -> Iterator[MicroStep]:
        """Yield the result of each micro-batch; a micro-batch of weight 0 is not computed.

        With experts, a rank without a micro-batch runs a dummy batch, because other ranks need its experts.
        """
        parallel = self._parallel
        if parallel is not None and parallel.pipeline is not None:
            batches = [
                MicroBatch(
                    batch, functools.partial(call_with, self._forward_fn), weight_of, seed=seed_of(number),
                    indices=getattr(batch, "indices", None),
                )
                for number, batch in enumerate(window)
                if weight_of(batch) > 0
            ]  # fmt: skip
            for batch in window:
                if batch is not None and weight_of(batch) == 0:
                    yield MicroStep.without_weight(getattr(batch, "indices", None))
            yield from parallel.pipeline.run(batches, self._parameters)
            return
        for number, mine in enumerate(window):
            weight, batch = weight_of(mine), mine
            if parallel is not None and parallel.has_experts:
                batch = parallel.dummy_batch_for(batch if weight > 0 else None)
                if batch is None:
                    if mine is not None:
                        yield MicroStep.without_weight(getattr(mine, "indices", None))
                    continue
            elif weight == 0:
                if batch is not None:
                    yield MicroStep.without_weight(getattr(batch, "indices", None))
                continue
            is_last = number + 1 == len(window)
            sending = exchange.backward(weight) if is_last else contextlib.nullcontext()
            among = contextlib.nullcontext() if parallel is None else parallel.micro_step(weight)
            with seeded(seed_of(number)), sending, among:
                loss, gradients = call_with(self._gradient_fn, batch)
            # The loss of a dummy batch belongs to another rank.
            value = float(loss.asnumpy()) if weight > 0 else 0.0
            has_nonfinite_peer = parallel is not None and parallel.has_nonfinite_peer(value)
            yield MicroStep(value, gradients, weight, getattr(batch, "indices", None), has_nonfinite_peer)


def parallel_of(parameters: Sequence[Any]) -> Optional[ParallelModel]:
    """Return the sharded model that the parameters belong to, or None if they belong to none."""
    return next((p.parallel for p in parameters if getattr(p, "parallel", None) is not None), None)
