"""Runs the forward and backward passes of an update, for the Trainers and for custom training loops.

It yields the loss and the gradients of each of this rank's micro-batches. If the model is sharded, a pipeline stage
runs its part of all micro-batches, and a rank without samples runs a dummy batch if other ranks need its experts.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

import numpy as np

from mindnlp_dp.communication.batch_across_ranks import BatchAcrossRanks
from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.data.batches import streams_of
from mindnlp_dp.data.loss_weight import checked_weight
from mindnlp_dp.data_parallel.sync_batchnorm import has_synchronized_layers
from mindnlp_dp.data_parallel.synchronizer_base import MicroStep, Synchronizer
from mindnlp_dp.parallel.distributed_model import DistributedModel
from mindnlp_dp.parallel.pipeline_parallel.pipeline_micro_batch import PipelineMicroBatch
from mindnlp_dp.runtime.arrays import number_of
from mindnlp_dp.runtime.devices import is_on_cpu
from mindnlp_dp.runtime.random_state import MaskRecord, SampleStreams, seeded, step_seed, update_key
from mindnlp_dp.training.loss_check import LossCheck
from mindnlp_dp.training.timeline import StepTimeline

# How dropout masks are drawn, and over which tokens the router losses of mixtures of experts are.
GLOBAL = "global"
PER_RANK, LOCAL = "per-rank", "local"


def _nothing(*_: Any) -> None:
    pass


@dataclass
class ForwardBackward:
    """Runs the micro-batches of an update, which are batches, or None where this rank has none.

    Attributes:
        model: the model, replicated or sharded.
        synchronizer: exchanges the gradients, which may begin during the last backward pass.
        gradients_of: a function from a batch's inputs to its mean loss, a number or a scalar tensor, and the gradients
            of the synchronizer's parameters.
        forward: a function from a batch's inputs to its mean loss, for the stages of a pipeline.
        loss_weight_of: a function from a batch's inputs to the weight of its loss.
        inputs_of: a function from a batch to what the other functions take.
        timeline: records the passes.
        across_ranks: the rows of all ranks, for layers and losses that look at them.
        after_batch: called with each of this rank's batches that counts, and its inputs.
        after_micro_step: called between two micro-batches.
        dropout: "global": the masks of an update are those that one process with the whole batch would draw;
            "per-rank": each rank and micro-step draws its own.
        masks: what dropout masks were drawn for, in all updates of the run.
        check_columns: raises an error if a batch has labels or ids that the model cannot take.
        loss_check: finds out whether the loss is a mean by its weights; None if that is known.
    """

    model: DistributedModel
    synchronizer: Synchronizer
    gradients_of: Callable[[Any], tuple[Any, Sequence[Optional[Any]]]]
    forward: Callable[[Any], Any]
    loss_weight_of: Callable[[Any], float]
    timeline: StepTimeline
    across_ranks: BatchAcrossRanks
    inputs_of: Callable[[Any], Any] = field(default=lambda batch: batch)
    after_batch: Callable[[Any, Any], None] = _nothing
    after_micro_step: Callable[[], None] = _nothing
    dropout: str = GLOBAL
    masks: MaskRecord = field(default_factory=MaskRecord)
    check_columns: Callable[[Any], None] = _nothing
    loss_check: Optional[LossCheck] = None

    def micro_steps(self, micro_batches: Sequence[Optional[Any]], step: int, seed: int) -> Iterator[MicroStep]:
        """Yield the result of each micro-batch of update ``step``; one of weight 0 is not computed.

        The randomness inside the model is a function of ``seed``, the rank, the update and the micro-batch; dropout
        is one of ``seed``, the update and the samples' positions in the global batch.
        """
        yield from (self._one_by_one if self.model.pipeline is None else self._through_stages)(
            micro_batches, step, seed
        )

    def _one_by_one(self, micro_batches: Sequence[Optional[Any]], step: int, seed: int) -> Iterator[MicroStep]:
        if self.loss_check is not None:
            self.loss_check(micro_batches)
        key, weighed = self._key(seed, step), [(*self._weighed(mine), mine) for mine in micro_batches]
        present = [mine if loss_weight > 0 else None for _, loss_weight, mine in weighed]
        are_all_here = all(getattr(mine, "is_on_all_ranks", False) for mine in micro_batches)
        completed = self.across_ranks.complete(present, are_all_here=are_all_here)
        completed += [None] * (self.model.num_micro_steps(len(completed)) - len(completed))
        nothing = (None, 0.0, None)
        for number, (given, own) in enumerate(itertools.zip_longest(completed, weighed, fillvalue=nothing)):
            inputs, loss_weight, mine = own
            batch = self.model.dummy_batch_for(given)
            is_last = number + 1 == len(completed)
            if batch is not None:
                inputs = inputs if batch is mine else self.inputs_of(batch)
                share = loss_weight / self.model.loss_replication
                sending = self.synchronizer.backward(share) if is_last else contextlib.nullcontext()
                timed = self.timeline.forward_and_backward(self.model.model, step=step, micro_step=number)
                streams = None if key is None else self._streams(batch, key)
                with (
                    seeded(step_seed(seed, self.model.seed_rank, step, number), streams),
                    sending,
                    timed,
                    self.model.micro_step(loss_weight),
                    self.across_ranks.micro_step(loss_weight),
                ):
                    loss, gradients = self.gradients_of(inputs)
                self._warn(leaves_out=mine is not None and loss_weight == 0)
                # The loss of a dummy batch belongs to another rank.
                loss = self._loss_now_or_later(loss) if loss_weight > 0 else 0.0
                has_bad_peer = self.model.has_nonfinite_peer(loss) | self.across_ranks.has_nonfinite_peer(loss)
                replication = self.model.loss_replication
                yield MicroStep(
                    loss, gradients, loss_weight, _indices(batch), has_bad_peer, loss_replication=replication
                )
            elif mine is not None:
                yield MicroStep.without_weight(_indices(mine))
            if loss_weight > 0:
                self.after_batch(mine, inputs)
            if not is_last:
                self.after_micro_step()

    def _loss_now_or_later(self, loss: Any) -> Any:
        """Return a loss as a number, or as it is if the exchange reads it with its header and nothing needs it now."""
        is_needed = self.across_ranks.is_used or not self.synchronizer.defers_losses
        return number_of(loss) if is_needed else loss

    def _through_stages(self, micro_batches: Sequence[Optional[Any]], step: int, seed: int) -> Iterator[MicroStep]:
        batches, key = [], self._key(seed, step)
        for number, mine in enumerate(micro_batches):
            inputs, loss_weight = self._weighed(mine)
            if loss_weight > 0:
                own_seed = step_seed(seed, self.model.seed_rank, step, number)
                batches.append(
                    PipelineMicroBatch(
                        inputs,
                        self.forward,
                        self.loss_weight_of,
                        seed=own_seed,
                        key=key,
                        indices=_indices(mine),
                        masks=self.masks,
                    )
                )
                self.after_batch(mine, inputs)
            elif mine is not None:
                yield MicroStep.without_weight(_indices(mine))

        def span(name: str, **details: Any) -> contextlib.AbstractContextManager[None]:
            return self.timeline.span(name, step=step, **details)

        with self.across_ranks.refused("a pipeline, whose stages run the micro-batches at different times"):
            yield from self.model.pipeline.run(batches, self.synchronizer.parameters, span)
        self._warn()
        for _ in micro_batches[1:]:
            self.after_micro_step()

    def _key(self, seed: int, step: int) -> Optional[int]:
        """Return the key of the samples' random streams in this update; None if each rank draws its own masks."""
        if self.dropout != GLOBAL:
            return None
        if not is_on_cpu() and has_dropout(self.model.model):
            self.masks.doubt = "a device draws them"
            self._warn()
        return update_key(seed, step)

    def _streams(self, batch: Any, key: int) -> SampleStreams:
        config = getattr(self.model.model, "active_peft_config", None)
        return streams_of(batch, key, self.masks, getattr(config, "num_virtual_tokens", None) or 0)

    def _warn(self, *, leaves_out: bool = False) -> None:
        """Warn once if masks depend on the ranks, or if rows are left out of what the model sees of all ranks."""
        if self.masks.doubt and not self.masks.has_warned:
            self.masks.has_warned = True
            warnings.warn(
                "dropout: another number of ranks or micro-steps would draw other masks than those of rank "
                f"{self.model.world.label()}, because {self.masks.doubt}",
                RuntimeWarning,
                stacklevel=2,
            )
        if leaves_out and self.across_ranks.is_used:
            _warn_of_rows_left_out(self.model.world.label())

    def _weighed(self, batch: Optional[Any]) -> tuple[Any, float]:
        """Return the inputs of a batch and the weight of its loss; the mean loss of a batch of weight 0 is 0 / 0."""
        if batch is not None:
            self.check_columns(batch)
        inputs = None if batch is None else self.inputs_of(batch)
        loss_weight = (
            0.0 if batch is None else checked_weight(self.loss_weight_of(inputs), self.synchronizer.group.label())
        )
        return inputs, loss_weight


def check_dropout(dropout: str) -> str:
    """Return ``dropout``; raise ValueError if it is neither "global" nor "per-rank"."""
    if dropout not in (GLOBAL, PER_RANK):
        raise ValueError(f"dropout must be {GLOBAL!r} or {PER_RANK!r}, got {dropout!r}")
    return dropout


def has_dropout(model: Any) -> bool:
    """Return whether a model of MindNLP has a layer that drops elements."""
    modules = model.modules() if hasattr(model, "modules") else ()
    return any(getattr(module, "p", 0) for module in modules if "Dropout" in type(module).__name__)


def across_ranks(group: ProcessGroup, router_loss: str, model: Any) -> BatchAcrossRanks:
    """Return the rows of all ranks of a new run; raise ValueError if ``router_loss`` is unknown."""
    if router_loss not in (GLOBAL, LOCAL):
        raise ValueError(f"router_loss must be {GLOBAL!r} or {LOCAL!r}, got {router_loss!r}")
    rows = BatchAcrossRanks(group, has_local_router_loss=router_loss == LOCAL)
    rows.is_used = has_synchronized_layers(model)
    return rows


@functools.cache
def _warn_of_rows_left_out(rank: str) -> None:
    warnings.warn(
        f"a micro-batch of rank {rank} has no label that counts, so its loss has no gradient: its rows are left "
        "out where the model uses the rows of all ranks, but one process would include them",
        RuntimeWarning,
        stacklevel=2,
    )


def _indices(batch: Any) -> Optional[np.ndarray]:
    return getattr(batch, "indices", None)
