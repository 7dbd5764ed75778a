"""A pipeline: the micro batches of a window go through the stages, several at a time.

Goes in: this rank's stage of a model (stages.py), and the micro batches of an update, which all stages of a row read.
Comes out: for each the loss, on every stage, and the gradients of this stage's parameters, in the order in which their
backward passes end (schedule.py). MindSpore's autograd keeps the graph of every micro batch that is in flight; with
``recompute`` only what the stage received is kept, and its forward pass runs once more before the backward one.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Optional

import numpy as np
from mindnlp.core.nn import Parameter
from mindspore import Tensor, _c_expression

from mindnlp_dp.arrays.conversion import from_host
from mindnlp_dp.arrays.types import dtype_name
from mindnlp_dp.communication.collectives import ProcessGroup
from mindnlp_dp.communication.wire import DOWN, UP, Wire
from mindnlp_dp.planner.schedule import FORWARD, Action, actions, check_schedule
from mindnlp_dp.runtime.autograd import make_leaves
from mindnlp_dp.step.seeds import seeded
from mindnlp_dp.step.train_step import MicroStep

from .mesh import DeviceMesh
from .outputs import to_arrays, to_tensors
from .stages import Inbox, StageOutput
from .ties import Ties

Span = Callable[..., Any]


def no_span(name: str, **details: Any) -> Any:
    """Where nobody asks for the times."""
    return contextlib.nullcontext()


class MicroBatch:
    """What goes through the pipeline at a time.

    Attributes:
        forward: computes its mean loss by the model; on stages that are not the last, the model ends it before.
        weight: of its loss.
        seed: of the randomness in it, on this stage.
        indices: which samples it has, where that is known.
    """

    def __init__(
        self, forward: Callable[[], Any], weight: float, seed: int, indices: Optional[np.ndarray] = None
    ) -> None:
        self.forward, self.weight, self.seed, self.indices = forward, weight, seed, indices


class Pipeline:
    """This rank's stage.

    Attributes:
        schedule: "1f1b", "gpipe" or "eager-1f1b".
        most_in_flight: micro batches between their forward and their backward pass, in the last window.
        wire: to the stages before and behind.
    """

    def __init__(
        self, model: Any, mesh: DeviceMesh, inbox: Inbox, schedule: str = "1f1b", *, recompute: bool = False
    ) -> None:
        if not hasattr(_c_expression, "run_backward"):
            raise ValueError("a pipeline needs an autograd whose graphs stay alive: MindSpore 2.8 or later")
        self.group: ProcessGroup = mesh.group("pp")
        self.schedule = check_schedule(schedule)
        self.recompute = recompute
        self.most_in_flight = 0
        self.wire = Wire(self.group)
        self._is_first, self._is_last = mesh.is_first_stage, mesh.is_last_stage
        self._inbox = inbox
        self._config: Any = getattr(model, "config", None)
        if self._config is not None and getattr(self._config, "use_cache", False):
            # Of keys and values: a stage has those of its own layers only.
            self._config.use_cache = False
        if hasattr(model, "generate"):
            model.generate = _cannot_generate
        self._stage_forward = model.forward
        self._is_training = False
        self._ties: list[tuple[Any, ProcessGroup]] = []
        # What reads its signature, such as who looks for columns, sees the model's.
        model.forward = functools.update_wrapper(functools.partial(self._forward), model.forward)

    def tie(self, parameter: Any, group: ProcessGroup) -> None:
        """Sum up the gradients of a parameter that the stages of ``group`` have in common."""
        self._ties.append((parameter, group))

    @property
    def num_tied(self) -> int:
        """How many numbers the parameters have that stages have in common."""
        return sum(int(parameter.size) for parameter, _ in self._ties)

    # Outside of training.

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward pass: of this stage in training, else of all stages, which all get its result."""
        for name in ("output_hidden_states", "output_attentions"):
            if kwargs.get(name) or getattr(self._config, name, False):
                raise ValueError(f"{name}: a stage has those of its own layers only; leave it out, or pp")
        if self._is_training:
            return self._stage_forward(*args, **kwargs)
        stage = self.group.rank
        self.wire.begin()
        if not self._is_first:
            self._inbox.put(self.wire.receive(stage - 1, 0, UP)[0])
        outputs = None
        try:
            outputs = self._stage_forward(*args, **kwargs)
        except StageOutput as output:
            self.wire.send(output.hidden_states, stage + 1, 0, UP)
        last = self.group.world_size - 1
        packed = to_arrays(outputs) if self._is_last else None
        outputs = to_tensors(self.group.broadcast_object(packed, last))
        self.wire.wait()
        return outputs

    # A window.

    def run(
        self, batches: Sequence[MicroBatch], parameters: Sequence[Any], span: Span = no_span
    ) -> Iterator[MicroStep]:
        """Run the micro batches of an update through the pipeline. All stages of a row call it with as many.

        Gradients are in the order of ``parameters``. Of those that stages have in common, the sum over these stages and
        the window comes with its last micro step.
        """
        from mindspore.common.api import _pynative_executor

        self.wire.begin()
        make_leaves(parameters)
        ties, order = Ties(self._ties, parameters), self._actions(len(batches))
        graphs: dict[int, tuple[Any, Any]] = {}
        kept: Optional[MicroStep] = None
        self.most_in_flight = 0
        try:
            while order:
                kind, number = order[0]
                batch = batches[number]
                details = {"micro_step": number, "stage": self.group.rank}
                with span("wait", **details):
                    came = self._receive(kind, number)
                with span(kind, **details):
                    if kind == FORWARD:
                        graphs[number] = self._run_forward(number, batch, came)
                        self.most_in_flight = max(self.most_in_flight, len(graphs))
                        order.popleft()
                        continue
                    loss, gradients = self._run_backward(number, batch, graphs.pop(number), came, parameters)
                    order.popleft()
                    # Whoever adds the gradients up does a part of the backward pass.
                    if not np.isfinite(loss):
                        yield MicroStep(loss, gradients, batch.weight, batch.indices)
                        continue
                    if kept is not None:
                        yield kept
                    kept = MicroStep(loss, ties.take(gradients, batch.weight), batch.weight, batch.indices)
            _pynative_executor.set_grad_flag(False)
            if kept is not None:
                yield MicroStep(kept.loss, ties.put(kept.gradients, kept.weight), kept.weight, kept.indices)
            self.wire.wait()
        except BaseException:
            self._call_off(order)
            self.wire.forget()
            _pynative_executor.set_grad_flag(False)
            _pynative_executor.clear_res()
            raise

    def _actions(self, num_micro_batches: int) -> deque[Action]:
        return deque(actions(self.schedule, self.group.rank, self.group.world_size, num_micro_batches))

    def _call_off(self, left: Iterable[Action]) -> None:
        """Tell the neighbours, who wait for what this stage had still to send, that nothing comes."""
        stage = self.group.rank
        for kind, number in left:
            if kind == FORWARD and not self._is_last:
                self.wire.call_off(stage + 1, number, UP)
            elif kind != FORWARD and not self._is_first:
                self.wire.call_off(stage - 1, number, DOWN)

    def _receive(self, kind: str, number: int) -> tuple[Any, float]:
        """What a pass begins with, and the loss that came with it; nothing at the ends of the pipeline."""
        stage = self.group.rank
        if kind == FORWARD:
            return (None, 0.0) if self._is_first else self.wire.receive(stage - 1, number, UP)
        return (None, 0.0) if self._is_last else self.wire.receive(stage + 1, number, DOWN)

    def _run_forward(self, number: int, batch: MicroBatch, came: tuple[Any, float]) -> tuple[Any, Any]:
        """What the stage received, and what it made of it, in a graph; only the first where that is recomputed."""
        received = came[0]
        if self.recompute and self._is_last:
            # Its forward pass comes with the backward one, which is next.
            return received, None
        received, output = self._compute(received, batch, records=not self.recompute)
        if not self._is_last:
            self.wire.send(output, self.group.rank + 1, number, UP)
        return received, None if self.recompute else output

    def _compute(self, received: Any, batch: MicroBatch, *, records: bool) -> tuple[Any, Any]:
        from mindspore.common.api import _pynative_executor

        if received is not None:
            # A leaf of its graph, whose gradient goes to the stage before.
            received = Parameter(received) if records else received
            self._inbox.put(received)
        self._is_training = True
        _pynative_executor.set_grad_flag(records)
        try:
            with seeded(batch.seed):
                output = batch.forward()
            if not self._is_last:
                raise RuntimeError(
                    f"the model was not called in the forward pass of stage {self.group.label()}, or not by itself"
                )
        except StageOutput as stage_output:
            output = stage_output.hidden_states
        finally:
            self._is_training = False
        return received, output

    def _run_backward(
        self,
        number: int,
        batch: MicroBatch,
        graph: tuple[Any, Any],
        came: tuple[Any, float],
        parameters: Sequence[Any],
    ) -> tuple[float, list[Optional[Any]]]:
        received, output = graph
        if output is None:
            received, output = self._compute(received, batch, records=True)
        stage = self.group.rank
        if self._is_last:
            loss, gradient = float(output.asnumpy()), Tensor(np.ones(output.shape, np.float32)).astype(output.dtype)
        else:
            gradient, loss = came
        wanted = tuple(parameters) if received is None else (*parameters, received)
        gradients = list(
            _c_expression.run_backward((output,), (gradient,), False, False, wanted, True, accumulate_grad=False)
        )
        if received is not None:
            down = gradients.pop()
            down = _zeros_like(received) if down is None else down
            self.wire.send(down, stage - 1, number, DOWN, note=loss)
        # As in one process, where what was not used has a gradient of zeros, by which optimizers decay it.
        return loss, [_zeros_like(p) if gradient is None else gradient for p, gradient in zip(parameters, gradients)]


def _zeros_like(x: Any) -> Any:
    return from_host(np.zeros(tuple(x.shape), np.float32), dtype_name(x))


def _cannot_generate(*args: Any, **kwargs: Any) -> Any:
    raise ValueError(
        "generate() needs the keys and values of all layers, of which a stage has its own; save the model, and load it "
        "in one process, or with tp alone"
    )
