"""A data-parallel training step for loops of one's own: MindNLP's models, and plain MindSpore cells.

Goes in: a function that computes a loss, an optimizer, parameters. Comes out: a function that does one update from this
rank's part of a global batch, by the same stages as the Trainer's (:mod:`mindnlp_dp.step`)::

    step = dp.make_train_step(forward_fn, optimizer, parameters)
    for batch in batches:                       # this rank's
        loss = step(batch)
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Callable, Optional, Union

import mindspore

from mindnlp_dp.checkpoint.whole_model import data_group
from mindnlp_dp.communication.collectives import ProcessGroup
from mindnlp_dp.gradients.reducer import ReducerWindow
from mindnlp_dp.gradients.synchronizer import GradientSynchronizer
from mindnlp_dp.gradients.window import GradientWindow
from mindnlp_dp.replicas.broadcast import broadcast_parameters
from mindnlp_dp.replicas.initialized import check_values
from mindnlp_dp.replicas.weights import named_weights
from mindnlp_dp.runtime.autograd import autograd_cleared_on_error
from mindnlp_dp.runtime.torch_like import torch_like
from mindnlp_dp.step.loss_weight import checked_weight
from mindnlp_dp.step.losses import LossMeter
from mindnlp_dp.step.model_of import BatchWeigher, model_of, modules_of
from mindnlp_dp.step.seeds import step_seed
from mindnlp_dp.step.span_loss import SpanLoss
from mindnlp_dp.step.train_step import MicroStep, TrainStep
from mindnlp_dp.update.choose import make_updater

from .passes import Passes, parallel_of


def make_train_step(
    forward_fn: Callable[..., Any],
    optimizer: Any,
    parameters: Sequence[Any],
    *,
    accumulation_steps: int = 1,
    max_grad_norm: Optional[float] = None,
    scheduler: Any = None,
    weight_of: Optional[Callable[[Any], float]] = None,
    model: Any = None,
    reducer: Optional[Callable[..., Any]] = None,
    jit: bool = False,
    seed: int = 0,
    leave_out_bad_losses: bool = True,
    zero_stage: Union[int, str] = "auto",
    group: Optional[ProcessGroup] = None,
    broadcast_weights: bool = True,
    **exchange: Any,
) -> FunctionalStep:
    """A step that every rank calls once an update, with its own part of the global batch.

    Args:
        forward_fn: from a batch to its mean loss, a scalar tensor. A batch that is a mapping is passed as keywords (its
            NumPy arrays as tensors), a tuple or list as arguments, anything else as the one argument.
        optimizer: MindNLP's (``mindnlp.core.optim``), or one of ``mindspore.nn``.
        parameters: those it updates, each once.
        accumulation_steps: micro batches in an update; the step is then called with a list of so many. (Or of fewer,
            where the data ends.)
        max_grad_norm: averaged gradients are clipped to this norm, together; None leaves them.
        scheduler: MindNLP's, stepped after every update. (``mindspore.nn``'s optimizers have schedules of their own.)
        weight_of: what a batch's loss weighs in the mean over ranks and micro batches. By default it is the number of
            whatever the loss of the model's class is a mean of (:func:`~mindnlp_dp.step.loss_weight.loss_mean`): rows
            of a classifier, labels that are not -100 of a language model; rows where the class is unknown. Pass it
            where ``forward_fn`` computes a loss of its own; :func:`~mindnlp_dp.count_labels` counts labels.
        model: the model that ``forward_fn`` calls; by default the one that it refers to and that has ``parameters``.
        reducer: exchanges gradients in our synchroniser's stead, such as ``nn.DistributedGradReducer(parameters)``.
        jit: compile loss and gradients with ``mindspore.jit``; for plain cells.
        seed: of what ``forward_fn`` draws, such as dropout: other numbers on every rank, in every update and micro
            step, and the same again in a run that is taken up. (Not for MindSpore's ``nn.Dropout``, whose kernel counts
            on by itself; ``ops.dropout`` and MindNLP's layers follow the seed.)
        leave_out_bad_losses: a loss that is NaN or infinite is left out with a warning; else it is the end, on all
            ranks.
        zero_stage: whether every rank updates everything (0), or a slice, whose optimizer state (1) and averaged
            gradients (2) it alone has. The weights are the same, to the bit. "auto" says what it takes; it divides the
            update where a host's ranks can share one set of weights. Whoever writes to weights between two updates
            sets it to 0, for ranks that share them would all write to the same ones. They are each rank's own again
            when the step is dropped (``del step``).
        group: the ranks that share out the samples; by default those of the model's mesh, else all.
        broadcast_weights: give every rank rank 0's weights and buffers, frozen ones included, of the models that
            ``forward_fn`` refers to, before the first update, as the Trainer does. Without it they must be the same.
        exchange: options of :class:`~mindnlp_dp.GradientSynchronizer`, such as ``overlap`` and ``compression``.

    Raises:
        ValueError: options that exclude each other, or a mesh that cuts models, while this one is whole.
        ReplicaMismatchError: the ranks' models differ in their names, shapes or types.
    """
    is_plain = isinstance(optimizer, mindspore.nn.Optimizer)
    if jit and not is_plain:
        raise ValueError(
            "jit=True is for plain cells with an optimizer of mindspore.nn; MindNLP's models run in PyNative"
        )
    if scheduler is not None and is_plain:
        raise ValueError("mindspore.nn's optimizers take a schedule as their learning_rate; leave scheduler out")
    if reducer is not None and exchange:
        raise ValueError(f"{', '.join(exchange)}: options of our own exchange, which a reducer takes the place of")
    if jit and reducer is None and exchange.setdefault("overlap", False) is not False:
        raise ValueError(
            "overlap needs the parameters' hooks, which mindspore.jit cannot compile; leave one of them out"
        )
    if accumulation_steps < 1:
        raise ValueError(f"accumulation_steps must be at least 1, got {accumulation_steps}")
    # A module that two models share is in the lists of both.
    parameters = list({id(parameter): parameter for parameter in parameters}.values())
    parallel = parallel_of(parameters)
    group = group or data_group(parallel)
    if broadcast_weights:
        _broadcast(forward_fn, model, parameters, parallel, group)
    if is_plain:
        parameters = _in_order_of(optimizer, parameters)
        gradient_fn = mindspore.value_and_grad(forward_fn, None, mindspore.ParameterTuple(parameters))
        gradient_fn = autograd_cleared_on_error(mindspore.jit(gradient_fn) if jit else gradient_fn)
    else:
        gradient_fn = torch_like().autograd.value_and_grad(forward_fn, tuple(parameters), attach_grads=False)
    model = model_of(forward_fn, parameters) if model is None else model
    check_values(_with_names(parameters, model), group)
    window: GradientWindow
    if reducer is not None:
        window = ReducerWindow(parameters, reducer, group)
    elif parallel is not None:
        window = parallel.window([(p.name_in_whole, p) for p in parameters], **exchange)
    else:
        window = GradientSynchronizer(parameters, group, **exchange)
    losses = LossMeter(window.group if parallel is None else parallel.group)
    scope = None
    if parallel is not None:
        parallel.check_optimizer(optimizer)
        scope = parallel.scope(parameters)
    updater = make_updater(optimizer, window, zero_stage, scheduler, scope)
    step = TrainStep(
        window, updater, losses, max_grad_norm=max_grad_norm, leave_out_bad_losses=leave_out_bad_losses,
        settle=None if parallel is None else parallel.settle,
    )  # fmt: skip
    passes = Passes(forward_fn, gradient_fn, parameters, parallel, window.group.rank)
    span_loss = SpanLoss(model if weight_of is None else None, losses.group)
    weight_of = weight_of or BatchWeigher(forward_fn, model)
    return FunctionalStep(step, passes, accumulation_steps, weight_of, seed=seed, span_loss=span_loss)


def _broadcast(
    forward_fn: Callable[..., Any], model: Any, parameters: Sequence[Any], parallel: Any, group: ProcessGroup
) -> None:
    """Give every rank rank 0's parameters, and all else that the models have which they belong to. A collective."""
    if parallel is not None:
        parallel.broadcast_weights()
        return
    models = modules_of(forward_fn, parameters) if model is None else [model]
    for each in models:
        broadcast_parameters(each, group)
    known = {id(weight) for each in models for _, weight in named_weights(each)}
    others = [(f"parameter {number}", p) for number, p in enumerate(parameters) if id(p) not in known]
    broadcast_parameters(others, group)


def _in_order_of(optimizer: Any, parameters: Sequence[Any]) -> list[Any]:
    """These parameters as an optimizer of ``mindspore.nn`` takes their gradients, which is by position."""
    ordered = list(optimizer.parameters)
    if {id(p) for p in ordered} != {id(p) for p in parameters}:
        theirs, ours = ({p.name for p in each} for each in (ordered, parameters))
        raise ValueError(
            "parameters must be those of the optimizer: "
            f"only the optimizer has {sorted(theirs - ours)}, and only parameters has {sorted(ours - theirs)}"
        )
    return ordered


def _with_names(parameters: Sequence[Any], model: Any) -> list[tuple[str, Any]]:
    """Parameters with their names in the model, where it has them; else with their numbers."""
    names = {} if model is None else {id(parameter): name for name, parameter in model.named_parameters()}
    return [(names.get(id(p), f"parameter {number}"), p) for number, p in enumerate(parameters)]


class FunctionalStep:
    """What :func:`make_train_step` makes.

    Attributes:
        num_updates: done so far.
        accumulation_steps: micro batches in an update, at most.
        train_step: the stages of an update, which are the Trainer's too.
        grad_norm: of the last averaged gradient, where gradients are clipped.
        synchronizer: the exchange.
        seed: what randomness inside the model is a function of, besides the rank, the update and the micro step.
    """

    def __init__(
        self,
        train_step: TrainStep,
        passes: Passes,
        accumulation_steps: int,
        weight_of: Callable[[Any], float],
        *,
        seed: int = 0,
        span_loss: Optional[SpanLoss] = None,
    ) -> None:
        self.train_step = train_step
        self._span_loss = span_loss or SpanLoss(None, train_step.synchronizer.group)
        self.seed = seed
        self._passes = passes
        self.accumulation_steps = accumulation_steps
        self._weight_of = weight_of
        self.num_updates = 0
        self.grad_norm: Optional[float] = None
        self.synchronizer: GradientWindow = train_step.synchronizer
        # Who drops the step may write to the weights, which ranks shared.
        weakref.finalize(self, train_step.updater.make_private).atexit = False

    def __call__(self, batches: Any) -> Optional[float]:
        """Do one update; returns this rank's mean loss, None when it had no sample. A collective.

        ``batches`` is one batch, or, with accumulation, a list of them; None stands for one that this rank has not.
        """
        window = [batches] if self.accumulation_steps == 1 else list(batches)
        if not 1 <= len(window) <= self.accumulation_steps:
            raise ValueError(
                f"expected 1 to {self.accumulation_steps} micro batches, got {len(window)} on rank "
                f"{self.synchronizer.group.label()}; None stands for one that a rank has not"
            )
        seen: list[tuple[float, float]] = []
        self.grad_norm = self.train_step(self._micro_steps(window, seen), self.num_updates)
        self.num_updates += 1
        weight = sum(weight for _, weight in seen)
        return sum(loss * weight for loss, weight in seen) / weight if weight else None

    def mean_loss(self) -> float:
        """The mean loss of all ranks since this was last called. A collective."""
        return self.train_step.losses.mean_since_log()

    def _micro_steps(self, window: list[Any], seen: list[tuple[float, float]]) -> Iterator[MicroStep]:
        with self._span_loss.window(window):
            for micro in self._passes.micro_steps(window, self._weigh, self._seed_of, self.synchronizer):
                if micro.weight > 0:
                    seen.append((micro.loss, micro.weight))
                yield micro

    def _weigh(self, batch: Any) -> float:
        return 0.0 if batch is None else checked_weight(self._weight_of(batch), self.synchronizer.group.label())

    def _seed_of(self, number: int) -> int:
        return step_seed(self.seed, self._passes.seed_rank, self.num_updates, number)
