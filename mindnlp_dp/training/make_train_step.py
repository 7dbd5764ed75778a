"""Builds the data-parallel train step of a custom training loop, for MindNLP models and plain MindSpore cells.

The user calls :func:`make_train_step` with a loss function, an optimizer and parameters. The step that it returns does
one update from this rank's part of a global batch, in the same stages as the Trainer (:mod:`mindnlp_dp.training`)::

    step = dp.make_train_step(forward_fn, optimizer, parameters, model=model)
    for batch in batches:                       # the batches of this rank
        loss = step(batch)
"""

from __future__ import annotations

import functools
import math
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Callable, Optional, Union

import mindspore

from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.communication.replicas import broadcast_parameters
from mindnlp_dp.data.batches import call_with
from mindnlp_dp.data_parallel.naive_synchronizer import ExternalReducer
from mindnlp_dp.data_parallel.sync_batchnorm import has_synchronized_layers
from mindnlp_dp.data_parallel.synchronizer_base import MicroStep, Synchronizer
from mindnlp_dp.optim.updater_factory import (
    check_matrices,
    check_zero_stage,
    make_updater,
    warn_of_parameters_left_out,
)
from mindnlp_dp.parallel.distributed_model import DistributedModel, ReplicatedModel, replicated_model_on_all_ranks
from mindnlp_dp.parallel.mixed_precision import mixed_precision_of
from mindnlp_dp.runtime.autograd import autograd_cleared_on_error
from mindnlp_dp.runtime.mindnlp_api import mindnlp_api
from mindnlp_dp.runtime.named_weights import named_weights
from mindnlp_dp.runtime.recompute import has_recomputed_layers
from mindnlp_dp.training.adapter_gradients import adapter_check
from mindnlp_dp.training.find_model import BatchWeigher, is_module, model_of, modules_of
from mindnlp_dp.training.forward_backward import GLOBAL, ForwardBackward, across_ranks, check_dropout
from mindnlp_dp.training.loss_check import LossCheck
from mindnlp_dp.training.metrics import LossMeter
from mindnlp_dp.training.span_loss import SpanLoss
from mindnlp_dp.training.train_step import TrainStep
from mindnlp_dp.training.uninitialized_weights import check_values


def make_train_step(
    forward_fn: Callable[..., Any],
    optimizer: Any,
    parameters: Sequence[Any],
    *,
    accumulation_steps: int = 1,
    max_grad_norm: Optional[float] = None,
    scheduler: Any = None,
    loss_weight_of: Optional[Callable[[Any], float]] = None,
    model: Any = None,
    reducer: Optional[Callable[..., Any]] = None,
    jit: bool = False,
    seed: int = 0,
    dropout: str = GLOBAL,
    router_loss: str = GLOBAL,
    leave_out_bad_losses: bool = True,
    zero_stage: Union[int, str] = "auto",
    group: Optional[ProcessGroup] = None,
    **synchronizer_options: Any,
) -> FunctionalStep:
    """Return a train step that every rank calls once per update, with its own part of the global batch.

    Before the first update, rank 0's weights and buffers, including frozen ones, are copied to all ranks, as the
    Trainer does.

    Args:
        forward_fn: function from a batch to its mean loss, a scalar tensor. A mapping is passed as keyword arguments
            (its NumPy arrays as tensors), a tuple or list as positional arguments, anything else as the only argument.
        optimizer: an optimizer of MindNLP (``mindnlp.core.optim``) or of ``mindspore.nn``.
        parameters: the parameters to update; duplicates are ignored.
        accumulation_steps: number of micro-batches per update. Above 1, the step is called with a list of that many
            micro-batches, or fewer at the end of the data; ranks may pass different numbers.
        max_grad_norm: maximum global norm, to which the averaged gradients are clipped; None does not clip.
        scheduler: a MindNLP scheduler, stepped after every update. (``mindspore.nn`` optimizers have their schedule.)
        loss_weight_of: function from a batch to the weight of its loss in the mean over ranks and micro-batches. By
            default it counts what the loss of the model's class is a mean of
            (:func:`~mindnlp_dp.data.loss_weight.loss_mean`): rows for a classifier, labels that are not -100 for a
            language model, rows if the class is unknown. Pass it
            if ``forward_fn`` computes a custom loss; :func:`~mindnlp_dp.count_labels` counts labels.
        model: the model that ``forward_fn`` calls. Several ranks get a warning without it, and the model is then the
            one that ``forward_fn`` refers to and that has ``parameters``.
        reducer: function that exchanges the gradients instead of our synchronizer, such as
            ``nn.DistributedGradReducer(parameters)``.
        jit: compile loss and gradients with ``mindspore.jit``; only for plain cells.
        seed: seed of the randomness in ``forward_fn``, such as dropout. The random numbers differ between updates, and
            a resumed run draws the same ones.
        dropout: "global": each sample has its own dropout mask, a function of the seed, the update and its position in
            the global batch, so that any number of ranks and micro-steps trains the same model. It needs a CPU and
            the batches of :func:`~mindnlp_dp.make_loader`, which know the positions. "per-rank", and where something
            is missing: each rank and micro-step draws its own masks.
        router_loss: the load-balancing loss of a mixture of experts looks at the tokens of all ranks ("global"), as
            one process would, or of this rank ("local").
        leave_out_bad_losses: leave out a loss that is NaN or infinite, with a warning; otherwise it is an error on all
            ranks.
        zero_stage: 0: every rank updates all parameters. 1: each rank updates one slice and holds only its optimizer
            state. 2: it holds only the averaged gradients of its slice, too. 3: and only its shards of the weights, for
            a model that was passed to :func:`~mindnlp_dp.fully_shard`. The weights are bitwise the same on a
            CPU; on a device they are equal to rounding. "auto" divides the update where the ranks of a host can share
            one set of weights, and prints its choice. Pass 0 if your code writes to weights between updates, because
            ranks that share weights would all write to the same memory. The weights become private to each rank again
            when the step is deleted (``del step``).
        group: the ranks that split the samples; by default those of the model's mesh, otherwise all ranks.
        synchronizer_options: options of :class:`~mindnlp_dp.GradientSynchronizer`, such as ``overlap`` and
            ``compression``.

    Raises:
        ValueError: options exclude each other, or the mesh shards models but this model is not sharded.
        ReplicaMismatchError: the models of the ranks differ in names, shapes or types.

    Examples:
        >>> import numpy as np
        >>> import mindnlp_dp as dp
        >>> from mindspore import nn
        >>> group = dp.init_process_group()
        >>> network, loss_fn = nn.Dense(4, 2), nn.CrossEntropyLoss()
        >>> def forward_fn(features, labels):
        ...     return loss_fn(network(features), labels)
        >>> parameters = network.trainable_params()
        >>> optimizer = nn.SGD(parameters, learning_rate=1.0)
        >>> step = dp.make_train_step(forward_fn, optimizer, parameters, model=network)
        >>> mine = slice(group.rank, None, group.world_size)  # this rank's samples of each batch
        >>> features, labels = np.eye(4, dtype=np.float32)[mine], np.array([0, 1, 0, 1], np.int32)[mine]
        >>> losses = [float(step({"features": features, "labels": labels})) for _ in range(10)]
        >>> losses[-1] < losses[0]
        True
    """
    is_plain = isinstance(optimizer, mindspore.nn.Optimizer)
    options = {"accumulation_steps": accumulation_steps, "scheduler": scheduler, "reducer": reducer, "seed": seed}
    _check_options(is_plain=is_plain, jit=jit, synchronizer_options=synchronizer_options, **options)
    # The parameters of a module that two models share are in the lists of both.
    parameters = list({id(parameter): parameter for parameter in parameters}.values())
    distributed = next((p.parallel for p in parameters if getattr(p, "parallel", None) is not None), None)
    if distributed is None:
        distributed = replicated_model_on_all_ranks(model) if group is None else ReplicatedModel(model, group)
    group = group or distributed.group
    _broadcast(forward_fn, model, parameters, distributed, group)
    if is_plain:
        parameters = _in_order_of(optimizer, parameters)
        gradient_fn = mindspore.value_and_grad(forward_fn, None, mindspore.ParameterTuple(parameters))
        gradient_fn = autograd_cleared_on_error(mindspore.jit(gradient_fn) if jit else gradient_fn)
    else:
        gradient_fn = mindnlp_api().autograd.value_and_grad(forward_fn, tuple(parameters), attach_grads=False)
    model = _found(forward_fn, parameters, group) if model is None else model
    # A plain cell may be the forward function itself.
    trained = forward_fn if model is None else model
    used = {id(each): each for each in [*modules_of(forward_fn, parameters), trained] if is_module(each)}
    if jit and any(map(has_synchronized_layers, used.values())):
        raise ValueError("jit=True cannot compile the layers of convert_sync_batchnorm; leave one of them out")
    if jit and any(map(has_recomputed_layers, used.values())):
        raise ValueError("enable_recompute is for PyNative mode; with jit=True call the cells' own recompute() method")
    named = _with_names(parameters, model)
    check_values(named, group)
    if not is_plain:
        # An optimizer of mindspore.nn has exactly these parameters.
        warn_of_parameters_left_out(optimizer, named, group)
        check_matrices(optimizer, model)
    synchronizer: Synchronizer
    if reducer is not None:
        synchronizer = ExternalReducer(parameters, reducer, group)
    else:
        exchanged = [(getattr(p, "full_name", str(number)), p) for number, p in enumerate(parameters)]
        synchronizer = distributed.make_synchronizer(exchanged, **synchronizer_options)
    losses = LossMeter(distributed.group)
    distributed.check_optimizer(optimizer, parameters)
    stage = distributed.zero_stage(check_zero_stage(zero_stage))
    updater = make_updater(optimizer, synchronizer, stage, scheduler, distributed.scope(parameters))
    precision = mixed_precision_of(model)
    if precision is not None:
        precision.check_parameters()
    step = TrainStep(
        synchronizer, updater, losses, max_grad_norm=max_grad_norm, leave_out_bad_losses=leave_out_bad_losses,
        resync_tied_weights=distributed.resync_tied_weights,
        adapters=adapter_check(model, parameters, distributed.world), precision=precision,
    )  # fmt: skip
    span_loss = SpanLoss(model if loss_weight_of is None else None, losses.group)

    loss_of, weigher = functools.partial(call_with, forward_fn), loss_weight_of or BatchWeigher(forward_fn, model)
    rows = across_ranks(group, router_loss, trained)
    # In 16 bits, two halves of a batch differ by more than a check tolerates.
    is_checked = loss_weight_of is None and not jit and not distributed.is_sharded and precision is None
    check = LossCheck(loss_of, weigher, list(used.values()), rows, "the loss of forward_fn") if is_checked else None

    def gradients_of(inputs: Any) -> tuple[Any, Sequence[Any]]:
        loss, gradients = call_with(gradient_fn, inputs)
        return _checked_loss(loss), gradients

    forward_backward = ForwardBackward(
        distributed, synchronizer, gradients_of, loss_of, weigher, step.timeline, rows, dropout=check_dropout(dropout),
        loss_check=check,
    )  # fmt: skip
    return FunctionalStep(step, forward_backward, accumulation_steps, span_loss, seed)


def _checked_loss(loss: Any) -> Any:
    """Return what ``forward_fn`` returned; raise an error if it is not a scalar tensor."""
    if not hasattr(loss, "asnumpy"):
        raise TypeError(
            f"forward_fn must return its loss as a tensor, so that it has a gradient; it returned {type(loss).__name__}"
        )
    # MindNLP 0.5 makes ``size`` a method, as in PyTorch.
    if math.prod(loss.shape) != 1:
        raise ValueError(
            f"forward_fn must return one loss, the mean of its micro-batch; it returned a tensor of shape "
            f"{tuple(loss.shape)}"
        )
    return loss


def _check_options(
    *,
    is_plain: bool,
    jit: bool,
    accumulation_steps: int,
    scheduler: Any,
    reducer: Any,
    seed: int,
    synchronizer_options: dict[str, Any],
) -> None:
    """Raise ValueError for options that exclude each other, or are out of range; turn overlap off for ``jit``."""
    if jit and not is_plain:
        raise ValueError(
            "jit=True is for plain cells with an optimizer of mindspore.nn; MindNLP's models run in PyNative"
        )
    if scheduler is not None and is_plain:
        raise ValueError("mindspore.nn's optimizers take a schedule as their learning_rate; leave scheduler out")
    if reducer is not None and synchronizer_options:
        raise ValueError(
            f"{', '.join(synchronizer_options)}: options of our own exchange, which a reducer takes the place of"
        )
    if jit and reducer is None and synchronizer_options.setdefault("overlap", False) is not False:
        raise ValueError(
            "overlap needs the parameters' hooks, which mindspore.jit cannot compile; leave one of them out"
        )
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}")
    if accumulation_steps < 1:
        raise ValueError(f"accumulation_steps must be at least 1, got {accumulation_steps}")


def _broadcast(
    forward_fn: Callable[..., Any],
    model: Any,
    parameters: Sequence[Any],
    distributed: DistributedModel,
    group: ProcessGroup,
) -> None:
    """Broadcast rank 0's parameters, and all other weights and buffers of the models that have them. A collective."""
    if distributed.is_sharded:
        distributed.broadcast_weights()
        return
    models = modules_of(forward_fn, parameters) if model is None else [model]
    for each in models:
        broadcast_parameters(each, group)
    known = {id(weight) for each in models for _, weight in named_weights(each)}
    others = [(f"parameter {number}", p) for number, p in enumerate(parameters) if id(p) not in known]
    broadcast_parameters(others, group)


def _found(forward_fn: Callable[..., Any], parameters: Sequence[Any], group: ProcessGroup) -> Optional[Any]:
    """Return the model that ``forward_fn`` refers to, or None; rank 0 of several warns which one it is."""
    model = model_of(forward_fn, parameters)
    if model is not None and group.world_size > 1 and group.is_main:
        warnings.warn(
            f"make_train_step: model= is missing, and {type(model).__name__} was found in forward_fn; pass the model, "
            "whose class defines what its loss is the mean of",
            stacklevel=3,
        )
    return model


def _in_order_of(optimizer: Any, parameters: Sequence[Any]) -> list[Any]:
    """Return the parameters in the optimizer's order: a ``mindspore.nn`` optimizer takes gradients by position."""
    ordered = list(optimizer.parameters)
    if {id(p) for p in ordered} != {id(p) for p in parameters}:
        theirs, ours = ({p.name for p in each} for each in (ordered, parameters))
        raise ValueError(
            "parameters must be those of the optimizer: "
            f"only the optimizer has {sorted(theirs - ours)}, and only parameters has {sorted(ours - theirs)}"
        )
    return ordered


def _with_names(parameters: Sequence[Any], model: Any) -> list[tuple[str, Any]]:
    """Return each parameter with its name in the model, or with its number if the model does not have it."""
    # A cell of mindspore.nn has another name for it.
    named: Any = getattr(model, "named_parameters", getattr(model, "parameters_and_names", list))
    names = {id(parameter): name for name, parameter in named()}
    return [(names.get(id(p), f"parameter {number}"), p) for number, p in enumerate(parameters)]


class FunctionalStep:
    """The train step of a custom loop, made by :func:`make_train_step`.

    Attributes:
        num_updates: number of updates done so far.
        accumulation_steps: maximum number of micro-batches per update.
        train_step: the stages of an update, which the Trainer also uses.
        grad_norm: norm of the last averaged gradient before clipping; None if gradients are not clipped.
        synchronizer: the object that exchanges the gradients.
        seed: seed of the randomness inside the model.
    """

    def __init__(
        self,
        train_step: TrainStep,
        forward_backward: ForwardBackward,
        accumulation_steps: int,
        span_loss: SpanLoss,
        seed: int,
    ) -> None:
        self.train_step = train_step
        self._span_loss = span_loss
        self.seed = seed
        self._forward_backward = forward_backward
        self.accumulation_steps = accumulation_steps
        self.num_updates = 0
        self.grad_norm: Optional[float] = None
        self.synchronizer: Synchronizer = train_step.synchronizer
        # After the step is deleted, the user may write to the weights, so ranks must no longer share their memory.
        weakref.finalize(self, train_step.updater.unshare).atexit = False

    def __call__(self, batches: Any) -> Optional[float]:
        """Do one update; return this rank's mean loss, or None if it had no samples. A collective.

        ``batches`` is one batch or, with accumulation, a list of micro-batches; None replaces a batch that this rank
        does not have.
        """
        if self.accumulation_steps > 1 and isinstance(batches, Mapping):
            raise TypeError(
                f"accumulation_steps is {self.accumulation_steps}, so a step takes a list of micro-batches, got a "
                f"dict on rank {self.synchronizer.group.label()}; pass [batch] for one micro-batch"
            )
        is_one = batches is None or self.accumulation_steps == 1
        micro_batches = [batches] if is_one else list(batches)
        if not 1 <= len(micro_batches) <= self.accumulation_steps:
            raise ValueError(
                f"expected 1 to {self.accumulation_steps} micro-batches, got {len(micro_batches)} on rank "
                f"{self.synchronizer.group.label()}; None stands for one that a rank has not"
            )
        self.grad_norm = self.train_step(micro_batches, self.num_updates, self._run_passes)
        self.num_updates += 1
        seen = self.train_step.last_losses
        weight = sum(weight for _, weight in seen)
        return sum(loss * weight for loss, weight in seen) / weight if weight else None

    def mean_loss(self) -> float:
        """Return the mean loss over all ranks since the last call of this method. A collective."""
        return self.train_step.losses.mean_since_log()

    def _run_passes(self, micro_batches: Sequence[Optional[Any]], step: int) -> Iterator[MicroStep]:
        with self._span_loss.correct_losses(micro_batches):
            yield from self._forward_backward.micro_steps(micro_batches, step, self.seed)
