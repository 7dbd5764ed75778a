"""This module defines the interface through which a train step runs an optimizer, and its replicated updaters.

These run an optimizer's own code on all parameters, on every rank. MindNLP's optimizers, like PyTorch's, read
``parameter.grad``; those of ``mindspore.nn`` are called with the gradients.
"""

from __future__ import annotations

import abc
import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import mindspore
import numpy as np

from mindnlp_dp.communication.default_group import get_process_group
from mindnlp_dp.communication.lazy_arrays import materialize
from mindnlp_dp.data_parallel.model_scope import ModelScope
from mindnlp_dp.data_parallel.synchronizer_base import InPlace, Synchronizer
from mindnlp_dp.runtime.arrays import inspection, number_of, read
from mindnlp_dp.runtime.mindnlp_api import mindnlp_api


def is_untouched(optimizer: Any) -> bool:
    """Return whether ``optimizer`` computes what its class does with default settings.

    It does not if it has step hooks, its ``step`` was replaced, or a group has maximize or amsgrad. (A scheduler also
    wraps ``step``, but only counts the calls.)
    """
    hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    own = vars(optimizer).get("step")
    if own is not None and not getattr(own, "_wrapped_by_lr_sched", False):
        return False
    if any(getattr(optimizer, name, None) for name in hooks):
        return False
    return not any(group.get("maximize") or group.get("amsgrad") for group in optimizer.param_groups)


@dataclass(frozen=True)
class StepResult:
    """The result of :meth:`Updater.step`, the same on every rank.

    Attributes:
        norm: The norm of the averaged gradient before clipping; None if gradients were not clipped.
        problem: Why the weights were not updated although there were gradients; an empty string if they were.
    """

    norm: Optional[float] = None
    problem: str = ""


def _no_span(name: str) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


class Updater(abc.ABC):
    """Interface of an optimizer for train steps; gradients are in the order of the parameters, and may be None.

    Attributes:
        scheduler: The scheduler that steps after every update; None without one, or if the optimizer has its own.
    """

    scheduler: Any = None
    # The ``in_place`` of the synchronizer's reduce(): whether gradients are read from its buckets.
    reads_buckets: InPlace = False
    # The sum of squares of the gradients, if the exchange has read it; else None.
    _sum_of_squares: Optional[float] = None

    def __init__(self, optimizer: Any, parameters: Sequence[Any]) -> None:
        self.optimizer = optimizer
        self.parameters = parameters

    def receive(self, gradients: Any, synchronizer: Synchronizer) -> Any:
        """Return the ``gradients`` that the other methods take, from what ``synchronizer.reduce`` has returned."""
        self._sum_of_squares = synchronizer.sum_of_squares
        return gradients

    def step(
        self,
        gradients: Any,
        max_norm: Optional[float] = None,
        *,
        span: Callable[[str], contextlib.AbstractContextManager[None]] = _no_span,
        on_problem: Callable[[str], None] = lambda problem: None,
        before_update: Optional[Callable[[], None]] = None,
        after_update: Callable[[], None] = lambda: None,
    ) -> StepResult:
        """Clip averaged gradients to ``max_norm``, update the weights, and step the scheduler. A collective.

        If the gradients are not finite, the weights stay, and the result says so. ``gradients`` are None for an update
        in which no micro-batch counted: then only the scheduler steps.

        Args:
            span: A function that returns a context for each stage of the update, such as one that measures it.
            on_problem: A function that is told why the weights stay; if it raises, the scheduler does not step.
            before_update: A function that is called between clipping and the update, and may look at the gradients.
            after_update: A function that is called when the weights are updated, before the scheduler steps.
        """
        result = StepResult()
        if gradients is not None:
            if max_norm and max_norm > 0:
                with span("clip"):
                    gradients, norm = self.clip(gradients, max_norm)
                problem = "" if math.isfinite(norm) else f"the norm of the averaged gradient is {norm}"
                result = StepResult(norm, problem)
            elif not self.are_finite(gradients):
                result = StepResult(problem="the averaged gradient holds NaN or infinity")
            if result.problem:
                on_problem(result.problem)
            else:
                if before_update is not None:
                    gradients = self.call_with_gradients(gradients, before_update)
                with span("update"):
                    self.update(gradients)
                    after_update()
        self.finish()
        self.release()
        return result

    def are_finite(self, gradients: Any) -> bool:
        """Return whether averaged gradients contain neither NaN nor infinity; the same on every rank."""
        if self._sum_of_squares is not None and math.isfinite(self._sum_of_squares):
            return True
        return inspection(get_process_group().on_device).are_finite([g for g in gradients if g is not None])

    def clip(self, gradients: Any, max_norm: float) -> tuple[Any, float]:
        """Scale all gradients so that their common norm is at most ``max_norm``; return them and the old norm."""
        norm = self.norm(gradients)
        if norm * norm > np.finfo(np.float32).max:
            # MindNLP's clipping does the same: if the square overflows float32, the gradient is not usable.
            norm = math.inf
        return self.scale(gradients, min(1.0, max_norm / (norm + 1e-6))), norm

    def call_with_gradients(self, gradients: Any, before_update: Callable[[], None]) -> Any:
        """Call a function while the averaged gradients are at their parameters, if this updater has them there.

        Returns the gradients to use, which the function may have changed.
        """
        before_update()
        return gradients

    def follows_optimizer(self) -> bool:
        """Return whether this updater still computes what the optimizer itself would compute, on this rank."""
        return True

    @abc.abstractmethod
    def norm(self, gradients: Any) -> float:
        """Return the norm of all averaged gradients of the full model."""

    @abc.abstractmethod
    def scale(self, gradients: Any, factor: float) -> Any:
        """Return averaged gradients times ``factor``."""

    @abc.abstractmethod
    def update(self, gradients: Sequence[Optional[Any]]) -> None: ...

    @abc.abstractmethod
    def finish(self) -> None:
        """End an update, made or left out: release its gradients and step the scheduler."""

    def release(self) -> None:  # noqa: B027 -- most read nothing that others write to
        """Let the other ranks write to memory that this rank has read, after an update. A collective."""

    def unshare(self) -> None:  # noqa: B027 -- most update memory that is this rank's alone
        """Move the parameters out of shared memory; the next update, if there is one, moves them back."""

    @abc.abstractmethod
    def parameter_names(self, model: Any) -> list[list[str]]:
        """Return the names in ``model`` of the parameters that the optimizer updates, by group."""

    @abc.abstractmethod
    def optimizer_state(self, *, keep: bool = True, sharded: bool = False) -> dict[str, Any]:
        """Return the full optimizer state, the same on every rank; a rank without ``keep`` may get it without arrays.

        The arrays are valid until the next update, which may change them.

        With ``sharded``, arrays that the ranks shard are not gathered: each is a
        :class:`~mindnlp_dp.runtime.sharded_array.ShardedArray`. A collective if the ranks shard the update.
        """

    @abc.abstractmethod
    def load_optimizer_state(self, saved: Mapping[str, Any]) -> None:
        """Load a result of :meth:`optimizer_state`; its arrays may still be on rank 0 only. A collective."""


class MindNLPUpdater(Updater):
    """Runs an optimizer of ``mindnlp.core.optim`` on every rank, with or without a scheduler.

    ``scope`` names the ranks that the model is sharded over.
    """

    def __init__(
        self, optimizer: Any, parameters: Sequence[Any], scheduler: Any = None, scope: Optional[ModelScope] = None
    ) -> None:
        super().__init__(optimizer, parameters)
        self.scheduler = scheduler
        self._scope = scope or ModelScope()

    def clip(self, gradients: Any, max_norm: float) -> tuple[Any, float]:
        # MindNLP computes the norm in the gradients' type: in float16, 10000 elements of value 3 overflow. On a device
        # it would be one more wait, and another norm than that of the other zero_stages.
        is_known = self._sum_of_squares is not None
        if is_known or not self._scope.is_full or any(p.dtype != mindspore.float32 for p in self.parameters):
            return super().clip(gradients, max_norm)
        self._attach(gradients)
        norm = mindnlp_api().nn.utils.clip_grad_norm_(self.parameters, max_norm)
        return [parameter.grad for parameter in self.parameters], number_of(norm)

    def are_finite(self, gradients: Any) -> bool:
        return super().are_finite(gradients) if self._scope.is_full else math.isfinite(self.norm(gradients))

    def norm(self, gradients: Sequence[Optional[Any]]) -> float:
        if self._sum_of_squares is not None and self._scope.is_full:
            return math.sqrt(self._sum_of_squares)
        return math.sqrt(self._scope.total(_sums_of_squares(gradients)))

    def scale(self, gradients: Sequence[Optional[Any]], factor: float) -> Sequence[Optional[Any]]:
        return _times(gradients, factor)

    def update(self, gradients: Sequence[Optional[Any]]) -> None:
        self._attach(gradients)
        self._step_on([p for p, gradient in zip(self.parameters, gradients) if gradient is not None])

    def _step_on(self, parameters: Sequence[Any]) -> None:
        """Let the optimizer update only these parameters; MindNLP's optimizers fail on one without a gradient."""
        wanted = set(map(id, parameters))
        groups = self.optimizer.param_groups
        everything = [group["params"] for group in groups]
        try:
            for group in groups:
                group["params"] = [p for p in group["params"] if id(p) in wanted]
            self.optimizer.step()
        finally:
            for group, full in zip(groups, everything):
                group["params"] = full

    def call_with_gradients(self, gradients: Any, before_update: Callable[[], None]) -> Any:
        self._attach(gradients)
        before_update()
        return [parameter.grad for parameter in self.parameters]

    def finish(self) -> None:
        # Some schedules ask the optimizer for the rate of parameters that have gradients, such as Adafactor's.
        self._step_scheduler()
        self._release_gradients()

    def _release_gradients(self) -> None:
        # The next update's result can then reuse the memory of these gradients.
        self._attach([None] * len(self.parameters))

    def _step_scheduler(self) -> None:
        # A plateau scheduler needs a metric, so it does not step after every update.
        if self.scheduler is not None and not isinstance(
            self.scheduler, mindnlp_api().optim.lr_scheduler.ReduceLROnPlateau
        ):
            self.scheduler.step()

    def parameter_names(self, model: Any) -> list[list[str]]:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        return [[names.get(id(p), "?") for p in group["params"]] for group in self.optimizer.param_groups]

    def optimizer_state(self, *, keep: bool = True, sharded: bool = False) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_optimizer_state(self, saved: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(materialize(dict(saved)))

    def _attach(self, gradients: Sequence[Optional[Any]]) -> None:
        for parameter, gradient in zip(self.parameters, gradients):
            parameter.grad = gradient


def _sums_of_squares(gradients: Sequence[Optional[Any]]) -> np.ndarray:
    """Return each gradient's sum of squares, 0 for None; fetched together, because a fetch waits for the device."""
    sums = np.zeros(len(gradients))
    found = [index for index, gradient in enumerate(gradients) if gradient is not None]
    if found:
        squares = [(gradients[index].astype(mindspore.float32) ** 2).sum() for index in found]  # type: ignore[union-attr]
        sums[found] = read(mindspore.ops.stack(squares))
    return sums


def _times(gradients: Sequence[Optional[Any]], factor: float) -> Sequence[Optional[Any]]:
    if factor >= 1.0:
        return gradients
    # A tensor is data; on a device an operator may be compiled for each value of a Python number.
    single = mindspore.Tensor(np.float32(factor))
    return [
        None if g is None else (g * (single if g.dtype == mindspore.float32 else factor)).astype(g.dtype)
        for g in gradients
    ]


class MindSporeUpdater(Updater):
    """Runs a ``mindspore.nn`` optimizer on every rank; its learning rate may be its own schedule."""

    def norm(self, gradients: Sequence[Optional[Any]]) -> float:
        if self._sum_of_squares is not None:
            return math.sqrt(self._sum_of_squares)
        return math.sqrt(float(_sums_of_squares(gradients).sum()))

    def scale(self, gradients: Sequence[Optional[Any]], factor: float) -> Sequence[Optional[Any]]:
        return _times(gradients, factor)

    def update(self, gradients: Sequence[Optional[Any]]) -> None:
        # These optimizers need a gradient for every parameter.
        full = [mindspore.ops.zeros_like(p) if g is None else g for p, g in zip(self.parameters, gradients)]
        self.optimizer(tuple(full))

    def finish(self) -> None:
        """Do nothing: the optimizer counts its steps itself."""

    def parameter_names(self, model: Any) -> list[list[str]]:
        return [[parameter.name for parameter in self.parameters]]

    def _own_parameters(self) -> dict[str, Any]:
        """Return the optimizer's own parameters: moments, the step, a learning rate, but not the model's weights."""
        weights = set(map(id, self.parameters))
        return {name: p for name, p in self.optimizer.parameters_dict().items() if id(p) not in weights}

    def optimizer_state(self, *, keep: bool = True, sharded: bool = False) -> dict[str, Any]:
        return {name: p.asnumpy().copy() for name, p in self._own_parameters().items()}

    def load_optimizer_state(self, saved: Mapping[str, Any]) -> None:
        own, saved = self._own_parameters(), materialize(dict(saved))
        if own.keys() != saved.keys():
            differing = ", ".join(sorted(own.keys() ^ saved.keys()))
            raise ValueError(f"the saved optimizer differs: only one of the two has {differing}")
        for name, parameter in own.items():
            parameter.set_data(mindspore.Tensor(saved[name]))
