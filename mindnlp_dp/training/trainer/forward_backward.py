"""This module runs the forward and backward passes of an update with the Trainer's methods, for the training loop.

It yields the loss and gradients of each of this rank's micro-batches of a window. If the model is sharded, a pipeline
stage runs its part of all micro-batches, and a rank without samples runs a dummy batch if others need its experts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Optional

from mindnlp_dp.data.batches import Batch
from mindnlp_dp.data.loss_weight import checked_weight
from mindnlp_dp.data_parallel.micro_step import MicroStep
from mindnlp_dp.data_parallel.model_scope import ModelScope
from mindnlp_dp.runtime.random_state import seeded, step_seed

if TYPE_CHECKING:
    from mindnlp_dp.parallel.parallel_model import ParallelModel


class TrainerForwardBackward:
    """Runs the passes of a Trainer whose model is sharded as ``parallel`` says; None: every rank has the full model."""

    def __init__(self, parallel: Optional[ParallelModel]) -> None:
        self._parallel = parallel

    def scope(self, optimizer: Any, parameters: Sequence[Any]) -> Optional[ModelScope]:
        """Check the optimizer, and return which parameters this rank counts in a norm of the full model (None: all)."""
        if self._parallel is None:
            return None
        self._parallel.check_optimizer(optimizer)
        return self._parallel.scope(parameters)

    def resync_tied_weights(self) -> None:
        """Resync tied weights of pipeline stages; called after every update."""
        if self._parallel is not None:
            self._parallel.resync_tied_weights()

    def to_run(self, batch: Optional[Batch]) -> Optional[Batch]:
        """Return this rank's batch, or a dummy batch if other ranks need its experts; None if nothing is to be run."""
        has_experts = self._parallel is not None and self._parallel.has_experts
        return self._parallel.dummy_batch_for(batch) if has_experts else batch  # type: ignore[union-attr]

    def micro_steps(self, loop: Any, window: Sequence[Optional[Batch]], step: int) -> Iterator[MicroStep]:
        """Run this rank's micro-batches of a global batch and yield the results; ``loop`` is the Trainer's loop."""
        is_pipeline = self._parallel is not None and self._parallel.pipeline is not None
        run = self._through_stages if is_pipeline else self._one_by_one
        with loop.trainer.trainer_loss.span_loss().window(window):
            yield from run(loop, window, step)

    def _one_by_one(self, loop: Any, window: Sequence[Optional[Batch]], step: int) -> Iterator[MicroStep]:
        trainer, parallel = loop.trainer, self._parallel
        for number, mine in enumerate(window):
            inputs = None if mine is None else trainer.tensors(mine)
            # The mean loss of a micro-batch of weight 0, such as one with only ignored tokens, is 0 / 0.
            weight = 0.0 if inputs is None else checked_weight(trainer.loss_weight(inputs), trainer.group.label())
            batch = self.to_run(mine if weight > 0 else None)
            if batch is not None:
                inputs = inputs if batch is mine else trainer.tensors(batch)
                trainer.model.zero_grad()
                is_last = number + 1 == len(window)
                sending = loop.synchronizer.backward(weight) if is_last else contextlib.nullcontext()
                timed = loop.timeline.forward_and_backward(trainer.model, step=step, micro_step=number)
                among = contextlib.nullcontext() if parallel is None else parallel.micro_step(weight)
                with seeded(self._seed(trainer, step, number)), sending, timed, among:
                    value = trainer.loss_of_training_step(inputs)
                has_nonfinite_peer = parallel is not None and parallel.has_nonfinite_peer(value if weight > 0 else 0.0)
                gradients = [p.grad for p in loop.synchronizer.parameters]
                value = value if weight > 0 else 0.0
                yield MicroStep(value, gradients, weight, batch.indices, has_nonfinite_peer)
            elif mine is not None:
                yield MicroStep.without_weight(mine.indices)
            if mine is not None and weight > 0:
                loop.count(mine, inputs)
            if number + 1 < len(window):
                trainer.control = trainer.callback_handler.on_substep_end(loop.args, trainer.state, trainer.control)

    def _through_stages(self, loop: Any, window: Sequence[Optional[Batch]], step: int) -> Iterator[MicroStep]:
        from mindnlp_dp.parallel.pipeline_parallel.micro_batch import MicroBatch

        trainer, parallel = loop.trainer, self._parallel
        assert parallel is not None, "called for a pipeline only"
        assert parallel.pipeline is not None, "called for a pipeline only"
        batches = []

        def forward(inputs: Any) -> Any:
            trainer.model.train()
            return trainer.compute_loss(trainer.model, trainer._prepare_inputs(inputs))

        for number, batch in enumerate(window):
            if batch is None:
                continue
            inputs = trainer.tensors(batch)
            if checked_weight(trainer.loss_weight(inputs), trainer.group.label()) == 0:
                yield MicroStep.without_weight(batch.indices)
            else:
                seed = self._seed(trainer, step, number)
                batches.append(
                    MicroBatch(inputs, forward, trainer.loss_weight, seed=seed, indices=batch.indices)
                )  # fmt: skip
                loop.count(batch, inputs)

        def span(name: str, **details: Any) -> Any:
            return loop.timeline.span(name, step=step, **details)

        trainer.model.zero_grad()
        yield from parallel.pipeline.run(batches, loop.synchronizer.parameters, span)
        for _ in window[1:]:
            trainer.control = trainer.callback_handler.on_substep_end(loop.args, trainer.state, trainer.control)

    def _seed(self, trainer: Any, step: int, number: int) -> int:
        return step_seed(trainer.args.seed, trainer.whole.seed_rank, step, number)
