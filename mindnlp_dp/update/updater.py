"""An optimizer as the step sees it; those of MindNLP and MindSpore, whose own code every rank runs on all parameters.

Goes in: the gradients that every rank has. Comes out: the same new weights on every rank. MindNLP's optimizers, like
PyTorch's, read ``parameter.grad``; those of ``mindspore.nn`` are called with the gradients.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import mindspore
import numpy as np

from mindnlp_dp.arrays.inspection import inspection
from mindnlp_dp.communication.arrays_to_come import fetch_all
from mindnlp_dp.communication.process_group import get_process_group
from mindnlp_dp.gradients.window import GradientWindow
from mindnlp_dp.runtime.torch_like import torch_like

from .model_scope import ModelScope


def is_untouched(optimizer: Any) -> bool:
    """Whether ``optimizer`` does what its class says, by default settings.

    It does not when it has step hooks, another ``step`` was put into it, or a group maximises or uses AMSGrad. (A
    scheduler wraps ``step``, too, but only counts.)
    """
    hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    own = vars(optimizer).get("step")
    if own is not None and not getattr(own, "_wrapped_by_lr_sched", False):
        return False
    if any(getattr(optimizer, name, None) for name in hooks):
        return False
    return not any(group.get("maximize") or group.get("amsgrad") for group in optimizer.param_groups)


class Updater(abc.ABC):
    """An optimizer, and the parameters that it updates; gradients are in their order, None where there is none.

    Attributes:
        scheduler: steps after every update; None where there is none, or the optimizer has a schedule of its own.
        is_divided: whether a rank has no more than a part of the optimizer's state.
    """

    scheduler: Any = None
    is_divided = False

    def __init__(self, optimizer: Any, parameters: Sequence[Any]) -> None:
        self.optimizer = optimizer
        self.parameters = parameters

    def average(self, window: GradientWindow) -> Any:
        """Exchange a window: what the other methods take as gradients. A collective."""
        return window.reduce()

    def are_finite(self, gradients: Any) -> bool:
        """Whether averaged gradients hold neither NaN nor infinity; the same on every rank."""
        return inspection(get_process_group().on_device).are_finite([g for g in gradients if g is not None])

    def clip(self, gradients: Any, max_norm: float) -> tuple[Any, float]:
        """Scale gradients down to a norm of at most ``max_norm``, together; returns them and the norm they had."""
        norm = self.norm(gradients)
        if norm * norm > np.finfo(np.float32).max:
            # As with MindNLP's clipping: beyond what float32 can square, a gradient is no direction to go in.
            norm = math.inf
        return self.scaled(gradients, min(1.0, max_norm / (norm + 1e-6))), norm

    def follows_optimizer(self) -> bool:
        """Whether this still does what the optimizer would do by itself, on this rank."""
        return True

    @abc.abstractmethod
    def norm(self, gradients: Any) -> float:
        """Of averaged gradients, all together, of the whole model."""

    @abc.abstractmethod
    def scaled(self, gradients: Any, factor: float) -> Any:
        """Averaged gradients times ``factor``."""

    @abc.abstractmethod
    def update(self, gradients: Sequence[Optional[Any]]) -> None: ...

    @abc.abstractmethod
    def finish(self) -> None:
        """An update is over, be it made or left out: nothing holds on to its gradients, and the schedule goes on."""

    def release(self) -> None:  # noqa: B027 -- most read nothing that others write to
        """Behind :meth:`finish`: let the others write to what this rank has read for its update. A collective."""

    def make_private(self) -> None:  # noqa: B027 -- most update memory that is this rank's alone
        """Take the parameters out of memory that ranks share; the next update, if there is one, puts them back."""

    @abc.abstractmethod
    def parameter_names(self, model: Any) -> list[list[str]]:
        """What the optimizer updates, by group, by the names in ``model``."""

    @abc.abstractmethod
    def optimizer_state(self, *, keep: bool = True) -> dict[str, Any]:
        """A tree of plain data, the same on every rank, except that one that does not ``keep`` it has no arrays.

        A collective where ranks divide the update.
        """

    @abc.abstractmethod
    def load_optimizer_state(self, saved: Mapping[str, Any]) -> None:
        """Take over what :meth:`optimizer_state` gave, or its outline with arrays that are to come. A collective."""


class MindNLPUpdater(Updater):
    """For ``mindnlp.core.optim``, with a scheduler or without.

    ``scope`` says over which ranks the model is spread.
    """

    def __init__(
        self, optimizer: Any, parameters: Sequence[Any], scheduler: Any = None, scope: Optional[ModelScope] = None
    ) -> None:
        super().__init__(optimizer, parameters)
        self.scheduler = scheduler
        self._scope = scope or ModelScope()

    def clip(self, gradients: Any, max_norm: float) -> tuple[Any, float]:
        # MindNLP takes the norm in the gradients' type: in float16 ten thousand elements of 3 have an infinite one.
        if not self._scope.is_whole or any(p.dtype != mindspore.float32 for p in self.parameters):
            return super().clip(gradients, max_norm)
        self._attach(gradients)
        norm = torch_like().nn.utils.clip_grad_norm_(self.parameters, max_norm)
        return [parameter.grad for parameter in self.parameters], float(norm.asnumpy())

    def are_finite(self, gradients: Any) -> bool:
        return super().are_finite(gradients) if self._scope.is_whole else math.isfinite(self.norm(gradients))

    def norm(self, gradients: Sequence[Optional[Any]]) -> float:
        return math.sqrt(self._scope.total(_sums_of_squares(gradients)))

    def scaled(self, gradients: Sequence[Optional[Any]], factor: float) -> Sequence[Optional[Any]]:
        return _times(gradients, factor)

    def update(self, gradients: Sequence[Optional[Any]]) -> None:
        self._attach(gradients)
        self._step_on([p for p, gradient in zip(self.parameters, gradients) if gradient is not None])

    def _step_on(self, parameters: Sequence[Any]) -> None:
        """Let the optimizer update these only; MindNLP's stumble over parameters without a gradient."""
        wanted = set(map(id, parameters))
        groups = self.optimizer.param_groups
        everything = [group["params"] for group in groups]
        try:
            for group in groups:
                group["params"] = [p for p in group["params"] if id(p) in wanted]
            self.optimizer.step()
        finally:
            for group, whole in zip(groups, everything):
                group["params"] = whole

    def finish(self) -> None:
        # The next window's result can then have this one's memory.
        self._attach([None] * len(self.parameters))
        # A plateau scheduler steps when there is a metric to look at.
        if self.scheduler is not None and not isinstance(
            self.scheduler, torch_like().optim.lr_scheduler.ReduceLROnPlateau
        ):
            self.scheduler.step()

    def parameter_names(self, model: Any) -> list[list[str]]:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        return [[names.get(id(p), "?") for p in group["params"]] for group in self.optimizer.param_groups]

    def optimizer_state(self, *, keep: bool = True) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_optimizer_state(self, saved: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(fetch_all(dict(saved)))

    def _attach(self, gradients: Sequence[Optional[Any]]) -> None:
        for parameter, gradient in zip(self.parameters, gradients):
            parameter.grad = gradient


def _sums_of_squares(gradients: Sequence[Optional[Any]]) -> np.ndarray:
    """Of each gradient, as float64; 0 where there is none. Fetched at once: every fetch waits for the device."""
    sums = np.zeros(len(gradients))
    found = [index for index, gradient in enumerate(gradients) if gradient is not None]
    if found:
        squares = [(gradients[index].astype(mindspore.float32) ** 2).sum() for index in found]  # type: ignore[union-attr]
        sums[found] = mindspore.ops.stack(squares).asnumpy()
    return sums


def _times(gradients: Sequence[Optional[Any]], factor: float) -> Sequence[Optional[Any]]:
    if factor >= 1.0:
        return gradients
    return [None if g is None else (g * factor).astype(g.dtype) for g in gradients]


class MindSporeUpdater(Updater):
    """For ``mindspore.nn``'s optimizers, whose learning rate may be a schedule of their own."""

    def norm(self, gradients: Sequence[Optional[Any]]) -> float:
        return math.sqrt(float(_sums_of_squares(gradients).sum()))

    def scaled(self, gradients: Sequence[Optional[Any]], factor: float) -> Sequence[Optional[Any]]:
        return _times(gradients, factor)

    def update(self, gradients: Sequence[Optional[Any]]) -> None:
        # They want a gradient for every parameter.
        full = [mindspore.ops.zeros_like(p) if g is None else g for p, g in zip(self.parameters, gradients)]
        self.optimizer(tuple(full))

    def finish(self) -> None:
        """The optimizer counts its own steps."""

    def parameter_names(self, model: Any) -> list[list[str]]:
        return [[parameter.name for parameter in self.parameters]]

    def _own_parameters(self) -> dict[str, Any]:
        """Moments, the step, a learning rate: what the optimizer keeps beside the network's weights."""
        weights = set(map(id, self.parameters))
        return {name: p for name, p in self.optimizer.parameters_dict().items() if id(p) not in weights}

    def optimizer_state(self, *, keep: bool = True) -> dict[str, Any]:
        return {name: p.asnumpy().copy() for name, p in self._own_parameters().items()}

    def load_optimizer_state(self, saved: Mapping[str, Any]) -> None:
        own, saved = self._own_parameters(), fetch_all(dict(saved))
        if own.keys() != saved.keys():
            differing = ", ".join(sorted(own.keys() ^ saved.keys()))
            raise ValueError(f"the saved optimizer is another one: only one of the two has {differing}")
        for name, parameter in own.items():
            parameter.set_data(mindspore.Tensor(saved[name]))
