"""Runs the micro-batches of an update through the stages of a pipeline, several at a time.

The trainers and custom loops call :meth:`Pipeline.run` on every rank with its stage (stages.py). It yields the loss of
each micro-batch, on every stage, and the gradients of this stage's parameters, in the order in which the backward
passes end (pipeline_schedules/schedules.py). MindSpore's autograd keeps the graph of every micro-batch in flight.

If N ranks split the samples of a micro-batch, each multiplies the gradients of its rows by N and uses 1/N of the
weight, so that the gradient exchange, which is a weighted mean, sums them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Optional

import numpy as np
from mindnlp.core.nn import Parameter
from mindspore import _c_expression

from mindnlp_dp.communication.p2p import ACTIVATIONS, GRADIENTS
from mindnlp_dp.data_parallel.synchronizer_base import MicroStep
from mindnlp_dp.parallel.device_mesh import DeviceMesh
from mindnlp_dp.parallel.pipeline_parallel.pipeline_micro_batch import MicroBatchShard, PipelineMicroBatch
from mindnlp_dp.parallel.pipeline_parallel.stage_messages import StageP2P, to_arrays, to_tensors
from mindnlp_dp.parallel.pipeline_parallel.stages import StageInput, StageOutput
from mindnlp_dp.parallel.pipeline_parallel.tied_weights import TiedGradients, TiedParameter
from mindnlp_dp.pipeline_schedules.schedules import FORWARD, Action, actions, check_schedule, link_order
from mindnlp_dp.runtime.arrays import dtype_name, from_host, number_of
from mindnlp_dp.runtime.autograd import as_leaf_parameters
from mindnlp_dp.runtime.random_state import num_calls, seeded

Span = Callable[..., Any]


def no_span(name: str, **details: Any) -> Any:
    """Return an empty context, for callers that do not measure times."""
    return contextlib.nullcontext()


def check_pipeline(schedule: str) -> str:
    """Return the name of the schedule; raise ValueError if it is unknown, or if MindSpore cannot run a pipeline."""
    if not hasattr(_c_expression, "run_backward"):
        raise ValueError("a pipeline needs an autograd whose graphs stay alive: MindSpore 2.8 or later")
    return check_schedule(schedule)


class Pipeline:
    """This rank's stage of a pipeline.

    Attributes:
        schedule: "1f1b", "gpipe" or "eager-1f1b".
        most_in_flight: maximum number of micro-batches between forward and backward pass, in the last update.
        messages: point-to-point messages with the previous and the next stage.
        ties: tied parameters that this stage shares with other stages.
    """

    def __init__(self, model: Any, mesh: DeviceMesh, stage_input: StageInput, schedule: str = "1f1b") -> None:
        self.mesh = mesh
        self.stage, self.num_stages = mesh.index("pp"), mesh.sizes["pp"]
        self.schedule = check_pipeline(schedule)
        self.most_in_flight = 0
        self.messages = StageP2P(mesh)
        self.ties: list[TiedParameter] = []
        self._is_first, self._is_last = mesh.is_first_stage, mesh.is_last_stage
        self._stage_input = stage_input
        self._config: Any = getattr(model, "config", None)
        if self._config is not None and getattr(self._config, "use_cache", False):
            # A stage has only the keys and values of its layers.
            self._config.use_cache = False
        if hasattr(model, "generate"):
            model.generate = _cannot_generate
        self._stage_forward = model.forward
        self._is_training = False
        self._sharers = mesh.group("dp_in_stage")
        self._num_losses = 0
        # Where messages are matched in order: the error that left messages which no rank receives.
        self._broken_by = ""
        # Keep the signature, which is read, for example, to find the columns that the model uses.
        model.forward = functools.update_wrapper(functools.partial(self._forward), model.forward)

    @property
    def num_tied(self) -> int:
        """The number of elements of the trained tied parameters that this stage shares with others."""
        return sum(int(tie.parameter.size) for tie in self.ties if tie.parameter.requires_grad)

    # Outside of training.

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run this stage in training; otherwise run all stages and return the model's output on every rank."""
        for name in ("output_hidden_states", "output_attentions"):
            if kwargs.get(name) or getattr(self._config, name, False):
                raise ValueError(
                    f"{name} is not supported with pp, whose stages have only their own layers; leave out {name} or pp"
                )
        if self._is_training:
            return self._stage_forward(*args, **kwargs)
        self._check_usable()
        messages, stage = self.messages, self.stage
        messages.begin()
        if not self._is_first:
            self._stage_input.put(messages.receive(stage - 1, 0, ACTIVATIONS)[0])
        outputs = None
        try:
            outputs = self._stage_forward(*args, **kwargs)
        except StageOutput as output:
            messages.send(output.hidden_states, stage + 1, 0, ACTIVATIONS)
        packed = to_arrays(outputs) if self._is_last else None
        outputs = to_tensors(
            self.mesh.model_parallel_group.broadcast_object(packed, self.mesh.row(self.num_stages - 1)[0])
        )
        messages.p2p.wait()
        return outputs

    # An update.

    def run(
        self, batches: Sequence[PipelineMicroBatch], parameters: Sequence[Any], span: Span = no_span
    ) -> Iterator[MicroStep]:
        """Run the micro-batches of an update through the pipeline; all stages of a row pass the same number of them.

        The gradients are in the order of ``parameters``. Gradients of tied parameters are summed over the stages and
        the update, and come with the last micro-step.
        """
        from mindnlp_dp.runtime.pynative_executor import pynative_executor

        self._check_usable()
        is_last = self._is_last
        self.messages.begin(() if is_last else link_order(self.schedule, self.stage, self.num_stages, len(batches)))
        as_leaf_parameters(parameters)
        ties, order = TiedGradients(self.ties, parameters), self._actions(len(batches))
        loss_replication = self._sharers.world_size
        graphs: dict[int, tuple[Any, Any]] = {}
        kept: Optional[MicroStep] = None
        self.most_in_flight, self._num_losses = 0, 0
        try:
            shares = [self._share(batch, number) for number, batch in enumerate(batches)]
            while order:
                kind, number = order[0]
                batch, share = batches[number], shares[number]
                details = {"micro_step": number, "stage": self.stage}
                with span("wait", **details):
                    received_with_loss = self._receive(kind, number, batch.num_rows)
                with span(kind, **details):
                    if kind == FORWARD:
                        graphs[number] = self._run_forward(share, received_with_loss)
                        self.most_in_flight = max(self.most_in_flight, len(graphs))
                        order.popleft()
                        continue
                    received, output = graphs.pop(number)
                    loss = self._loss(share, output, received_with_loss)
                    gradients = self._run_backward(share, (received, output), (received_with_loss[0], loss), parameters)
                    order.popleft()
                    result = functools.partial(
                        MicroStep, loss_weight=batch.loss_weight, indices=batch.indices,
                        loss_replication=loss_replication,
                    )  # fmt: skip
                    # Yield within the span: accumulating the gradients counts as part of the backward pass.
                    if not np.isfinite(loss):
                        yield result(loss, gradients)
                        continue
                    if kept is not None:
                        yield kept
                    mine = ties.take(gradients, batch.loss_weight / loss_replication)
                    kept = result(loss, mine)
            pynative_executor.set_grad_flag(False)
            if kept is not None and kept.gradients is not None:
                yield dataclasses.replace(kept, gradients=ties.put(kept.gradients, kept.loss_weight))
            self.messages.p2p.wait()
        except BaseException as error:
            # Where messages are matched in order, an abort would be taken for another message: this rank must end, and
            # the launcher then ends the others, which wait for it.
            if self.messages.p2p.is_in_order:
                self._broken_by = f"{type(error).__name__}: {error}"
            else:
                self._abort(order, batches, waits=not isinstance(error, (KeyboardInterrupt, SystemExit)))
            self.messages.p2p.abandon()
            pynative_executor.set_grad_flag(False)
            pynative_executor.clear_res()
            raise

    def _check_usable(self) -> None:
        if self._broken_by:
            raise RuntimeError(
                f"the pipeline of rank {self.mesh.world.label()} cannot continue after an error in an update "
                f"({self._broken_by}): messages between its stages are lost; end the job, and resume from a checkpoint"
            )

    def _actions(self, num_micro_batches: int) -> deque[Action]:
        return deque(actions(self.schedule, self.stage, self.num_stages, num_micro_batches))

    def _share(self, batch: PipelineMicroBatch, number: int) -> MicroBatchShard:
        return MicroBatchShard(batch, number, self.messages.rows_of_each(batch.num_rows), self._sharers.rank)

    def _computes(self, share: MicroBatchShard) -> bool:
        """Return whether this rank has rows to compute; the last stage skips rows of weight 0 (ignored tokens)."""
        return share.batch is not None and (share.part > 0 or not self._is_last)

    def _abort(self, left: Iterable[Action], batches: Sequence[PipelineMicroBatch], *, waits: bool) -> None:
        """Abort all messages left to send; if ``waits``, report the failure to the ranks that split the samples."""
        for kind, number in left:
            num_rows = batches[number].num_rows
            if kind == FORWARD and not self._is_last:
                self.messages.send_abort(self.stage + 1, number, ACTIVATIONS, num_rows)
            elif kind != FORWARD and not self._is_first:
                self.messages.send_abort(self.stage - 1, number, GRADIENTS, num_rows)
        # Take part in the remaining all-reduces of losses, in the order of the backward passes, and report a failure.
        backward = [number for kind, number in self._actions(len(batches)) if kind != FORWARD]
        for number in backward[self._num_losses :] if waits else ():
            if self._reports_losses(batches[number]):
                self._sharers.all_reduce(np.array([0.0, 1.0]), every_step=True)

    def _receive(self, kind: str, number: int, num_rows: int) -> tuple[Any, float]:
        """Return the input of a pass and the loss that came with it; the ends of the pipeline receive nothing."""
        if kind == FORWARD:
            stage, direction, is_end = self.stage - 1, ACTIVATIONS, self._is_first
        else:
            stage, direction, is_end = self.stage + 1, GRADIENTS, self._is_last
        return (None, 0.0) if is_end else self.messages.receive(stage, number, direction, num_rows=num_rows)

    def _run_forward(self, share: MicroBatchShard, received_with_loss: tuple[Any, float]) -> tuple[Any, Any]:
        """Run a forward pass; return what the stage received and its output (None without rows to compute)."""
        received, note = received_with_loss
        # The stages number their dropout calls one after another, as the whole model does.
        share.first_call = int(note)
        output = None
        if self._computes(share):
            received, output = self._compute(received, share)
        if not self._is_last:
            self.messages.send(
                output, self.stage + 1, share.number, ACTIVATIONS, num_rows=share.micro.num_rows, note=num_calls()
            )
        return received, output

    def _compute(self, received: Any, share: MicroBatchShard) -> tuple[Any, Any]:
        from mindnlp_dp.runtime.pynative_executor import pynative_executor

        if received is not None:
            # Make it a leaf of the graph, because its gradient is sent to the previous stage.
            received = Parameter(received)
            self._stage_input.put(received)
        self._is_training = True
        pynative_executor.set_grad_flag(True)
        try:
            with seeded(share.micro.seed, share.streams, num_calls=share.first_call):
                output = share.micro.forward(share.batch)
            if not self._is_last:
                raise RuntimeError(
                    f"the model was not called in the forward pass of rank {self.mesh.world.label()}, or not directly"
                )
        except StageOutput as stage_output:
            output = stage_output.hidden_states
        finally:
            self._is_training = False
            # The backward pass is not differentiated.
            pynative_executor.set_grad_flag(False)
        return received, output

    def _reports_losses(self, batch: PipelineMicroBatch) -> bool:
        """Return whether the ranks of this stage must sum their parts of the loss, or some do not receive it."""
        loss_replication = self._sharers.world_size
        return loss_replication > 1 and (self._is_last or batch.num_rows < loss_replication)

    def _loss(self, share: MicroBatchShard, output: Any, received_with_loss: tuple[Any, float]) -> float:
        """Return the loss of the full micro-batch. A collective of the ranks that split it, if they need it."""
        mine = received_with_loss[1]
        if self._is_last:
            mine = 0.0 if output is None else share.part * number_of(output)
        self._num_losses += 1
        if not self._reports_losses(share.micro):
            return mine
        if not self._is_last and self._sharers.rank:
            # The received loss is the full loss already: count it once, on the first rank, which always has rows.
            mine = 0.0
        loss, num_failed = self._sharers.all_reduce(np.array([mine, 0.0]), every_step=True)
        if num_failed:
            raise ValueError(
                f"a rank that splits the samples of a micro-batch with rank {self.mesh.world.label()} has failed; "
                "its own error says why"
            )
        return float(loss)

    def _run_backward(
        self,
        share: MicroBatchShard,
        graph: tuple[Any, Any],
        received_with_loss: tuple[Any, float],
        parameters: Sequence[Any],
    ) -> list[Optional[Any]]:
        (received, output), (incoming, loss) = graph, received_with_loss
        gradients: list[Optional[Any]] = [None] * len(parameters)
        down = None
        if output is not None:
            gradients, down = self._differentiate(share, received, output, incoming, parameters)
        if received is not None:
            down = _zeros_like(received) if down is None else down
            self.messages.send(down, self.stage - 1, share.number, GRADIENTS, num_rows=share.micro.num_rows, note=loss)
        # As in one process, an unused parameter has a gradient of zeros, so that the optimizer applies weight decay.
        return [_zeros_like(p) if gradient is None else gradient for p, gradient in zip(parameters, gradients)]

    def _differentiate(
        self, share: MicroBatchShard, received: Any, output: Any, incoming: Any, parameters: Sequence[Any]
    ) -> tuple[list[Optional[Any]], Optional[Any]]:
        """Return the gradients of the parameters, and of what the stage received (None if it received nothing)."""
        loss_replication = self._sharers.world_size
        if self._is_last:
            root = np.full(output.shape, loss_replication * share.part, np.float32)
            incoming = from_host(root, dtype_name(output))
        elif loss_replication > 1:
            incoming = incoming * loss_replication
        wanted = tuple(parameters) if received is None else (*parameters, received)
        gradients = list(
            _c_expression.run_backward((output,), (incoming,), False, False, wanted, True, accumulate_grad=False)
        )
        if received is None:
            return gradients, None
        down = gradients.pop()
        return gradients, down / loss_replication if down is not None and loss_replication > 1 else down


def _zeros_like(x: Any) -> Any:
    return from_host(np.zeros(tuple(x.shape), np.float32), dtype_name(x))


def _cannot_generate(*args: Any, **kwargs: Any) -> Any:
    raise ValueError(
        "generate() needs the keys and values of all layers, of which a stage has its own; save the model, and load it "
        "in one process, or with tp alone"
    )
